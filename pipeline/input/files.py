"""Lists input files, finds their formats, reads Parquet footers, and checks that a pinned file is unchanged."""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from actors.engine.errors import UserError, flat
from pipeline.config.input import InputConfig, InputFormat
from pipeline.config.job import StorageConfig
from pipeline.messages import is_unicode, where_sought
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.errors import NoSuchBucket
from pipeline.storage.folder import filesystem
from pipeline.storage.working_dir import local_version, portable

Files = Mapping[str, tuple[int, str]]  # URL -> (bytes, version)
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    "csv": (".csv", ".csv.gz"),
}
HIDDEN = re.compile(r"[_.]")
INT96_UNIT = "us"  # unit in which Spark's INT96 timestamps are read; in ns, dates after 2262 would be silently wrong
_TABLE_FILE = re.compile(r"(?P<folder>.+?)/((?P<mark>_delta_log|\.hoodie)/|metadata/[^/]+\.metadata\.json/?$)")
_TABLES = {  # folder that marks a table -> kind of table, and remedy
    "_delta_log": ("a Delta table", "list its files as configs/recipes/lakehouse does"),
    ".hoodie": ("a Hudi table", "write its current rows to Parquet files elsewhere"),
    None: ("an Iceberg table", "list its files as configs/recipes/lakehouse does"),
}
ENCODINGS = {  # that Arrow reads; BIT_PACKED is only for levels
    *("PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED", "BYTE_STREAM_SPLIT"),
    *("DELTA_BINARY_PACKED", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"),
}


@dataclass(frozen=True)
class InputFile:
    """An input file whose size and version are recorded (pinned). A row group of a text file is a range of records."""

    url: str  # absolute path, s3:// URL, or working-dir:// URL (see `portable`)
    size: int  # bytes
    version: str  # ETag in S3; see `local_version`
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]  # uncompressed
    digest: str = ""  # SHA-256 of a local file, "" if none is recorded
    format: str = "parquet"  # parquet, jsonl or csv

    @property
    def rows(self) -> int:
        return sum(self.group_rows)


def file_format(url: str, given: InputFormat | None) -> str:
    """Return parquet, jsonl or csv: from `given` (`input.format`) if set, else from the suffix, else parquet."""
    if given is not None:
        return "jsonl" if given == "openai_batch" else given
    return next((kind for kind, suffixes in SUFFIXES.items() if url.lower().endswith(suffixes)), "parquet")


def list_files(
    paths: Sequence[str], storage: StorageConfig, given: InputFormat | None = None, *, may_be_empty: bool = False
) -> dict[str, tuple[int, str]]:
    """Return URL -> (bytes, version) of each input file, in the order of `paths`; within a path, sorted by name.

    Follow links. In folders and globs, skip files and folders whose names begin with `_` or `.`.

    Args:
        paths: files, folders or globs, local or s3://. A path that exists is not a glob, even if it looks like one.
        given: `input.format`, default Parquet. In a folder, only files with a suffix of this format are listed.
        may_be_empty: accept a folder or glob without files. In S3 a folder disappears with its last file.

    Raises UserError if a path matches no file, cannot be read, is a broken link, or (if `given` is None) is a table.
    """

    def listed(path: str) -> dict[str, tuple[int, str]]:
        fs, inside = filesystem(path, storage)
        is_local = isinstance(fs, LocalFileSystem)
        try:
            found, nothing = _named(path, fs, inside, given)
        except UserError:
            raise
        except (PermissionError, NoSuchBucket, ValueError) as error:
            raise UserError(f"{path}: cannot be listed: {flat(error)}") from None
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            if may_be_empty and not is_local and is_missing:
                return {}
            if is_local and (is_missing or error.errno == errno.ELOOP) and os.path.islink(error.filename or ""):
                raise UserError(f"{error.filename}: broken link; restore the file there, or remove the link") from None
            if not is_missing:
                raise
            raise UserError(f"{path}: no such file or folder{where_sought(path)}") from None
        if not found and not may_be_empty:
            raise UserError(nothing)
        for name in found:
            if not is_unicode(name):
                shown = os.fsencode(name).decode(errors="replace")
                raise UserError(f"{shown}: the file name is not UTF-8; rename the file")
        return {portable(name) if is_local else f"s3://{name}": found[name] for name in sorted(found)}

    return {url: entry for files in in_parallel(listed, paths) for url, entry in files.items()}


