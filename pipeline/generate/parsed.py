"""Derives an Arrow type from a JSON Schema, and reads JSON answers as values of that type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError, flat

_PLAIN = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_OF_VALUES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


def parsed_type(text: str) -> pa.DataType:
    """Return the Arrow type for the values that a JSON Schema allows. An optional property becomes a nullable field.

    Properties that the schema does not list are dropped. Raises a UserError that names the part of the schema that has
    no single type.
    """
    root = json.loads(text)
    kind = _type(root, root, "#", ())
    if not pa.types.is_struct(kind):
        raise UserError("output.parse: the schema must describe an object with properties")
    return kind


def _type(schema: Any, root: Any, place: str, above: tuple[str, ...]) -> pa.DataType:
    """Return the type of `schema`, the part of `root` at `place`. above: the `$ref` values that led to this part."""

    def refuse(reason: str) -> UserError:
        return UserError(f"output.parse: {place} {reason}; leave out output.parse, or change the schema")

    if not isinstance(schema, Mapping):
        raise refuse("allows any value")
    for key in _COMBINED if "properties" in schema else ():
        # in an allOf, parts that only restrict the properties, for example by `required`, are fine
        parts = schema[key] if key == "allOf" and key in schema else ()
        restricts = [isinstance(part, Mapping) and {*_COMBINED, "properties"}.isdisjoint(part) for part in parts]
        if key in schema and not (restricts and all(restricts)):
            raise refuse(f"has properties beside {key}")
    if "$ref" in schema:
        target = schema["$ref"]
        if target in above:
            raise refuse(f"refers to itself by {target}")
        return _type(_resolved(target, root, refuse), root, place, (*above, target))
    if len(schema.get("allOf", ())) == 1 and "properties" not in schema:
        return _type(schema["allOf"][0], root, f"{place}/allOf/0", above)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            cases = [(n, one) for n, one in enumerate(schema[key]) if not _is_null(one)]
            kinds = [_type(one, root, f"{place}/{key}/{n}", above) for n, one in cases]
            if not kinds or any(kind != kinds[0] for kind in kinds):
                raise refuse(f"has {key} with several types")
            return kinds[0]
    given = schema.get("type") or _implied(schema)
    names = [name for name in ([given] if isinstance(given, str) else given) if name != "null"]
    if set(names) == {"integer", "number"}:
        names = ["number"]
    if len(names) != 1:
        raise refuse(f"has {len(names)} types")
    [name] = names
    if name == "array":
        if "prefixItems" in schema or not isinstance(schema.get("items"), Mapping):
            raise refuse("is an array whose items have no single type")
        return pa.list_(_type(schema["items"], root, f"{place}/items", above))
    if name == "object":
        properties = schema.get("properties")
        if not properties:
            raise refuse("is an object without properties")
        fields = [(key, _type(one, root, f"{place}/properties/{key}", above)) for key, one in properties.items()]
        return pa.struct(fields)
    return _PLAIN[name]


def _resolved(target: str, root: Any, refuse: Any) -> Any:
    found = root
    parts = target.split("/")
    try:
        if parts[0] != "#":
            raise KeyError(target)
        for part in parts[1:]:
            found = found[part.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise refuse(f"refers to {target}, which is not in the schema") from None
    return found


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (
        schema.get("type") == "null" or schema.get("const", 0) is None or schema.get("enum") == [None]
    )


def _implied(schema: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema without the key `type` implies."""
    if "properties" in schema:
        return ["object"]
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    return list(dict.fromkeys(_OF_VALUES.get(type(value), "object") for value in values if value is not None))


def parse_answers(
    texts: Sequence[str | None], errors: Sequence[str | None], kind: pa.DataType
) -> tuple[pa.Array, list[str | None]]:
    """Parse answers as JSON of type `kind`. Return the values, and `errors` with one more for each unfit text."""
    values, found = [], []
    for text, error in zip(texts, errors, strict=True):
        value = None
        if text is not None and error is None:
            try:
                value = json.loads(text, parse_float=_finite)
                pa.scalar(value, kind)
            except (ValueError, TypeError, OverflowError, RecursionError) as problem:  # Arrow's errors are ValueErrors
                value, error = None, f"parsed: {flat(problem)}"
        values.append(value)
        found.append(error)
    return pa.array(values, kind), found


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large for a 64-bit float")
    return number
