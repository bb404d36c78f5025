"""Finds one schema for all files of a job, and casts each file's rows to it.

Files in one folder often have slightly different types: int32 and int64, string and large_string, dictionary columns,
columns of nulls. Planning finds a common type for each column. A row with a value that does not fit this type gets an
error. The metadata of the files' schemas is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError, flat
from pipeline.messages import LINE, listed, printable, shortened
from pipeline.storage.parquet import parquet_bytes, read_parquet

UNTYPED = {b"skipdecode.untyped": b"1"}  # metadata of a text column for which no file has a type
ERROR = "__error"  # column with the error of each row, null for a good row; no input column may have this name


def one_schema(columns: Sequence[str], files: Mapping[str, pa.Schema]) -> pa.Schema:
    """Return a schema that has one common, nullable type per column. files: URL -> schema.

    A column or nested field that is null in every file becomes a string. Such a column has the metadata `UNTYPED`, and
    no other metadata is kept. Raises UserError if a column is missing or has no common type. The message names file,
    column and types.
    """
    fields = []
    for name in columns:
        kind, where = pa.null(), ""
        kinds = {url: _column(name, url, schema) for url, schema in files.items()}
        # a UUID is stored as 16 bytes and read as text: 00000000-0000-0000-0000-000000000001
        are_uuids = all(isinstance(here, pa.UuidType) for here in kinds.values())
        for url, here in kinds.items():
            both = common(kind, pa.string() if are_uuids else plain(here))
            if both is None:
                types_differ = f"{url}: column {name!r} is {printable(here)}, but {printable(kind)} in {where}"
                raise UserError(f"{types_differ}; convert one of them")
            if both != kind:
                kind, where = both, url
        field = pa.field(name, settled(kind), metadata=UNTYPED if types.is_null(kind) else None)
        for url, here in kinds.items():
            if not _casts(here, field.type) or not is_stored(field.type):
                problem = f"{printable(here)}, which cannot be read and written as {printable(field.type)}"
                raise UserError(f"{url}: column {name!r} is {shortened(problem, LINE)}; convert the column")
        fields.append(field)
    return pa.schema(fields)


def _column(name: str, url: str, schema: pa.Schema) -> pa.DataType:
    indices = schema.get_all_field_indices(name)
    if not indices:
        raise UserError(f"{url}: no column {name!r}; it has {listed(schema.names)}")
    if len(indices) > 1:
        raise UserError(f"{url}: column {name!r} occurs {len(indices)} times; rename all but one")
    return schema.field(indices[0]).type


def _casts(here: pa.DataType, kind: pa.DataType) -> bool:
    try:
        _cast(pa.nulls(0, here), kind)
    except pa.ArrowNotImplementedError:
        return False
    return True


@cache
def is_stored(kind: pa.DataType) -> bool:
    """Tell whether Parquet and Arrow IPC hold the type: not structs without fields, or more than about 50 levels."""
    table = pa.schema([("", kind)]).empty_table()
    try:
        read_parquet(parquet_bytes(table))
        pa.RecordBatch.from_pylist([], table.schema).serialize()
    except (pa.ArrowException, OSError):
        return False
    return True


def plain(kind: pa.DataType) -> pa.DataType:
    """Replace dictionary, view and extension types by the types of their values. Drop metadata and item names."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    return rebuilt(kind, plain)


def settled(kind: pa.DataType) -> pa.DataType:
    """Replace each null type in `kind`, at any depth, by string. Arrow does not cast lists of nulls reliably."""
    return pa.string() if types.is_null(kind) else rebuilt(kind, settled)


def rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Apply `change` to the child types of a nested type, and drop metadata. Return any other type unchanged."""
    if types.is_list(kind):
        return pa.list_(change(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(change(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(change(kind.value_type), kind.list_size)
    if types.is_map(kind):
        return pa.map_(change(kind.key_type), change(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([(child.name, change(child.type)) for child in kind])
    return kind


@lru_cache(2**12)  # nearly all rows of a file repeat the types of earlier ones
def common(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type that can hold values of both types, or None. All types are results of `plain`.

    An integer and a float give double; uint64 and a signed integer give int64. Neither result can hold every value, so
    each row is checked later. Timestamps in different time zones give UTC.
    """
    if first == second:
        return first
    if any(_is_lossy(*pair) or _is_lossy(*reversed(pair)) for pair in _leaves(first, second)):
        return None
    first, second = _with_decimals(first, second), _with_decimals(second, first)
    if types.is_timestamp(first) and types.is_timestamp(second) and None not in (first.tz, second.tz):
        zone = first.tz if first.tz == second.tz else "UTC"
        first, second = (pa.timestamp(kind.unit, zone) for kind in (first, second))
    schemas = [pa.schema([("", kind)]) for kind in (first, second)]
    try:  # in both orders: a struct with two fields of one name is refused only as the first type
        both = [pa.unify_schemas(pair, promote_options="permissive") for pair in (schemas, schemas[::-1])]
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None
    return plain(both[0].field(0).type)


