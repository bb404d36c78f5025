"""Types of JSON values, and Arrow arrays of them. Nothing is converted: a value has a column's type, or is its row's
error.

Arrow's own inference does not serve here: it reads [1, "a"] as integers, true as 1, 1.5 as the integer 1, and text that
looks like a date as a time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types

from pipeline.messages import is_unicode, printable
from pipeline.read.schema import common, is_text

AS_JSON = {b"skipdecode.json": b"1"}  # metadata of a string field that holds the JSON of values other than strings
_NAMES = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_INTEGERS = range(-(2**63), 2**63)
_PYTHON = {  # types of the values of frequent columns
    pa.string(): (str,),
    pa.large_string(): (str,),
    pa.bool_(): (bool,),
    pa.int64(): (int,),
    pa.float64(): (int, float),
}
_NO_ARRAY = (pa.ArrowException, OverflowError, UnicodeEncodeError)


def is_json(field: pa.Field) -> bool:
    """Whether the field's strings hold JSON."""
    return bool(field.metadata and AS_JSON.items() <= field.metadata.items())


class ColumnType:
    """The type of a column's values: that of most rows, where they differ.

    Integers and floats are one kind, numbers. Of lists, or objects, without a common type, the first decide.
    """

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()
        self._types: dict[str, pa.DataType] = {}

    def add(self, values: Sequence[Any]) -> None:
        """Count the values of some rows, null for a row without one."""
        for kind, count in Counter(map(type, values)).items():
            name = _NAMES.get(kind)
            if name is None:
                continue
            self._rows[name] += count
            if kind in (list, dict):
                for value in values:
                    if type(value) is kind:
                        self._widen(name, value_type(value))
            else:
                self._widen(name, _SCALARS[kind])

    def _widen(self, name: str, kind: pa.DataType | None) -> None:
        if kind is not None:
            both = common(self._types.get(name, pa.null()), kind)
            self._types[name] = self._types[name] if both is None else both

    def result(self) -> pa.DataType:
        """The type; null without values."""
        for name, _ in self._rows.most_common():
            if name in self._types:
                return self._types[name]
        return pa.null()


_SCALARS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}


def value_type(value: Any) -> pa.DataType | None:
    """A JSON value's type; None if a list in it mixes types. An object without fields has the type null."""
    if value is None:
        return pa.null()
    if isinstance(value, list):
        item: pa.DataType | None = pa.null()
        for each in value:
            kind = value_type(each)
            item = None if kind is None else common(item, kind)
            if item is None:
                return None
        return pa.list_(item)
    if isinstance(value, dict):
        fields = []
        for name, each in value.items():
            kind = value_type(each)
            if kind is None or not is_unicode(name):
                return None
            fields.append((name, kind))
        return pa.struct(fields) if fields else pa.null()
    return _SCALARS[type(value)]


def has_type(value: Any, kind: pa.DataType) -> bool:
    """Whether a JSON value can be stored in a type without a conversion; null always."""
    if value is None:
        return True
    if isinstance(value, list):
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            return False
        return all(has_type(each, kind.value_type) for each in value)
    if isinstance(value, dict):
        if not types.is_struct(kind):
            return False
        fields = {field.name: field.type for field in kind}
        return all(name in fields and has_type(each, fields[name]) for name, each in value.items())
    if isinstance(value, str):
        return is_text(kind)
    if isinstance(value, bool):
        return bool(types.is_boolean(kind))
    if isinstance(value, int) and types.is_integer(kind):
        return value in _INTEGERS
    return bool(types.is_floating(kind) or (isinstance(value, int) and types.is_decimal(kind)))


def json_array(values: Sequence[Any], field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """The values as an array of the field's type, and the errors by position.

    A value of another type becomes null, in a column of text its JSON.
    """
    if is_json(field):
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    try:
        if _have_type(values, field.type):
            return pa.array(values, field.type), {}
    except _NO_ARRAY:
        pass  # the rows are found below
    arrays, errors = [], {}
    for position, value in enumerate(values):
        array, error = _one(value, field)
        arrays.append(array)
        if error is not None:
            errors[position] = f"column {printable(field.name)}: {error}"
    return pa.concat_arrays(arrays), errors


def _have_type(values: Iterable[Any], kind: pa.DataType) -> bool:
    plain = _PYTHON.get(kind)
    if plain is not None:
        return set(map(type, values)) <= {*plain, type(None)}
    return all(has_type(value, kind) for value in values)


def _one(value: Any, field: pa.Field) -> tuple[pa.Array, str | None]:
    kind = field.type
    if value == {} and not types.is_struct(kind):  # an object without fields has the type null
        return pa.nulls(1, kind), None
    if has_type(value, kind):
        try:
            return pa.array([value], kind), None
        except UnicodeEncodeError:
            reason = "text is not valid Unicode: it holds a lone surrogate"
            if is_text(kind):
                return pa.array([value.encode(errors="replace").decode()], kind), reason
            return pa.nulls(1, kind), reason
        except (pa.ArrowException, OverflowError) as error:
            return pa.nulls(1, kind), " ".join(str(error).split())
    reason = f"{_NAMES[type(value)]} that does not fit {printable(kind)}"
    return (pa.array([json.dumps(value)], kind) if is_text(kind) else pa.nulls(1, kind)), reason
