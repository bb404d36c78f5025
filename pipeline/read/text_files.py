"""JSON Lines and CSV files as input: one pass when the job is planned, then shards read by byte offset.

The pass finds the rows, their bytes in groups, and the types of the columns that the job reads, from every row. The
groups are pinned as a Parquet file's row groups are. A line that cannot be read is its row's error.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa

from actors.engine.errors import UserError, flat
from pipeline.config.job import StorageConfig
from pipeline.messages import one_line, printable
from pipeline.read.files import InputFile
from pipeline.read.json_types import AS_JSON, ColumnType, is_json, json_array
from pipeline.read.schema import ERROR, conform, is_text
from pipeline.read.shards import Shard
from pipeline.read.text_lines import GZIP_ERRORS, TooLong, csv_header, csv_rows, json_lines, open_text

GROUP_ROWS, GROUP_BYTES = 1024, 4 * 2**20  # of a group at most, but for one longer row

Record = tuple[int, Any, str | None]  # bytes since the end of the previous record; line or fields; error


@dataclass(frozen=True)
class TextColumns:
    """The columns that a job reads from a text file.

    Args:
        names: of the columns.
        as_json: columns whose lists and objects stay JSON, as text.
        numbers: types of a CSV file's columns that are not text.
    """

    names: Sequence[str]
    as_json: frozenset[str] = frozenset()
    numbers: Mapping[str, pa.DataType] = field(default_factory=dict)


def scan_text(
    url: str,
    size: int,
    version: str,
    storage: StorageConfig,
    kind: str,
    columns: TextColumns,
    limit: int | None = None,
) -> tuple[InputFile, pa.Schema]:
    """The pinned file and its schema, from one pass over its rows.

    Args:
        url, size, version: as listed.
        kind: jsonl or csv.
        columns: whose types are wanted. Those of JSON Lines are in the schema if any row has them, or no row is there.
        limit: rows to read, for a look at the file's beginning; None is all.

    Raises:
        UserError: the file is no text of this kind, or gone.
        StoreFailed, OSError: the store or the disk fails.
    """
    scan = _Scan(columns, limit)
    try:
        with open_text(url, storage) as stream:
            _check_text(url, stream, kind)
            schema = scan.csv(stream) if kind == "csv" else scan.json(stream)
    except FileNotFoundError:
        raise UserError(f"{url}: no such file") from None
    except PermissionError as error:
        raise UserError(f"{url}: cannot be read: {flat(error)}") from None
    except GZIP_ERRORS as error:
        raise UserError(f"{url}: not readable as gzip: {flat(error)}") from None
    except (TooLong, _Unusable) as error:
        raise UserError(f"{url}: {error}") from None
    return InputFile(url, size, version, tuple(scan.rows), tuple(scan.bytes), format=kind), schema


class _Unusable(ValueError):
    """The file holds no such text."""


class _Scan:
    """Rows and bytes of the groups of a file, and the types of its columns."""

    def __init__(self, columns: TextColumns, limit: int | None) -> None:
        self.columns = columns
        self.limit = limit
        self.rows: list[int] = []
        self.bytes: list[int] = []

    def _grouped(self, records: Iterator[Record], first: int = 0) -> Iterator[list[Record]]:
        """The records in groups, which are noted. first: bytes before the first record."""
        group: list[Record] = []
        size = first
        for record in islice(records, self.limit):
            if group and (len(group) == GROUP_ROWS or size + record[0] > GROUP_BYTES):
                yield self._noted(group, size)
                group, size = [], 0
            group.append(record)
            size += record[0]
        if group:
            yield self._noted(group, size)

    def _noted(self, group: list[Record], size: int) -> list[Record]:
        self.rows.append(len(group))
        self.bytes.append(size)
        return group

    def json(self, stream: BinaryIO) -> pa.Schema:
        types = {name: ColumnType() for name in self.columns.names}
        seen: dict[str, None] = {}
        for group in self._grouped((size, line, None) for size, line in json_lines(stream)):
            if not types:
                continue
            objects = [values for values, _ in map(_parsed, group) if values is not None]
            for values in objects:
                seen.update(dict.fromkeys(values))
            for name, kind in types.items():
                kind.add([values.get(name) for values in objects])
        if types and self.rows and not seen:
            raise _Unusable("no line holds a JSON object")
        names = seen if self.rows else types
        return pa.schema([self._json_field(name, types) for name in names])

    def _json_field(self, name: str, types: Mapping[str, ColumnType]) -> pa.Field:
        kind = types[name].result() if name in types else pa.null()
        if name in self.columns.as_json and not pa.types.is_null(kind):
            kind = pa.string()
        return pa.field(printable(name) if name not in types else name, kind)

    def csv(self, stream: BinaryIO) -> pa.Schema:
        records = csv_rows(stream)
        try:
            size, names = csv_header(records)
        except TooLong:
            raise
        except ValueError as error:
            raise _Unusable(error) from None
        for _ in self._grouped(records, first=size):
            pass
        return pa.schema([(name, self.columns.numbers.get(name, pa.string())) for name in names])


def _check_text(url: str, stream: BinaryIO, kind: str) -> None:
    """Raise UserError for a beginning that shows another format; the stream stays at its start."""
    head = stream.read(4096)
    stream.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{url}: the text is UTF-16; convert it to UTF-8")
    for magic, other in ((b"PAR1", "Parquet"), (b"\x1f\x8b", "gzip without a name that ends with .gz")):
        if head.startswith(magic):
            raise UserError(f"{url}: the file is {other}; name it so, or set input.format")
    if kind == "jsonl" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        try:
            json.loads(head.split(b"\n", 1)[0])
        except ValueError:  # no line of its own
            raise UserError(f"{url}: the file is one JSON array; write one object a line (JSON Lines)") from None


def read_text(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """Tables of shards of one text file, in order, in the job's schema and with the column `ERROR`.

    Raises:
        OSError: the file is damaged or has fewer rows than planned; one line that names the file.
        StoreFailed: the store fails.
    """
    try:
        with open_text(file.url, storage) as stream:
            rows = _Rows(file, stream)
            for shard in shards:
                yield rows.table(shard, schema)
    except (*GZIP_ERRORS, TooLong) as error:
        raise OSError(f"{file.url}: cannot be read, damaged or cut short: {flat(error)}") from None


class _Rows:
    """The rows of an open text file from any row on; reading on costs no seek."""

    def __init__(self, file: InputFile, stream: BinaryIO) -> None:
        self.file, self.stream = file, stream
        self.first_rows = list(accumulate(file.group_rows, initial=0))
        self.offsets = list(accumulate(file.group_bytes, initial=0))
        self.header: Sequence[str] = csv_header(csv_rows(stream))[1] if file.format == "csv" else ()
        self.records: Iterator[Record] = iter(())
        self.next = -1  # the row that `records` yields next

    def table(self, shard: Shard, schema: pa.Schema) -> pa.Table:
        self._go_to(shard.first_row)
        records = list(islice(self.records, shard.rows))
        self.next += len(records)
        if len(records) < shard.rows:
            self._cut_short()
        if self.file.format == "csv":
            return _csv_table(records, self.header, schema)
        return _json_table(records, schema)

    def _go_to(self, row: int) -> None:
        group = bisect_right(self.first_rows, row) - 1
        if group >= len(self.file.group_rows):
            self._cut_short()
        if not self.first_rows[group] <= self.next <= row:
            self.stream.seek(self.offsets[group])
            if self.file.format == "csv":
                self.records = csv_rows(self.stream)
                if group == 0:
                    csv_header(self.records)
            else:
                self.records = ((size, line, None) for size, line in json_lines(self.stream))
            self.next = self.first_rows[group]
        for _ in islice(self.records, row - self.next):
            self.next += 1

    def _cut_short(self) -> NoReturn:
        raise OSError(
            f"{self.file.url}: cannot be read, damaged or cut short: fewer rows than when the job was planned"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _parsed(record: Record) -> tuple[dict[str, Any] | None, str | None]:
    """The object in a line, or why there is none."""
    try:
        value = _DECODER.decode(record[1].decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {one_line(error)}"
    if not isinstance(value, dict):
        return None, f"not a JSON object: the line is a {type(value).__name__}"
    return value, None


def _json_table(records: Sequence[Record], schema: pa.Schema) -> pa.Table:
    parsed = [_parsed(record) for record in records]
    errors = {row: error for row, (_, error) in enumerate(parsed) if error is not None}
    columns = []
    for column in schema:
        array, wrong = json_array([None if values is None else values.get(column.name) for values, _ in parsed], column)
        columns.append(array)
        errors = {**wrong, **errors}
    return _with_errors(pa.table(columns, schema=schema), errors)


def _csv_table(records: Sequence[Record], header: Sequence[str], schema: pa.Schema) -> pa.Table:
    errors: dict[int, str] = {}
    rows: list[Sequence[str | None]] = []
    for row, (_, values, error) in enumerate(records):
        if error is None and len(values) != len(header):
            error = f"{len(values)} fields; the first line names {len(header)} columns"
        if error is not None:
            errors[row] = error
        rows.append(values if error is None else [None] * len(header))
    columns = []
    for column in schema:
        place = header.index(column.name)
        values = [row[place] for row in rows]
        if is_json(column) or not is_text(column.type):  # no text is no value
            values = [value or None for value in values]
        columns.append(pa.array(values, pa.string()))
    table = conform(pa.table(columns, names=schema.names), schema)
    later = table[ERROR].to_pylist()
    found = {row: error for row, error in enumerate(later) if error is not None} | errors
    return _with_errors(table.drop_columns(ERROR), found)


def _with_errors(table: pa.Table, errors: Mapping[int, str]) -> pa.Table:
    column = pa.array([errors.get(row) for row in range(table.num_rows)], pa.string())
    return table.append_column(pa.field(ERROR, pa.string()), column)


def with_json_fields(schema: pa.Schema, names: frozenset[str]) -> pa.Schema:
    """The schema with these fields marked as text that may hold JSON."""
    return pa.schema([column.with_metadata(AS_JSON) if column.name in names else column for column in schema])
