"""One schema for all files of a job: a type that each column has in every part, and rows brought to it.

Files of one folder rarely agree to the letter: int32 or int64, string or large_string, a dictionary, a column
null throughout. What differs is settled when the job is planned; a value that then does not fit is the error
of its row. Nothing of a file's own metadata comes along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from actors.engine.errors import UserError
from pipeline.messages import printable

ERROR = "__error"  # what is wrong with a row, null if nothing; no input column is called so
_UNITS = ("s", "ms", "us", "ns")
_SIGNED = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_FLOATS = (pa.float16(), pa.float32(), pa.float64())


def one_schema(columns: Sequence[str], files: Mapping[str, pa.Schema]) -> pa.Schema:
    """The type of each column over all files (URL -> schema), nullable and without metadata.

    What is null in every file, a column or what lies within, is a string. ValueError of one line names file, column
    and types that do not agree.
    """
    fields = []
    for name in columns:
        kind, where = pa.null(), ""
        for url, schema in files.items():
            here = _column(name, url, schema)
            both = common(kind, plain(here))
            if both is None:
                raise UserError(f"{url}: column {name!r} is {printable(here)}, but {printable(kind)} in {where}")
            if both != kind:
                kind, where = both, url
        field = pa.field(name, _settled(kind))
        for url, schema in files.items():
            here = _column(name, url, schema)
            if not _holds(here, field):
                shown = printable(here), printable(field.type)
                raise UserError(f"{url}: column {name!r} is {shown[0]}, which cannot be read and written as {shown[1]}")
        fields.append(field)
    return pa.schema(fields)


def _column(name: str, url: str, schema: pa.Schema) -> pa.DataType:
    places = schema.get_all_field_indices(name)
    if not places:
        raise UserError(f"{url}: no column {name!r}; it has {', '.join(map(printable, schema.names))}")
    if len(places) > 1:
        raise UserError(f"{url}: column {name!r} is there {len(places)} times; rename all but one")
    return schema.field(places[0]).type


def _holds(here: pa.DataType, field: pa.Field) -> bool:
    """Whether Arrow has the cast, and Parquet the type."""
    try:
        pa.nulls(0, here).cast(field.type)
        pq.write_table(pa.schema([field]).empty_table(), pa.BufferOutputStream())
    except pa.ArrowNotImplementedError:
        return False
    return True


def plain(kind: pa.DataType) -> pa.DataType:
    """A type without what is only a way to store it: dictionaries, views of text, extensions, names and
    metadata of children."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain(kind.storage_type)
    if types.is_dictionary(kind):
        return plain(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    return _rebuilt(kind, plain)


def _settled(kind: pa.DataType) -> pa.DataType:
    """A plain type with string for null, at any depth; Arrow's casts between lists of nulls are not to be relied on."""
    return pa.string() if types.is_null(kind) else _rebuilt(kind, _settled)


def _rebuilt(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A nested type with its children changed, their own names and metadata left behind; any other as it is."""
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


def common(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A plain type that holds the values of both, None if there is none.

    Two rest on the values, which are checked row by row: whole numbers beside fractions become doubles, and
    uint64 beside signed numbers int64.
    """
    if one == other or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    for family in (_numbers, _decimals, _texts, _times, _lists, _nested):
        found = family(one, other)
        if found is not None:
            return found
    return None


def _numbers(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    for family in (_SIGNED, _UNSIGNED, _FLOATS):
        if one in family and other in family:
            return family[max(family.index(one), family.index(other))]
    kinds = (*_SIGNED, *_UNSIGNED, *_FLOATS)
    if one not in kinds or other not in kinds:
        return None
    if one in _FLOATS or other in _FLOATS:
        return pa.float64()
    signed, unsigned = (one, other) if one in _SIGNED else (other, one)
    return _SIGNED[min(max(_SIGNED.index(signed), _UNSIGNED.index(unsigned) + 1), 3)]


def _decimals(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if not (types.is_decimal(one) or types.is_decimal(other)):
        return None
    whole = scale = 0
    for kind in (one, other):
        if types.is_decimal(kind):
            whole, scale = max(whole, kind.precision - kind.scale), max(scale, kind.scale)
        elif types.is_integer(kind):
            whole = max(whole, {8: 3, 16: 5, 32: 10, 64: 20}[kind.bit_width])
        else:
            return None
    if whole + scale > 76:
        return None
    return pa.decimal128(whole + scale, scale) if whole + scale <= 38 else pa.decimal256(whole + scale, scale)


def _texts(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if is_text(one) and is_text(other):
        return pa.large_string()
    sized = (pa.binary(), pa.large_binary())
    if all(kind in sized or types.is_fixed_size_binary(kind) for kind in (one, other)):
        return pa.large_binary() if pa.large_binary() in (one, other) else pa.binary()
    return None


def _times(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if types.is_timestamp(one) and types.is_timestamp(other):
        if (one.tz is None) != (other.tz is None):
            return None
        return pa.timestamp(_finer(one, other), one.tz if one.tz == other.tz else "UTC")
    if types.is_duration(one) and types.is_duration(other):
        return pa.duration(_finer(one, other))
    if types.is_time(one) and types.is_time(other):
        unit = _finer(one, other)
        return pa.time32(unit) if types.is_time32(one) and types.is_time32(other) else pa.time64(unit)
    return None


def _finer(one: pa.DataType, other: pa.DataType) -> str:
    return _UNITS[max(_UNITS.index(one.unit), _UNITS.index(other.unit))]


def _lists(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    kinds = (one, other)
    if not all(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) for kind in kinds):
        return None
    below = common(one.value_type, other.value_type)
    if below is None:
        return None
    sizes = {kind.list_size if types.is_fixed_size_list(kind) else None for kind in kinds}
    if len(sizes) == 1 and None not in sizes:
        return pa.list_(below, sizes.pop())
    return pa.large_list(below) if any(types.is_large_list(kind) for kind in kinds) else pa.list_(below)


def _nested(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if types.is_map(one) and types.is_map(other):
        key, item = common(one.key_type, other.key_type), common(one.item_type, other.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if not (types.is_struct(one) and types.is_struct(other)):
        return None
    fields: dict[str, pa.DataType] = {}
    for kind in (one, other):
        if len({child.name for child in kind}) < kind.num_fields:
            return None
        for child in kind:
            both = common(fields.get(child.name, pa.null()), child.type)
            if both is None:
                return None
            fields[child.name] = both
    return pa.struct(list(fields.items()))


def is_text(kind: pa.DataType) -> bool:
    """Whether a plain type is text, of either width."""
    return bool(types.is_string(kind) or types.is_large_string(kind))


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's columns in the schema's types, and a column `ERROR` for rows with a value that does not fit.

    Arrow does not check on reading that text is UTF-8: it is checked here. Such text has U+FFFD in place of what
    is wrong, any other value that does not fit is null.
    """
    columns = []
    errors: dict[int, str] = {}
    for field in schema:
        pieces, first = [], 0
        for chunk in table[field.name].chunks:
            try:
                pieces.append(_cast(chunk, field.type))
            except pa.ArrowInvalid:
                rows = [_alone(chunk, row, field) for row in range(len(chunk))]
                pieces.append(pa.concat_arrays([value for value, _ in rows]))
                for row, (_, error) in enumerate(rows, first):
                    if error is not None:
                        errors.setdefault(row, error)
            first += len(chunk)
        columns.append(pa.chunked_array(pieces, field.type))
    found = pa.array([errors.get(row) for row in range(table.num_rows)], pa.string())
    return pa.table([*columns, found], schema.append(pa.field(ERROR, pa.string())))


def _cast(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """ArrowInvalid if one of the values does not fit."""
    try:
        cast = values.cast(kind)
    except pa.ArrowIndexError:  # Arrow looks nulls up too, and in an empty dictionary there is nothing
        cast = pa.array(values.to_pylist(), kind)
    cast.validate(full=True)
    return cast


def _alone(values: pa.Array, row: int, field: pa.Field) -> tuple[pa.Array, str | None]:
    """One value as an array, and what is wrong with it."""
    value = pa.concat_arrays([values.slice(row, 1)])  # a slice of a list still holds all that lies below
    try:
        return _cast(value, field.type), None
    except pa.ArrowInvalid as error:
        if is_text(field.type):
            text = _storage(value).cast(pa.binary())[0].as_py().decode(errors="replace")
            return pa.array([text], field.type), f"column {printable(field.name)}: not UTF-8"
        return pa.nulls(1, field.type), f"column {printable(field.name)}: {' '.join(str(error).split())}"


def _storage(value: pa.Array) -> pa.Array:
    if isinstance(value, pa.ExtensionArray):
        return _storage(value.storage)
    return value.dictionary_decode() if types.is_dictionary(value.type) else value


def split_errors(table: pa.Table) -> tuple[pa.Table, list[str | None]]:
    """A table of `conform` without its errors, and these; any other table has none."""
    if ERROR not in table.column_names:
        return table, [None] * table.num_rows
    return table.drop_columns(ERROR), table[ERROR].to_pylist()
