"""Finds where each record ends in a JSON Lines or CSV file, gzipped or not, and parses the records.

In JSON Lines, each line that is not blank is a record. In CSV, a quoted field may hold line ends, so a record ends
where Python's strict csv reader ends it. If this reader fails, the record is only one line, so that an unclosed quote
does not spoil the next lines. Offsets count uncompressed bytes.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from pipeline.config.input import LONGEST_RECORD
from pipeline.config.job import StorageConfig
from pipeline.messages import one_line
from pipeline.storage.folder import filesystem

BUFFER = 2**20  # bytes read at once
BOM = b"\xef\xbb\xbf"
# errors of a gzip stream that is cut short or damaged
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
NEWLINE, QUOTE = b'\n"'
_BLANK = {"jsonl": b" \t\r\n", "csv": b"\r\n"}  # bytes that a blank line may hold
# _FIELD: a CSV field; matches b"" at an unclosed quote. _RECORD: a CSV record; group 1: text after a closing quote
_FIELD = re.compile(rb'(?:"(?:[^"]++|"")*+"|[^",\r\n][^,\r\n]*+)?+')
_RECORD = re.compile(rb'(?:%b)?+%b(?:,%b)*+(?!")(\r*+[^\r\n])?+[^\n]*+\n' % (BOM, _FIELD.pattern, _FIELD.pattern))

_CSV_ERRORS = {  # part of an error of Python's csv reader -> message
    "unexpected end": "a quote is opened and not closed",
    "new-line character": "a carriage return is not followed by a line feed; convert the file's line ends",
}

Offsets = npt.NDArray[np.int64]
CsvRow = tuple[list[str], str | None]  # the fields, and an error if the record cannot be read


class Unreadable(ValueError):
    """A text file is not valid JSON Lines or CSV, or its number of rows has changed since planning."""


@contextmanager
def open_text(url: str, storage: StorageConfig) -> Iterator[BinaryIO]:
    """Open a file; unpack it if its name ends with .gz. Seeking back in a .gz file reads it again from its start."""
    fs, path = filesystem(url, storage)
    with fs.open(path, "rb") as raw, io.BufferedReader(raw, BUFFER) as file:
        if not url.lower().endswith(".gz"):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked, io.BufferedReader(cast(io.RawIOBase, unpacked), BUFFER) as text:
            yield text


def records(stream: BinaryIO, kind: str, field_bytes: int = LONGEST_RECORD) -> Iterator[tuple[bytes, Offsets, Offsets]]:
    """Yield consecutive blocks of the stream, each with the start and end offsets of the records in the block.

    Blank lines are part of a block, but not of any record.

    Args:
        stream: a file, positioned at the start of a record.
        kind: jsonl or csv.
        field_bytes: maximum length of a quoted CSV field, in bytes.

    Raises:
        Unreadable: a record is too long, or a quote is never closed.
    """
    rest, line, is_last = b"", 1, False
    while not is_last:
        data = stream.read(max(BUFFER, len(rest)))
        block, is_last = rest + data, not data
        ends = np.minimum(_ends(block + b"\n" * (is_last and block != b""), kind), len(block))
        bounds = np.concatenate([[0], ends, [len(block)]])  # bounds of the records, and the end of the block
        sizes = np.diff(bounds)
        is_open = is_last and int(sizes[-1]) > 0  # bytes after the file's last record mean an open quote
        long = np.flatnonzero(sizes > (0 if is_open else field_bytes))
        for start, end in [(int(bounds[place]), int(bounds[place + 1])) for place in (long if kind == "csv" else ())]:
            _check_quotes(block, start, end, field_bytes, line, is_open and end == len(block))
        if sizes.max() > LONGEST_RECORD:
            raise Unreadable(f"a line is longer than {LONGEST_RECORD // 2**20} MiB; shorten or remove it")
        starts, end = bounds[:-2], int(bounds[-2])
        lines = (block[start:stop].removeprefix(BOM) for start, stop in zip(starts, ends, strict=True))
        is_filled = np.fromiter((bool(one.strip(_BLANK[kind])) for one in lines), bool, len(ends))
        yield block[:end], starts[is_filled], ends[is_filled]
        rest, line = block[end:], line + int(np.count_nonzero(np.frombuffer(block, np.uint8, end) == NEWLINE))


def _ends(block: bytes, kind: str, *, is_whole: bool = False) -> Offsets:
    """Return the offset where each complete record or blank line in `block` ends.

    is_whole: whether the block ends where a record ends. A quote that is open there then means a damaged record.
    """
    if kind == "jsonl" or b'"' not in block:
        return np.flatnonzero(np.frombuffer(block, np.uint8) == NEWLINE) + 1
    found, end = [], 0
    while end < len(block) and ((match := _RECORD.match(block, end)) or is_whole):
        end = match.end() if match and match[1] is None else block.index(b"\n", end) + 1
        found.append(end)
    return np.array(found, np.int64)


def _check_quotes(block: bytes, place: int, end: int, field_bytes: int, first_line: int, is_last: bool) -> None:
    """Raise Unreadable if a quoted field in block[place:end] is too long, or is not closed in the last record."""
    place += len(BOM) if block.startswith(BOM, place) else 0
    while place < end and (field := _FIELD.match(block, place)):
        stop = field.end()
        if block[place] == QUOTE:
            where = f"line {first_line + block.count(NEWLINE, 0, place)}: a quote is opened"
            if stop == place and is_last:
                raise Unreadable(f'{where} and never closed; close it, or write "" for a quote in quoted text')
            if (end if stop == place else stop) - place - 2 > field_bytes:
                raise Unreadable(
                    f"{where} for a field of more than {field_bytes:,} bytes: it is probably not closed; close it, or "
                    "raise input.csv_field_bytes"
                )
        if not block.startswith(b",", stop):
            return
        place = stop + 1


def json_lines(data: bytes) -> list[bytes]:
    """Return the lines in `data` that are not blank, without the white space around them."""
    lines = (line.removeprefix(BOM).strip(_BLANK["jsonl"]) for line in data.split(b"\n"))
    return [line for line in lines if line]


def csv_rows(data: bytes) -> list[CsvRow]:
    """Return each CSV record's fields, and an error if the record cannot be read. `data` must hold whole records."""
    csv.field_size_limit(LONGEST_RECORD)  # applies to the whole process; the default is 128 KiB
    rows: list[CsvRow] = []
    data += b"\n" * (not data.endswith(b"\n"))
    for start, end in pairwise([0, *_ends(data, "csv", is_whole=True)]):
        try:
            fields = next(csv.reader([data[start:end].removeprefix(BOM).decode()], strict=True), [])
        except UnicodeDecodeError:
            rows.append(([], "not UTF-8"))
        except csv.Error as error:
            known = (problem for sign, problem in _CSV_ERRORS.items() if sign in str(error))
            rows.append(([], f"not CSV: {next(known, one_line(error))}"))
        else:
            rows += [(fields, None)] if fields else []
    return rows


def csv_header(stream: BinaryIO) -> list[str]:
    """Return the column names in a stream's first record. Raises Unreadable if the record is missing or damaged."""
    for block, _, ends in records(stream, "csv"):
        if len(ends):
            ((names, error),) = csv_rows(block[: ends[0]])
            if error is not None:
                raise Unreadable(f"the first line must name the columns: {error}")
            if len(names) == 1 and (other := next((one for one in ";\t" if one in names[0]), None)):
                raise Unreadable(f"the first line has no comma, but {other!r}: columns must be separated by commas")
            return names
    raise Unreadable("the file is empty; its first line must name the columns")
