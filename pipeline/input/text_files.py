"""Reads JSON Lines and CSV files. Planning scans each file once. Later, shards are read from byte offsets.

The scan divides the file into row groups, as in Parquet, and counts rows and bytes of each group. Column types come
from some of the rows. A row that cannot be read, or does not fit the types, gets an error.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError, flat
from pipeline.config.input import LONGEST_RECORD
from pipeline.config.job import StorageConfig
from pipeline.input.files import InputFile, damaged_input
from pipeline.input.schema import ERROR, UNTYPED, common, conform, is_stored, is_text, rebuilt, settled, split_errors
from pipeline.input.shards import Shard
from pipeline.input.text_lines import (
    GZIP_ERRORS,
    CsvRow,
    Offsets,
    Unreadable,
    csv_header,
    csv_rows,
    json_lines,
    open_text,
    records,
)
from pipeline.messages import counted, is_unicode, one_line, printable, shortened

AS_JSON = {b"skipdecode.json": b"1"}  # metadata of a text column that keeps lists, objects and numbers as JSON text
_NAMES = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_NOT_ARROW = (pa.ArrowException, ValueError, OverflowError)  # errors for a value that Arrow cannot hold
GROUP_ROWS, GROUP_BYTES = 1024, 4 * 2**20  # limits of a row group; a longer row is a group of its own
MAX_LEVELS = 100  # maximum levels of lists and objects in a row; Python functions recurse over them
TYPED_ROWS = 10_000  # number of rows at the start of a file that are all parsed to find column types
TYPED_BLOCKS = 64  # after the first TYPED_ROWS rows, only one block in 64 is parsed to find column types

Record = TypeVar("Record", bytes, CsvRow)


def is_json(field: pa.Field) -> bool:
    """Tell whether the field's strings hold JSON."""
    return bool(field.metadata and AS_JSON.items() <= field.metadata.items())


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def parsed(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """Parse a line of JSON. Return the object and None, or None and an error message."""
    try:
        value = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {one_line(error)}"
    if not isinstance(value, dict):
        return None, f"not a JSON object: the line is a {type(value).__name__}"
    if line.count(b"[") + line.count(b"{") > MAX_LEVELS and _levels(value) > MAX_LEVELS:
        return None, f"nested more than {MAX_LEVELS} levels deep"
    return value, None


def _levels(value: Any) -> int:
    """Return how deep lists and objects are nested in a value."""
    count, nested = 0, [value]
    while nested := [one for one in nested if isinstance(one, dict | list)]:
        count += 1
        nested = [child for one in nested for child in (one.values() if isinstance(one, dict) else one)]
    return count


class JsonTypes:
    """Finds the type of each JSON column: the type of most of its values in the added rows.

    Integers and floats count as one type. A list or object that has no common type with the earlier ones is ignored.
    Values are not converted: a row with a value of another type gets an error.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._columns: dict[str, dict[str, tuple[int, pa.DataType]]] = {name: {} for name in names}
        self._seen: dict[str, None] = {}
        self._lines = 0

    def add(self, lines: Sequence[bytes]) -> None:
        """Count the types of the values in `lines`, each of which is a row in JSON."""
        self._lines += len(lines)
        rows = [values for values, _ in map(parsed, lines if self._columns else ()) if values is not None]
        for values in rows:
            self._seen.update(dict.fromkeys(values))
        for column, kinds in self._columns.items():
            for value in (values[column] for values in rows if values.get(column) is not None):
                count, known = kinds.get(_NAMES[type(value)], (0, pa.null()))
                both = common(known, _type_of(value) or pa.null())
                is_usable = both is not None and (both == known or is_stored(settled(both)))
                kinds[_NAMES[type(value)]] = count + 1, both if is_usable else known

    def may_find(self, block: bytes) -> bool:
        """Tell whether `block` may hold a value of a column that has no type yet."""
        for column, kinds in self._columns.items():
            if all(types.is_null(kind) for _, kind in kinds.values()):
                for key in {json.dumps(column, ensure_ascii=ascii).encode() for ascii in (True, False)}:
                    if key in block and re.search(re.escape(key) + rb"\s*+:\s*+(?!null)", block):
                        return True
        return False

    def schema(self, as_json: frozenset[str]) -> pa.Schema:
        """Return the schema of all columns found (null if not requested). Raises Unreadable if no row is an object."""
        if self._columns and self._lines and not self._seen:
            raise Unreadable(f"{counted(self._lines, 'line')} read, and none holds a JSON object; write one per line")
        fields = []
        for column in self._seen if self._lines else self._columns:
            kinds = self._columns.get(column, {}).values()
            known = [(count, kind) for count, kind in kinds if not types.is_null(kind)]
            _, kind = max(known, key=itemgetter(0), default=(0, pa.null()))
            kind = pa.string() if column in as_json and not types.is_null(kind) else _signed(kind)
            fields.append((column if is_unicode(column) else repr(column), kind))
        return pa.schema(fields)


def _type_of(value: Any) -> pa.DataType | None:
    """Return the Arrow type that holds a JSON value unchanged; None if there is none, as for an array of mixed types.

    An empty object has type null. uint32 stands for an integer that fits both int64 and uint64.
    """
    kind: pa.DataType | None = pa.null()
    if isinstance(value, dict):
        children = [(name, _type_of(one)) for name, one in value.items()]
        fits = all(child is not None and is_unicode(name) for name, child in children)
        return None if not fits else pa.struct(children) if children else kind
    if isinstance(value, list):
        for one in map(_type_of, value):
            kind = None if kind is None or one is None else common(kind, one)
        return None if kind is None else pa.list_(kind)
    if type(value) is int and value >= 0:
        return pa.uint32() if value < 2**63 else pa.uint64() if value < 2**64 else None
    if type(value) is int:
        return pa.int64() if value >= -(2**63) else None
    return {bool: pa.bool_(), float: pa.float64(), str: pa.string()}.get(type(value), kind)


def _signed(kind: pa.DataType) -> pa.DataType:
    """Replace uint32, the type of integers that fit int64, by int64."""
    return pa.int64() if kind == pa.uint32() else rebuilt(kind, _signed)


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Tell whether `value` has exactly type `kind`. Arrow would turn true and 1.5 into 1, and drop unknown fields."""
    if value is None or (value == {} and types.is_null(kind)):
        return True
    if types.is_struct(kind):
        known = {field.name: field.type for field in kind}
        return isinstance(value, dict) and all(name in known and _fits(one, known[name]) for name, one in value.items())
    if types.is_list(kind) or types.is_large_list(kind):
        return isinstance(value, list) and all(_fits(one, kind.value_type) for one in value)
    if is_text(kind):
        return type(value) is str
    if types.is_boolean(kind):
        return type(value) is bool
    is_whole = type(value) is int and (types.is_integer(kind) or types.is_decimal(kind))
    return is_whole or (type(value) in (int, float) and types.is_floating(kind))


def _misfit(value: Any, kind: pa.DataType) -> str | None:
    """Return the reason why a column of type `kind` cannot hold `value` unchanged; None if it can."""
    try:
        if _fits(value, kind):
            pa.array([value], kind)
            return None
    except UnicodeEncodeError:
        return "text is not valid Unicode: it holds a lone surrogate"
    except _NOT_ARROW:
        pass
    return (
        f"{_NAMES[type(value)]} that does not fit {shortened(printable(kind), 200)}: {shortened(json.dumps(value), 80)}"
    )


def json_array(values: Sequence[Any], field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """Return the values as an array of the field's type, and the position and error of each value of another type.

    A value of another type becomes JSON text in a text column, and null in other columns. In a column that has no type
    in any file, an empty object is null and no error, because Parquet has no type for it.
    """
    kind, fitted, errors = field.type, [], dict[int, str]()
    if is_json(field):
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    for position, value in enumerate(values):
        if value == {} and UNTYPED.items() <= (field.metadata or {}).items():
            value = None
        reason = _misfit(value, kind)
        if reason is not None:
            errors[position] = f"column {printable(field.name)}: {reason}"
            text = value if isinstance(value, str) else json.dumps(value)
            value = text.encode(errors="replace").decode() if is_text(kind) else None
        fitted.append(value)
    return pa.array(fitted, kind), errors


@dataclass(frozen=True)
class TextColumns:
    """The columns that a job reads from a text file.

    Args:
        names: names of the columns.
        as_json: names of columns whose lists and objects are kept as JSON text.
        numbers: column name -> type, for CSV columns that are not text.
        field_bytes: maximum length of a quoted CSV field, in bytes.
    """

    names: Sequence[str]
    as_json: frozenset[str] = frozenset()
    numbers: Mapping[str, pa.DataType] = field(default_factory=dict)
    field_bytes: int = LONGEST_RECORD


def scan_text(
    url: str,
    size: int,
    version: str,
    storage: StorageConfig,
    kind: str,
    columns: TextColumns,
    limit: int | None = None,
) -> tuple[InputFile, pa.Schema]:
    """Scan a text file once, and parse some of its rows. Return the file (with row groups) and its schema.

    Args:
        url, size, version: as `list_files` returns them.
        kind: jsonl or csv.
        columns: columns that need types. The schema of a JSON Lines file has all columns of the parsed rows. If the
            file has no rows, its schema has the columns in `columns`.
        limit: number of rows to read; None reads all.

    Raises UserError if the file is not of this `kind`, and errors of store and disk.
    """
    types = JsonTypes(columns.names)
    try:
        with open_text(url, storage) as stream:
            _check_text(url, stream, kind)
            header = csv_header(stream) if kind == "csv" else []
            stream.seek(0)
            groups = list(_groups(_row_ends(stream, kind, columns.field_bytes, limit, types)))
            if kind == "csv":
                schema = pa.schema([(name, columns.numbers.get(name, pa.string())) for name in header])
            else:
                schema = types.schema(columns.as_json)
    except GZIP_ERRORS as error:
        raise UserError(f"{url}: not readable as gzip: {flat(error)}") from None
    except Unreadable as error:
        raise UserError(f"{url}: {error}") from None
    rows, sizes = (tuple(group[place] for group in groups) for place in (0, 1))
    return InputFile(url, size, version, rows, sizes, format=kind), schema


def _row_ends(stream: BinaryIO, kind: str, field_bytes: int, limit: int | None, types: JsonTypes) -> Iterator[Offsets]:
    """Yield the offsets where the first `limit` rows end, block by block. Add a sample of the rows to `types`."""
    offset, total, has_header = 0, 0, kind == "csv"
    for number, (block, starts, ends) in enumerate(records(stream, kind, field_bytes)):
        if has_header and len(ends):
            starts, ends, has_header = starts[1:], ends[1:], False
        if limit is not None:
            starts, ends = starts[: limit - total], ends[: limit - total]
        if kind == "jsonl" and (total < TYPED_ROWS or number % TYPED_BLOCKS == 0 or types.may_find(block)):
            types.add(json_lines(block[: ends[-1]] if len(ends) else b""))
        yield ends + offset
        offset, total = offset + len(block), total + len(ends)
        if total == limit:
            return


def _groups(row_ends: Iterable[Offsets]) -> Iterator[tuple[int, int]]:
    """Divide rows into row groups, and yield the number of rows and of bytes of each group, in order."""
    start, ends = 0, np.array([], np.int64)
    for more in chain(row_ends, [None]):
        ends = ends if more is None else np.concatenate([ends, more])
        while len(ends) and (more is None or len(ends) > GROUP_ROWS or ends[-1] - start > GROUP_BYTES):
            rows = min(GROUP_ROWS, max(1, int(np.searchsorted(ends, start + GROUP_BYTES, "right"))))
            yield rows, int(ends[rows - 1]) - start
            start, ends = int(ends[rows - 1]), ends[rows:]


def _check_text(url: str, stream: BinaryIO, kind: str) -> None:
    """Raise UserError if the first bytes show another format than `kind`. Leave the stream at its start."""
    head = stream.read(4096)
    stream.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{url}: the text is UTF-16; convert it to UTF-8")
    if head.startswith(b"PAR1"):
        raise UserError(f"{url}: the file is Parquet; rename it to match, or set input.format")
    if head.startswith(b"\x1f\x8b"):
        remedy = "is packed twice; unpack it once" if url.lower().endswith(".gz") else "is gzip; add .gz to its name"
        raise UserError(f"{url}: the file {remedy}")
    if kind == "jsonl" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        try:
            json.loads(head.split(b"\n", 1)[0])
        except ValueError:  # the first line is only the start of a JSON array
            raise UserError(f"{url}: the file is one JSON array; write one object per line (JSON Lines)") from None


def read_text(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """Yield one table per shard of a text file, in order, with the columns of `schema` and row errors in `ERROR`.

    Raises:
        UserError: the file is damaged or has other rows than planned.
        StoreFailed: the store fails.
    """
    try:
        with open_text(file.url, storage) as stream:
            if file.format == "jsonl":
                for shard, lines in zip(shards, _rows(shards, file, stream, json_lines), strict=True):
                    yield _json_table(lines, schema, shard)
            else:
                header = csv_header(stream)
                for shard, rows in zip(shards, _rows(shards, file, stream, csv_rows), strict=True):
                    yield _csv_table(rows, header, schema, shard)
    except (*GZIP_ERRORS, Unreadable) as error:
        raise damaged_input(file.url, error) from None


def _rows(
    shards: Sequence[Shard], file: InputFile, stream: BinaryIO, parse: Callable[[bytes], list[Record]]
) -> Iterator[list[Record]]:
    """Yield the rows of each shard. A row group that consecutive shards share is read and parsed only once."""
    first_rows = list(accumulate(file.group_rows, initial=0))
    offsets = list(accumulate(file.group_bytes, initial=0))
    number, group = -1, []
    for shard in shards:
        rows: list[Record] = []
        while len(rows) < shard.rows:
            row = shard.first_row + len(rows)
            if number != (wanted := bisect_right(first_rows, row) - 1):
                number = wanted
                if number == len(file.group_rows):
                    raise Unreadable("fewer rows than when the job was planned")
                stream.seek(offsets[number])
                group = parse(stream.read(file.group_bytes[number]))[file.format == "csv" and number == 0 :]
                if len(group) != file.group_rows[number]:
                    change = "fewer" if len(group) < file.group_rows[number] else "more"
                    raise Unreadable(f"{change} rows than when the job was planned")
            begin = row - first_rows[number]
            rows += group[begin : begin + shard.rows - len(rows)]
        yield rows


def _json_table(lines: Sequence[bytes], schema: pa.Schema, shard: Shard) -> pa.Table:
    rows = [parsed(line) for line in lines]
    errors = {row: _unreadable(shard, row, error) for row, (_, error) in enumerate(rows) if error is not None}
    columns = []
    for column in schema:
        array, wrong = json_array([None if values is None else values.get(column.name) for values, _ in rows], column)
        columns.append(array)
        errors = {**wrong, **errors}
    return _with_errors(pa.table(columns, schema=schema), errors, len(rows))


def _unreadable(shard: Shard, row: int, error: str) -> str:
    """Append the row number and the file name to an error, because a row that cannot be read has no id."""
    return f"{error} (row {shard.first_row + row} of {os.path.basename(shard.url)!r}, counted from 0)"


_ZEROS = re.compile(r"\.0+$")


def _csv_table(records: Sequence[CsvRow], header: Sequence[str], schema: pa.Schema, shard: Shard) -> pa.Table:
    errors: dict[int, str] = {}
    rows: list[Sequence[str | None]] = []
    for row, (fields, error) in enumerate(records):
        if error is None and len(fields) != len(header):
            error = f"{len(fields)} fields, but the first line names {len(header)} columns"
        if error is None and fields == header:
            error = "the row repeats the column names of the first line"
        if error is not None:
            errors[row] = _unreadable(shard, row, error)
        rows.append(fields if error is None else [None] * len(header))
    columns = []
    for column in schema:
        cells = [row[header.index(column.name)] for row in rows]
        if not is_text(column.type):  # a number; pandas writes 40.0 if other cells of the column are empty
            cells = [cell and _ZEROS.sub("", cell.strip()) for cell in cells]
        keeps_empty = is_text(column.type) and not is_json(column)
        columns.append(pa.array(cells if keeps_empty else [cell or None for cell in cells], pa.string()))
    table, later = split_errors(conform(pa.table(columns, names=schema.names), schema))
    wrong = {row: error for row, error in enumerate(later) if error is not None} | errors
    return _with_errors(table, wrong, len(rows))


def _with_errors(table: pa.Table, errors: Mapping[int, str], rows: int) -> pa.Table:
    """Append the column `ERROR` to the table. rows: number of rows, which a table without columns does not know."""
    column = pa.array([errors.get(row) for row in range(rows)], pa.string())
    return pa.table([*table.columns, column], schema=table.schema.append(pa.field(ERROR, pa.string())))


def with_json_fields(schema: pa.Schema, names: frozenset[str]) -> pa.Schema:
    """Return the schema with the metadata `AS_JSON` on the fields in `names`, whose text may be JSON."""
    return pa.schema(
        [one.with_metadata({**(one.metadata or {}), **AS_JSON}) if one.name in names else one for one in schema]
    )