def _with_decimals(kind: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Give each integer for which `other` has a decimal, at any depth, a decimal type that holds all its digits."""
    if types.is_integer(kind) and types.is_decimal(other):
        return pa.decimal128({8: 3, 16: 5, 32: 10, 64: 20}[kind.bit_width], 0)
    if types.is_struct(kind) and types.is_struct(other):
        others = {child.name: child.type for child in other}
        found = [(child.name, child.type, others.get(child.name, child.type)) for child in kind]
        return pa.struct([(name, _with_decimals(one, its)) for name, one, its in found])
    if types.is_map(kind) and types.is_map(other):
        pairs = ((kind.key_type, other.key_type), (kind.item_type, other.item_type))
        return pa.map_(*(_with_decimals(*pair) for pair in pairs))
    if _is_list(kind) and _is_list(other):
        return rebuilt(kind, lambda child: _with_decimals(child, other.value_type))
    return kind


def _leaves(first: pa.DataType, second: pa.DataType) -> Iterator[tuple[pa.DataType, pa.DataType]]:
    """Yield the types at the same place in two types, which may be nested, if neither of them is nested."""
    if types.is_struct(first) and types.is_struct(second):
        for child in first:
            for index in second.get_all_field_indices(child.name):
                yield from _leaves(child.type, second.field(index).type)
    elif types.is_nested(first) and types.is_nested(second):
        for index in range(min(first.num_fields, second.num_fields)):
            yield from _leaves(first.field(index).type, second.field(index).type)
    else:
        yield first, second


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_lossy(one: pa.DataType, other: pa.DataType) -> bool:
    """Tell whether Arrow would round decimals (as floats), or turn text into bytes, to make one type of both."""
    is_binary = types.is_binary(other) or types.is_large_binary(other) or types.is_fixed_size_binary(other)
    return bool((types.is_decimal(one) and types.is_floating(other)) or (is_text(one) and is_binary))


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a plain type is string or large_string."""
    return bool(types.is_string(kind) or types.is_large_string(kind))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast the columns to `schema`. Add a column `ERROR`: a message if a value of the row does not fit, else null.

    Also check that text is UTF-8, because Arrow does not check this when it reads a file. Invalid bytes in text become
    U+FFFD. Any other value that does not fit becomes null.
    """
    columns = []
    errors: dict[int, str] = {}
    for field in schema:
        arrays, first = [], 0
        for chunk in table[field.name].chunks:
            try:
                arrays.append(_cast(chunk, field.type))
            except pa.ArrowInvalid:
                rows = [_cast_value(chunk, row, field) for row in range(len(chunk))]
                arrays.append(pa.concat_arrays([value for value, _ in rows]))
                for row, (_, error) in enumerate(rows, first):
                    if error is not None:
                        errors.setdefault(row, error)
            first += len(chunk)
        columns.append(pa.chunked_array(arrays, field.type))
    error_column = pa.array([errors.get(row) for row in range(table.num_rows)], pa.string())
    return pa.table([*columns, error_column], schema.append(pa.field(ERROR, pa.string())))


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast an array to the type `kind`. Raises ArrowInvalid if a value does not fit."""
    if isinstance(values.type, pa.UuidType) and is_text(kind):
        return pa.array([None if value is None else str(value) for value in values.to_pylist()], kind)
    try:
        cast = values.cast(kind)
    except pa.ArrowIndexError:  # raised for nulls if the dictionary is empty
        cast = pa.array(values.to_pylist(), kind)
    cast.validate(full=True)
    return cast


def _cast_value(values: pa.Array, row: int, field: pa.Field) -> tuple[pa.Array, str | None]:
    """Return the value at `row` as an array of the field's type, and an error or None."""
    value = pa.concat_arrays([values.slice(row, 1)])  # a copy, because a slice of a list array keeps all children
    try:
        return _cast(value, field.type), None
    except pa.ArrowInvalid as error:
        if is_text(field.type):
            text = _storage(value).cast(pa.binary())[0].as_py().decode(errors="replace")
            return pa.array([text], field.type), f"column {printable(field.name)}: not UTF-8"
        return pa.nulls(1, field.type), f"column {printable(field.name)}: {flat(error)}"


def _storage(value: pa.Array) -> pa.Array:
    """Remove extension types and dictionary encoding from an array."""
    if isinstance(value, pa.ExtensionArray):
        return _storage(value.storage)
    return value.dictionary_decode() if types.is_dictionary(value.type) else value


def split_errors(table: pa.Table) -> tuple[pa.Table, list[str | None]]:
    """Return the table without its column `ERROR`, and each row's error. Without such a column, all errors are None."""
    if ERROR not in table.column_names:
        return table, [None] * table.num_rows
    return table.drop_columns(ERROR), table[ERROR].to_pylist()