def _named(
    path: str, fs: fsspec.AbstractFileSystem, inside: str, given: InputFormat | None
) -> tuple[dict[str, tuple[int, str]], str]:
    """Return the files at `path` as name -> (bytes, version), and the error message to use if there are none."""
    entry: dict[str, Any] | None = None
    try:
        entry = fs.info(inside)  # this asks for the object first, so one object can be read without listing its bucket
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # a store may deny access to a missing name
        if not glob.has_magic(inside):
            raise
    is_folder = entry is not None and entry["type"] == "directory"
    folder = inside if is_folder else fixed_part(inside) if entry is None else os.path.dirname(inside)
    if given is None:
        with suppress(PermissionError):  # the user may have no access to the folders above
            _check_no_table(fs, folder)
    if entry is None:
        nothing = f"{path}: matches no file{where_sought(path)}; names that begin with _ or . are ignored"
        return _files_below(fs, folder, inside, given), nothing
    if not is_folder:
        size_and_version = int(entry["size"]), _version(entry, fs, inside)
        return {inside: size_and_version} if entry["type"] == "file" else {}, f"{path}: neither a file nor a folder"
    below = _files_below(fs, inside, None, given)
    suffixes = SUFFIXES[file_format("", given)]
    nothing = f"{path}: folder without {suffixes[0]} files"
    others = sorted({kind for kind, ends in SUFFIXES.items() if any(name.lower().endswith(ends) for name in below)})
    if others and given is None:
        nothing += f"; it has {' and '.join(others)} files: set input.format"
    return {name: entry for name, entry in below.items() if name.lower().endswith(suffixes)}, nothing


def fixed_part(pattern: str) -> str:
    """Return the folders of a glob that come before its first name with a wildcard."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern


def _files_below(
    fs: fsspec.AbstractFileSystem, folder: str, pattern: str | None, given: InputFormat | None
) -> dict[str, tuple[int, str]]:
    """Return name -> (bytes, version) of all files below `folder`, or only of files that match the glob `pattern`."""
    if isinstance(fs, LocalFileSystem):
        return _local_files(fs, folder, pattern, given) if os.path.isdir(folder) else {}
    entries = fs.find(folder, detail=True) if pattern is None else fs.glob(pattern, detail=True)
    if given is None:
        for name in entries:
            _refuse_table(name, fs)
    return {
        name: (int(entry["size"]), _version(entry, fs, name))
        for name, entry in entries.items()
        if entry["type"] == "file" and not any(map(HIDDEN.match, name[len(folder) :].split("/")))
        if not name.endswith("/")  # skip the object that marks an empty folder
    }


def _local_files(
    fs: LocalFileSystem, folder: str, pattern: str | None, given: InputFormat | None
) -> dict[str, tuple[int, str]]:
    """List local files as `_files_below` does."""
    matches = re.compile(".*" if pattern is None else glob_translate(pattern)).match
    max_depth = None if pattern is None or "**" in pattern else pattern[len(folder.rstrip("/")) :].count("/")
    found: dict[str, tuple[int, str]] = {}
    for entry in _entries(folder, max_depth, ()):
        if given is None:
            _refuse_table(f"{entry.path}/", fs)
        if not HIDDEN.match(entry.name) and (entry.is_file() or entry.is_symlink()) and matches(entry.path):
            status = entry.stat()  # raises FileNotFoundError for a broken link
            if not entry.is_dir():
                found[entry.path] = status.st_size, local_version(entry.path, status)
    return found


def _entries(folder: str, max_depth: int | None, above: tuple[str, ...]) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a folder. Follow links, except a link to one of the folders `above` it."""
    here = os.path.realpath(folder)
    if here in above or len(above) == max_depth:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir() and not HIDDEN.match(entry.name):
                yield from _entries(entry.path, max_depth, (*above, here))


def _check_no_table(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Raise UserError if `folder` is in a table, whose files may still hold deleted rows."""
    while "=" in os.path.basename(folder):  # a partition folder
        folder = os.path.dirname(folder)
    for mark in filter(None, _TABLES):
        if fs.isdir(f"{folder}/{mark}"):
            _refuse_table(f"{folder}/{mark}/", fs)
    if os.path.basename(folder) == "data":  # an Iceberg table has the folders `data` and `metadata`
        folder = os.path.dirname(folder)
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in fs.ls(f"{folder}/metadata", detail=False):
            _refuse_table(name, fs)


def _refuse_table(name: str, fs: fsspec.AbstractFileSystem) -> None:
    """Raise UserError if `name` is a metadata file or folder of a table."""
    if not (table := _TABLE_FILE.match(name)):
        return
    url = table["folder"] if isinstance(fs, LocalFileSystem) else f"s3://{table['folder']}"
    kind, remedy = _TABLES[table["mark"]]
    raise UserError(f"{url}: this is {kind}, whose files may hold rows that were deleted from the table; {remedy}")


def _version(entry: dict[str, Any], fs: fsspec.AbstractFileSystem, name: str) -> str:
    if isinstance(fs, LocalFileSystem):
        return local_version(name, os.stat(name))
    return str(entry.get("ETag") or entry.get("LastModified")).strip('"')


def read_footer(
    url: str, size: int, version: str, storage: StorageConfig, columns: Collection[str] = ()
) -> tuple[InputFile, pa.Schema]:
    """Read a Parquet footer; return the pinned file and its schema.

    Raises UserError if it is not valid Parquet, or if Arrow lacks a codec or an encoding of one of `columns`, or the
    key to an encrypted one.
    """
    fs, path = filesystem(url, storage)
    with fs.open(path, "rb") as file:
        try:
            parquet = pq.ParquetFile(file, coerce_int96_timestamp_unit=INT96_UNIT)
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
            schema = parquet.schema_arrow
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None):
                file.seek(0)
                raise _not_parquet(url, file.read(4096), error) from None
            raise
    _check_columns(url, parquet.metadata, size, columns)
    rows = tuple(group.num_rows for group in groups)
    return InputFile(url, size, version, rows, tuple(group.total_byte_size for group in groups)), schema


class _DataReached(Exception):
    """Arrow asked for the data of a column, so nothing in the footer keeps it from reading the column."""


class _FooterOnly(io.RawIOBase):
    """A Parquet file of which only the footer is known. size: in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, _: Any) -> int:
        raise _DataReached


