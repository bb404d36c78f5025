"""Whether a table can hold the columns that a job writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa
from pyarrow import types

from actors.engine.errors import UserError
from pipeline.messages import printable

_HELD = {  # types that tables hold as Parquet stores them
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
}


def check_types(table: str, schema: pa.Schema, more: Collection[pa.DataType]) -> None:
    """Raise UserError that names a column whose type no table can hold as it is. more: further types that it holds."""
    for field in schema:
        wrong = _unheld(field.type, more)
        if wrong is not None:
            raise UserError(
                f"output.table: {table} cannot hold column {field.name!r} of type {printable(wrong)}; leave it out of "
                "output.keep, or convert the input's column"
            )


def _unheld(kind: pa.DataType, more: Collection[pa.DataType]) -> pa.DataType | None:
    """The first type in `kind` that a table cannot hold."""
    if types.is_struct(kind):
        children = [child.type for child in kind]
    elif types.is_list(kind) or types.is_large_list(kind):
        children = [kind.value_type]
    elif types.is_map(kind):
        children = [kind.key_type, kind.item_type]
    else:
        return None if kind in _HELD or kind in more or types.is_decimal128(kind) else kind
    return next((wrong for child in children if (wrong := _unheld(child, more)) is not None), None)


def check_columns(table: str, there: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise UserError that names the first column in which a table and the job's answers differ.

    Args:
        there, ours: type by name.
    """
    problem = None
    for name, kind in ours.items():
        if name not in there:
            problem = f"has no column {name!r}, which the job writes ({kind})"
        elif there[name] != kind:
            problem = f"has column {name!r} as {there[name]}, the job writes {kind}"
        if problem is not None:
            break
    else:
        surplus = next((name for name in there if name not in ours), None)
        if surplus is not None:
            problem = f"has a column {surplus!r}, which the job does not write"
    if problem is not None:
        raise UserError(f"output.table: {table} {problem}; choose another table, or change output.keep")
