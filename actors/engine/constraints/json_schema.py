"""Converts JSON Schemas to schemas that llguidance supports.

llguidance refuses keys that no grammar can express, and most uses of `oneOf`. If the branches of a `oneOf` exclude each
other by the value of a property (a discriminator) or by their types, the `oneOf` is replaced by an `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from actors.engine.errors import UserError, flat

# keywords whose value is a mapping from names to schemas, a list of schemas, or a single schema
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
Schema = dict[str, Any]


def for_grammar(schema: Schema) -> Schema:
    """Return the schema with an equivalent `anyOf` in place of each `oneOf`.

    Raises UserError if the branches of a `oneOf` do not exclude each other. The message gives the place of the `oneOf`.
    """
    converted: Schema = _mapped(schema, lambda one, place: _converted(one, schema, place), "")
    return converted


def _mapped(schema: Any, change: Callable[[Schema, str], Schema], place: str) -> Any:
    """Apply `change` to `schema` and all schemas inside it, innermost first. place: JSON path of `schema`."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        inside = f"{place}/{key}"
        if key in OF_SCHEMAS and isinstance(value, dict):
            found[key] = {name: _mapped(one, change, f"{inside}/{name}") for name, one in value.items()}
        elif key in LISTS and isinstance(value, list):
            found[key] = [_mapped(one, change, f"{inside}/{number}") for number, one in enumerate(value)]
        elif key in SCHEMAS:
            found[key] = _mapped(value, change, inside)
    return change(found, place)


def _converted(schema: Schema, root: Schema, place: str) -> Schema:
    """Convert `schema` to a schema that llguidance supports. The schemas inside it are converted already."""
    branches = schema.get("oneOf")
    if isinstance(branches, list):
        tag = _tag(branches, root)
        if tag is None and not _types_differ(branches, root):
            raise UserError(
                f"oneOf at #{place}: its branches do not exclude each other: give each branch its own type, or "
                "give all a property with different const or enum values; or write anyOf"
            )
        if tag is not None:
            branches = [
                {**one, "required": [*dict.fromkeys([*_resolved(one, root).get("required", ()), tag])]}
                for one in branches
            ]
        among = [{"anyOf": schema["anyOf"]}] if "anyOf" in schema else []
        schema = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf")}
        schema |= {"anyOf": branches, **({"allOf": [*schema.get("allOf", ()), *among]} if among else {})}
    return schema


def _tag(branches: list[Any], root: Schema) -> str | None:
    """Return a property (discriminator) of which no two branches allow the same value; None if there is none."""
    values = [
        {
            name: {json.dumps(value) for value in (one["enum"] if "enum" in one else [one["const"]])}
            for name, one in branch.get("properties", {}).items()
            if branch.get("type") == "object"
            and isinstance(one, dict)
            and ("const" in one or isinstance(one.get("enum"), list))
        }
        for branch in (_resolved(one, root) for one in branches)
    ]
    name: str
    for name in values[0] if values else ():
        if all(name in one for one in values):
            every = [value for one in values for value in one[name]]
            if len(every) == len(set(every)):
                return name
    return None


def _types_differ(branches: list[Any], root: Schema) -> bool:
    """Return whether no two branches have a JSON type in common."""
    seen: set[str] = set()
    for branch in branches:
        kinds = _resolved(branch, root).get("type", [*TYPES])
        own = {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}
        if own & seen:
            return False
        seen |= own
    return True


def _resolved(schema: Any, root: Schema) -> Schema:
    """Replace a schema's `$ref` by the schema in `root` that it refers to. Keep the schema's other keys.

    Return {} if `schema` is not an object or the `$ref` cannot be resolved.
    """
    seen = 0
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and seen < 100:
        seen += 1
        target: Any = root
        if not reference.startswith("#"):
            return {}
        for part in reference[1:].split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            return {}
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema if isinstance(schema, dict) else {}


def overlap(schema: Schema) -> str | None:
    """Return an error message if a `patternProperties` pattern matches a property that has another schema; else None.

    With such a pattern, llguidance would let the model begin the property's name, but never end it. Raises UserError if
    a pattern is not supported.
    """
    found: list[str] = []

    def look(one: Schema, place: str) -> Schema:
        whole = [one, *(_resolved(part, schema) for part in one.get("allOf", ()))]
        for more in ({}, *one.get("anyOf", ()), *one.get("oneOf", ())):
            parts = [*whole, _resolved(more, schema)]
            properties = [item for part in parts for item in (part.get("properties") or {}).items()]
            patterns = [item for part in parts for item in (part.get("patternProperties") or {}).items()]
            for pattern, of_pattern in patterns:
                found.extend(
                    f"patternProperties {pattern!r} at #{place} matches the property {name!r}, whose schema differs: "
                    "write a pattern that does not match it"
                    for name, other in properties
                    if other != of_pattern and has_match(pattern, name)
                )
        return one

    _mapped(schema, look, "")
    return found[0] if found else None


def has_match(pattern: str, text: str) -> bool:
    """Return whether `pattern` matches a part of `text`, in linear time. Raises UserError if it is not supported."""
    return bool(_compiled(pattern).isinstance_python(text))


@lru_cache(64)  # a compiled pattern has up to 10 MB
def _compiled(pattern: str) -> Any:
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = flat(str(error).rpartition("rror: ")[2])
        raise UserError(f"pattern {pattern!r} cannot be checked ({reason}): write a simpler one") from None
