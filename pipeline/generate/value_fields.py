"""Fields of structured answers that have one of a few values: which a JSON Schema has, and how often each value is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

MOST_FIELDS = 16  # of a schema that are counted: the first ones
MOST_VALUES = 256  # of a field that is counted
MOST_LEVELS = 4  # of objects within objects, and of references
VALUE_CHARS = 200  # of a value's text
VALUES_KEY = b"skipdecode.value_fields"  # of a part's footer

# the text of each value, by its JSON, for each path of properties
ValueFields = Mapping[tuple[str, ...], Mapping[str, str]]


def value_fields(form: Mapping[str, str] | None) -> dict[tuple[str, ...], dict[str, str]]:
    """The fields of a job's `output_format` whose values an `enum`, a `const` or the type boolean lists.

    Fields of objects within the object too, but none within lists. form: {kind: text}; None: no format.
    """
    text = (form or {}).get("json_schema")
    if text is None:
        return {}
    root = json.loads(text)
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for path, values in _fields(root, root, ()):
        names = {field_name(other) for other in found}
        if len(found) < MOST_FIELDS and field_name(path) not in names:
            found[path] = _texts(values)
    return found


def field_name(path: tuple[str, ...]) -> str:
    """A path as text: `address.country`."""
    return ".".join(path)


def _fields(schema: Any, root: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Path and values of each field of an object with few values."""
    schema = _resolved(schema, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or len(path) >= MOST_LEVELS:
        return
    for name, one in properties.items():
        values = _values(one, root, 0)
        if values is None:
            yield from _fields(one, root, (*path, name))
        elif len(set(map(json.dumps, values))) <= MOST_VALUES:
            yield (*path, name), values


def _values(schema: Any, root: Any, level: int) -> list[Any] | None:
    """The only values that a schema allows; None: it allows others, objects or lists, or too long ones."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or level > MOST_LEVELS:
        return None
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            cases = [_values(case, root, level + 1) for case in schema[key]]
            return None if None in cases else [value for case in cases for value in case or ()]
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    else:
        kinds = schema.get("type")
        of_kind: dict[Any, list[Any]] = {"boolean": [True, False], "null": [None]}
        listed: list[Any] = kinds if isinstance(kinds, list) else [kinds]
        if not listed or not all(isinstance(kind, str) and kind in of_kind for kind in listed):
            return None
        values = [value for kind in listed for value in of_kind[kind]]
    simple = all(value is None or isinstance(value, str | int | float) for value in values)
    return values if simple and all(len(str(value)) <= VALUE_CHARS for value in values) else None


def _resolved(schema: Any, root: Any) -> Any:
    """What a schema refers to, or the only one of its `allOf`; None: a reference that leads elsewhere."""
    for _ in range(MOST_LEVELS):
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        elif not isinstance(schema.get("$ref"), str):
            return schema
        else:
            first, *names = schema["$ref"].split("/")
            schema = root if first == "#" else None
            for name in names:
                name = name.replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def _texts(values: list[Any]) -> dict[str, str]:
    """The text of each value, by its JSON: of text itself, unless another value is written so."""
    written = {json.dumps(value): value if isinstance(value, str) else json.dumps(value) for value in values}
    return written if len(set(written.values())) == len(written) else {text: text for text in written}


def to_footer(fields: ValueFields) -> str:
    """For a part's footer, so that its statistics can be computed from the part alone."""
    return json.dumps([[list(path), dict(texts)] for path, texts in fields.items()])


def from_footer(part: pa.Table) -> dict[tuple[str, ...], dict[str, str]]:
    """The fields that a part's footer names; none of a job without them."""
    return {tuple(path): texts for path, texts in json.loads((part.schema.metadata or {}).get(VALUES_KEY, "[]"))}


def field_counts(part: pa.Table, fields: ValueFields) -> str:
    """JSON of {field: {value: answers}}, the most frequent first; "" without fields.

    Answers that are cut off, or lack a field, are not counted there.
    """
    if not fields:
        return ""
    counts: dict[tuple[str, ...], Counter[str]] = {path: Counter() for path in fields}
    for text, error in zip(part["generated_text"].to_pylist(), part["error"].to_pylist(), strict=True):
        answer = None if text is None or error is not None else _parsed(text)
        for path, texts in fields.items():
            value = answer
            for name in path:
                value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
            written = None if isinstance(value, dict | list) or value is _MISSING else texts.get(json.dumps(value))
            if written is not None:
                counts[path][written] += 1
    return json.dumps({field_name(path): dict(counted.most_common()) for path, counted in counts.items()})


_MISSING = object()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