def _check_columns(url: str, footer: pq.FileMetaData, size: int, columns: Collection[str]) -> None:
    """Raise UserError if Arrow cannot read one of `columns`, judged from the footer alone.

    Arrow checks codec and encryption when it opens a column. The attributes of `footer` do not serve for this: to look
    at the codec of a column ends the process if the codec is unknown or the column is encrypted.
    """
    paths = [footer.schema.column(leaf).path for leaf in range(len(footer.schema))]
    needed = [(leaf, path) for leaf, path in enumerate(paths) if path in columns or path.split(".", 1)[0] in columns]
    parquet = pq.ParquetFile(_FooterOnly(size), metadata=footer, buffer_size=1, pre_buffer=False)
    for number in range(footer.num_row_groups):
        for leaf, path in needed:
            problem = ""
            try:
                next(parquet.iter_batches(1, row_groups=[number], columns=[path], use_threads=False), None)
            except _DataReached:
                if lacking := sorted({*footer.row_group(number).column(leaf).encodings} - ENCODINGS):
                    problem = f"encoding {lacking[0]}"
            except (pa.ArrowException, OSError) as error:
                problem = flat(error)
            if problem:
                raise UserError(f"{url}: column {path!r} cannot be read ({problem}); write the file anew in plain form")


class OtherFormat(UserError):
    """A file's content is in another format than its name says. format: the value that `input.format` should have."""

    def __init__(self, message: str, format: InputFormat) -> None:
        super().__init__(message)
        self.format = format


def _not_parquet(url: str, head: bytes, error: Exception) -> UserError:
    """Return the error for a file that is not Parquet. It names the format that the first bytes `head` show."""
    packed = head.startswith(b"\x1f\x8b")
    with suppress(zlib.error):
        head = zlib.decompressobj(wbits=31).decompress(head) if packed else head
    text = head.decode(errors="ignore").lstrip("\ufeff \t\r\n")
    first, *more = text.split("\n", 1)
    formats: dict[InputFormat, bool] = {
        "jsonl": text.startswith(("{", "[")),
        "csv": bool(more) and any(mark in first for mark in ",;\t"),
    }
    if all(char.isprintable() or char in "\t\r\n" for char in text):
        for format in (format for format, fits in formats.items() if fits):
            kind = f"{'gzipped ' * packed}{'JSON' if format == 'jsonl' else 'CSV'}"
            remedy = f"the file is {kind}; set input.format: {format}"
            return OtherFormat(f"{url}: not readable as Parquet: {remedy}", format)
    return UserError(f"{url}: not readable as Parquet: {flat(error)}")


def damaged_input(url: str, error: BaseException) -> UserError:
    """Return the error for a file whose data cannot be read, although its footer or its start could be."""
    remedy = "replace the file, and start again with --overwrite"
    return UserError(f"{url}: cannot be read, since it is damaged or cut short: {flat(error)}; {remedy}")


def check_unchanged(file: InputFile, storage: StorageConfig) -> None:
    """Raise UserError if the file no longer exists, or if its size or version has changed."""
    now = stat(file.url, storage)
    if now is None:
        raise UserError(f"{file.url}: gone since the job began; put the file back")
    if now != (file.size, file.version):
        raise UserError(f"{file.url}: changed since the job began; put the old file back, or use --overwrite")


def stat(url: str, storage: StorageConfig) -> tuple[int, str] | None:
    """Return size in bytes and version of a file; None if the file does not exist."""
    fs, path = filesystem(url, storage)
    try:
        entry = fs.info(path)
        return int(entry["size"]), _version(entry, fs, path)
    except FileNotFoundError:
        return None


def input_root(section: InputConfig, storage: StorageConfig, urls: Collection[str]) -> str:
    """Return the folder that holds all input files. In generated row ids, file names are relative to this folder."""
    folders = []
    for path in section.path:
        fs, inside = filesystem(path, storage)
        url = portable(inside) if isinstance(fs, LocalFileSystem) else f"s3://{inside}"
        folders.append((os.path.dirname(url) if url in urls else fixed_part(url)).split("/"))
    return "/".join(os.path.commonprefix(folders))  # noqa: RUF071 (commonprefix of lists compares whole folder names)
