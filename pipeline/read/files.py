"""Input files: listing, formats, Parquet footers, and the check that a pinned file is unchanged."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError, flat
from pipeline.config.input import InputFormat
from pipeline.config.job import StorageConfig
from pipeline.storage.errors import NoSuchBucket
from pipeline.storage.folder import filesystem

Files = Mapping[str, tuple[int, str]]  # URL -> (bytes, version)
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"),
    "csv": (".csv", ".csv.gz"),
}
_MAGIC = {  # first bytes of formats that are often mistaken for Parquet
    b"ARROW1": "an Arrow IPC file",
    b"PARE": "encrypted Parquet",
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "a zip archive",
    b"(\xb5/\xfd": "zstandard",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
}


@dataclass(frozen=True)
class InputFile:
    """A pinned input file.

    Args:
        url: absolute path or s3:// URL.
        size: bytes.
        version: etag, or modification time in ns of a local file.
        group_rows: rows of each row group.
        group_bytes: uncompressed bytes of each row group.
        digest: SHA-256 of a local file, "" if none is recorded.
        format: parquet, jsonl or csv; the groups of a text file are ranges of its lines.
    """

    url: str
    size: int
    version: str
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    digest: str = ""
    format: str = "parquet"

    @property
    def rows(self) -> int:
        return sum(self.group_rows)


def file_format(url: str, given: InputFormat | None) -> str:
    """How a file is read: as `input.format` says, else by its suffix, as Parquet if it has no known one."""
    if given is not None:
        return {"openai_batch": "jsonl", "iceberg": "parquet", "delta": "parquet"}.get(given, given)
    return next((kind for kind, suffixes in SUFFIXES.items() if url.endswith(suffixes)), "parquet")


def list_files(
    paths: Sequence[str], storage: StorageConfig, given: InputFormat | None = None, *, may_be_empty: bool = False
) -> dict[str, tuple[int, str]]:
    """URL -> (bytes, version) of every input file: paths in order, the files of a folder or glob sorted by name.

    Args:
        paths: files, folders or globs, local or s3://. An existing local file is never read as a glob.
        storage: the job's storage settings.
        given: `input.format`; of a folder, the files with its suffixes are listed, of Parquet by default.
        may_be_empty: accept folders and globs without files; a folder of a bucket disappears with its last file.

    Raises:
        UserError: a path matches nothing, is not readable, or a file name is not UTF-8.
        StoreFailed: the store does not answer.
    """
    files: dict[str, tuple[int, str]] = {}
    for path in paths:
        fs, inside = filesystem(path, storage)
        is_local = isinstance(fs, LocalFileSystem)
        try:
            entries, nothing = _entries(path, fs, inside, given)
        except (FileNotFoundError, NotADirectoryError):
            if may_be_empty and not is_local:
                continue
            raise UserError(f"{path}: no such file or folder") from None
        except (PermissionError, NoSuchBucket, ValueError) as error:
            raise UserError(f"{path}: cannot be listed: {flat(error)}") from None
        if not entries and not may_be_empty:
            raise UserError(nothing)
        for name in sorted(entries):
            url = name if is_local else f"s3://{name}"
            _check_name(url)
            files[url] = (int(entries[name]["size"]), _version(entries[name], fs, name))
    return files


def _entries(
    path: str, fs: fsspec.AbstractFileSystem, inside: str, given: InputFormat | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """Name -> entry of the files that a path names, and the error message if there is none."""
    if glob.has_magic(inside) and not (isinstance(fs, LocalFileSystem) and os.path.exists(inside)):
        matches = fs.glob(inside, detail=True)
        entries = {name: entry for name, entry in matches.items() if "/_job/" not in name}  # of some output
        nothing = f"{path}: matches no file"
    elif fs.isdir(inside):
        found = {
            name: entry for name, entry in fs.find(inside, detail=True).items() if not _hidden(name[len(inside) :])
        }
        suffixes = SUFFIXES[file_format("", given)]
        entries = {name: entry for name, entry in found.items() if name.endswith(suffixes)}
        nothing = f"{path}: folder without {suffixes[0]} files"
        others = sorted({kind for kind, ends in SUFFIXES.items() if any(name.endswith(ends) for name in found)})
        if others and given is None:
            nothing += f"; it has {' and '.join(others)} files: set input.format"
    else:
        entries, nothing = {inside: fs.info(inside)}, f"{path}: not a file"
    return {name: entry for name, entry in entries.items() if entry["type"] == "file"}, nothing


def _hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _check_name(url: str) -> None:
    try:
        url.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(url).decode(errors="replace")
        raise UserError(f"{shown}: the file name is not UTF-8; rename the file") from None


def _version(entry: dict[str, Any], fs: fsspec.AbstractFileSystem, name: str) -> str:
    if isinstance(fs, LocalFileSystem):
        return str(os.stat(name).st_mtime_ns)
    return str(entry.get("ETag") or entry.get("LastModified")).strip('"')


def read_footer(url: str, size: int, version: str, storage: StorageConfig) -> tuple[InputFile, pa.Schema]:
    """The pinned file and its schema.

    Raises:
        UserError: the file is not Parquet, is damaged, gone, or access is refused.
        StoreFailed, OSError: the store or the disk fails.
    """
    fs, path = filesystem(url, storage)
    try:
        with fs.open(path, "rb") as file:
            try:
                parquet = pq.ParquetFile(file)
                groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
                schema = parquet.schema_arrow
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, pa.ArrowException) or (type(error) is OSError and error.errno is None):
                    file.seek(0)
                    raise UserError(_not_parquet(url, file.read(4096), error)) from None
                raise
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except PermissionError as error:
        raise UserError(f"{url}: cannot be read: {flat(error)}") from None
    rows = tuple(group.num_rows for group in groups)
    return InputFile(url, size, version, rows, tuple(group.total_byte_size for group in groups)), schema


def _not_parquet(url: str, head: bytes, error: Exception) -> str:
    """The message for a file that Arrow refuses; names the format where the file's first bytes show another."""
    kind = _other_format(head)
    remedy = {"JSON": "set input.format: jsonl", "CSV": "set input.format: csv"}.get(str(kind), "convert it to Parquet")
    reason = flat(error) if kind is None else f"the file is {kind}; {remedy}"
    return f"{url}: not readable as Parquet: {reason}"


def _other_format(head: bytes) -> str | None:
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    text = head.decode(errors="ignore").lstrip("\ufeff \t\r\n")
    if any(not char.isprintable() and char not in "\t\r\n" for char in text):
        return None
    if text.startswith(("{", "[")):
        return "JSON"
    first = text.split("\n", 1)[0]
    return "CSV" if "\n" in text and any(mark in first for mark in ",;\t") else None


def check_unchanged(file: InputFile, storage: StorageConfig) -> None:
    """Raise UserError if a pinned file is gone or has another size or version."""
    now = stat(file.url, storage)
    if now is None:
        raise UserError(f"{file.url}: gone since the job began")
    if now != (file.size, file.version):
        raise UserError(f"{file.url}: changed since the job began")


def stat(url: str, storage: StorageConfig) -> tuple[int, str] | None:
    """Bytes and version of a file; None if there is none."""
    fs, path = filesystem(url, storage)
    try:
        entry = fs.info(path)
        return int(entry["size"]), _version(entry, fs, path)
    except FileNotFoundError:
        return None
