"""Lines of JSON, the types of their values, and Arrow arrays of them.

Nothing is converted: a value has a column's type, or is its row's error. Arrow's own inference does not serve here: it
reads [1, "a"] as integers, true as 1, 1.5 as the integer 1, and text that looks like a date as a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import types

from pipeline.messages import counted, is_unicode, one_line, printable
from pipeline.read.schema import common, is_text
from pipeline.read.text_lines import Unreadable

AS_JSON = {b"skipdecode.json": b"1"}  # metadata of a string field that holds the JSON of values other than strings
_NAMES = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
_SCALARS = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64(), type(None): pa.null()}


def is_json(field: pa.Field) -> bool:
    """Whether the field's strings hold JSON."""
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
    """The object in a line, or why there is none."""
    try:
        value = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return None, f"not UTF-8: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {one_line(error)}"
    if not isinstance(value, dict):
        return None, f"not a JSON object: the line is a {type(value).__name__}"
    return value, None


class JsonTypes:
    """Types of columns, from the rows added: of each column the type of most rows, where they differ.

    Integers and floats are one kind, numbers. Of lists, or objects, without a common type, the first decide.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._columns: dict[str, dict[str, tuple[int, pa.DataType]]] = {name: {} for name in names}
        self._seen: dict[str, None] = {}
        self._lines = 0

    def add(self, lines: Sequence[bytes]) -> None:
        """Look at some rows."""
        self._lines += len(lines)
        rows = [values for values, _ in map(parsed, lines if self._columns else ()) if values is not None]
        for values in rows:
            self._seen.update(dict.fromkeys(values))
        for column, kinds in self._columns.items():
            for value in (values[column] for values in rows if values.get(column) is not None):
                name, kind = _NAMES[type(value)], value_type(value)
                count, known = kinds.get(name, (0, pa.null()))
                kinds[name] = count + 1, (None if kind is None else common(known, kind)) or known

    def lack(self, block: bytes) -> bool:
        """Whether some lines may hold a value of a column that had none so far."""
        lacking = (
            name for name, kinds in self._columns.items() if all(types.is_null(kind) for _, kind in kinds.values())
        )
        for column in lacking:
            for key in {json.dumps(column, ensure_ascii=ascii).encode() for ascii in (True, False)}:
                if key in block and re.search(re.escape(key) + rb"\s*+:\s*+(?!null)", block):
                    return True
        return False

    def schema(self, as_json: frozenset[str]) -> pa.Schema:
        """All columns seen, null where the type is not asked for. Raises Unreadable if no row was a JSON object."""
        if self._columns and self._lines and not self._seen:
            raise Unreadable(f"{counted(self._lines, 'line')} read, and none holds a JSON object")
        fields = []
        for column in self._seen if self._lines else self._columns:
            kinds = self._columns.get(column, {}).values()
            _, kind = max(kinds, key=itemgetter(0), default=(0, pa.null()))
            kind = pa.string() if column in as_json and not types.is_null(kind) else kind
            fields.append((column if is_unicode(column) else repr(column), kind))
        return pa.schema(fields)


def value_type(value: Any) -> pa.DataType | None:
    """A JSON value's type; None if a list in it mixes types. An object without fields has the type null."""
    if isinstance(value, list):
        kinds = set(map(type, value))
        items = map(value_type, value) if kinds & {list, dict} else map(_SCALARS.get, kinds)
        found: pa.DataType | None = pa.null()
        for item in items:
            found = None if found is None or item is None else common(found, item)
        return None if found is None else pa.list_(found)
    if isinstance(value, dict):
        fields = [(name, value_type(each)) for name, each in value.items()]
        if not all(kind is not None and is_unicode(name) for name, kind in fields):
            return None
        return pa.struct(fields) if fields else pa.null()
    return _SCALARS[type(value)]


def json_array(values: Sequence[Any], field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """The values as an array of the field's type, and the errors by position.

    A value of another type becomes null, in a column of text its JSON.
    """
    if is_json(field):
        values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    try:
        return _array(values, field.type), {}
    except (pa.ArrowException, ValueError, OverflowError):
        pass  # the rows are found below
    arrays, errors = [], {}
    for position, value in enumerate(values):
        array, error = _one(value, field.type)
        arrays.append(array)
        if error is not None:
            errors[position] = f"column {printable(field.name)}: {error}"
    return pa.concat_arrays(arrays), errors


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """The values as an array. Raises ValueError, OverflowError or ArrowException if one does not fit."""
    found = value_type(list(values))
    if found is None or common(kind, found.value_type) != kind:
        raise ValueError
    return pa.array(values, kind)


def _one(value: Any, kind: pa.DataType) -> tuple[pa.Array, str | None]:
    if value == {} and not types.is_struct(kind):  # an object without fields has the type null
        return pa.nulls(1, kind), None
    shown = json.dumps(value)
    try:
        return _array([value], kind), None
    except UnicodeEncodeError:
        reason = "text is not valid Unicode: it holds a lone surrogate"
        shown = value.encode(errors="replace").decode() if isinstance(value, str) else shown
    except (pa.ArrowException, ValueError, OverflowError):
        cut = f"{shown[:80]}{'…' * (len(shown) > 80)}"
        reason = f"{_NAMES[type(value)]} that does not fit {printable(kind)}: {cut}"
    return pa.array([shown], kind) if is_text(kind) else pa.nulls(1, kind), reason
