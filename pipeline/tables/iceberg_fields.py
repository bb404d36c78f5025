"""Field ids of a Parquet file's columns: Iceberg knows a column by its id, whatever its name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyarrow import types
from pyiceberg.table.name_mapping import MappedField, NameMapping

ID = b"PARQUET:field_id"


def file_field_ids(schema: pa.Schema, mapping: NameMapping | None) -> dict[str, int]:
    """Dotted name -> field id of every column and nested field of a file.

    Of a file without ids the table's name mapping gives them; a field without one is left out.
    """
    fields = {path: field for column in schema for path, field in _paths(column.name, column)}
    ids = {path: int(field.metadata[ID]) for path, field in fields.items() if ID in (field.metadata or {})}
    if ids or mapping is None:
        return ids
    mapped = dict(_mapped(mapping, ""))
    return {path: mapped[path] for path in fields if path in mapped}


def _mapped(fields: Iterable[MappedField], prefix: str) -> Iterator[tuple[str, int]]:
    """Dotted name and id of each field of a name mapping; a field has several names once it was renamed."""
    for field in fields:
        for name in field.names:
            if field.field_id is not None:
                yield f"{prefix}{name}", field.field_id
            yield from _mapped(field.fields, f"{prefix}{name}.")


def _paths(path: str, field: pa.Field) -> Iterator[tuple[str, pa.Field]]:
    """A field and the fields in it, under Iceberg's dotted names."""
    yield path, field
    kind = field.type
    if types.is_struct(kind):
        children = [(child.name, child) for child in kind]
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        children = [("element", kind.value_field)]
    elif types.is_map(kind):
        children = [("key", kind.key_field), ("value", kind.item_field)]
    else:
        children = []
    for name, child in children:
        yield from _paths(f"{path}.{name}", child)
