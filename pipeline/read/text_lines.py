"""Records of a JSON Lines or CSV file, gzipped or not, with the bytes that each takes.

A record of JSON Lines is a line that is not blank; one of CSV ends where the standard library's reader ends it, since a
quoted field may hold line ends. Offsets count uncompressed bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, cast

from pipeline.config.job import StorageConfig
from pipeline.messages import one_line
from pipeline.storage.folder import filesystem

LONGEST = 2**27  # bytes of a line, characters of a CSV field
BUFFER = 2**20
BOM = b"\xef\xbb\xbf"
# of a stream that is cut short or no gzip; BadGzipFile is an OSError without errno
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)

Line = tuple[int, bytes]  # bytes since the end of the previous record; the record
CsvRow = tuple[int, list[str], str | None]  # bytes since the end of the previous record; fields; why it is unreadable


class TooLong(ValueError):
    """A line is longer than `LONGEST`."""


@contextmanager
def open_text(url: str, storage: StorageConfig) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed if its name ends with .gz; seeking back in a gzip file reads it from its start."""
    fs, path = filesystem(url, storage)
    with fs.open(path, "rb") as raw, io.BufferedReader(raw, BUFFER) as file:
        if not is_gzip(url):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked, io.BufferedReader(cast(io.RawIOBase, unpacked), BUFFER) as text:
            yield text


def is_gzip(url: str) -> bool:
    """Whether a file is read as gzip."""
    return url.endswith(".gz")


def json_lines(stream: BinaryIO) -> Iterator[Line]:
    """The lines that are not blank, from the stream's place on, without a byte order mark."""
    size = 0
    for line in _lines(stream):
        size += len(line)
        record = line.removeprefix(BOM).strip(b" \t\r\n")
        if record:
            yield size, record
            size = 0


def csv_rows(stream: BinaryIO) -> Iterator[CsvRow]:
    """The rows that are not blank, from the stream's place on; a row that the reader refuses has no fields."""
    csv.field_size_limit(LONGEST)  # the module's own limit, 128 KiB, is one for the whole process
    size, invalid = 0, False

    def decoded() -> Iterator[str]:
        nonlocal size, invalid
        for line in _lines(stream):
            size += len(line)
            line = line.removeprefix(BOM)
            try:
                text = line.decode()
            except UnicodeDecodeError:
                text, invalid = line.decode(errors="replace"), True
            yield text

    reader = csv.reader(decoded())
    while True:
        error = None
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            row, error = [], f"not CSV: {one_line(problem)}"
        if not row and error is None:
            continue
        yield size, row, "not UTF-8" if invalid and error is None else error
        size, invalid = 0, False


def csv_header(rows: Iterator[CsvRow]) -> tuple[int, Sequence[str]]:
    """Bytes of the header and the names in it. Raises ValueError if the file has none that can be read."""
    first = next(rows, None)
    if first is None:
        raise ValueError("the file is empty; its first line must name the columns")
    size, names, error = first
    if error is not None:
        raise ValueError(f"the first line must name the columns: {error}")
    return size, names


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise TooLong(f"a line is longer than {LONGEST // 2**20} MiB")
        yield line
