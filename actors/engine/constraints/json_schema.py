"""Converts JSON Schemas to schemas that llguidance supports.

llguidance refuses keywords by their name, unknown formats, and most uses of `oneOf`. Keywords whose value restricts
nothing are dropped. If the branches of a `oneOf` exclude each other by the value of a property (a discriminator) or by
their types, the `oneOf` is replaced by an `anyOf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from actors.engine.errors import UserError, flat

# keywords whose value is a mapping from names to schemas, a list of schemas, or a single schema; OpenAPI's documents
# keep schemas in components/schemas
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "schemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "components"),
    *("not", "if", "then", "else"),
)
FORMATS = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}  # llguidance's
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
Schema = dict[str, Any]


def mapped(schema: Any, change: Callable[[Schema, str], Schema], place: str = "") -> Any:
    """Apply `change` to `schema` and all schemas inside it, innermost first. place: JSON path of `schema`."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key, value in schema.items():
        inside = f"{place}/{key}"
        if key in OF_SCHEMAS and isinstance(value, dict):
            found[key] = {name: mapped(one, change, f"{inside}/{name}") for name, one in value.items()}
        elif key in LISTS and isinstance(value, list):
            found[key] = [mapped(one, change, f"{inside}/{number}") for number, one in enumerate(value)]
        elif key in SCHEMAS:
            found[key] = mapped(value, change, inside)
    return change(found, place)


def restrictions(schema: Schema, place: str = "") -> Schema:
    """Return the schema without the keywords that restrict nothing, and without formats that llguidance lacks."""
    return {key: value for key, value in schema.items() if not _is_neutral(key, value, schema)}


def _is_neutral(key: str, value: Any, schema: Schema) -> bool:
    """Return whether a keyword restricts nothing, by its value and the keywords beside it in `schema`."""

    def allows_all(name: str) -> bool:
        return schema.get(name, True) is True or schema[name] == {}

    match key:
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "uniqueItems" | "not":
            return value is False
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return allows_all(key)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return all(one is True or one in ({}, []) for one in value.values())
        case "if" | "then" | "else":
            then = allows_all("then") or schema.get("if") is False
            return "if" not in schema or (then and (allows_all("else") or allows_all("if")))
        case "contains" | "minContains" | "maxContains":
            return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)
        case "minProperties":
            return bool(value <= len(set(schema.get("required", ()))))
        case "maxProperties":
            return not _has_free_keys([schema]) and bool(value >= len(schema.get("properties", ())))
    return False


def _has_free_keys(parts: list[Schema]) -> bool:
    """Return whether an object that matches all `parts` may have keys that no `properties` names."""
    return not any(part.get("additionalProperties") is False and not part.get("patternProperties") for part in parts)


def without_one_of(schema: Schema, root: Schema, place: str) -> Schema:
    """Return the schema with an equivalent `anyOf` in place of its `oneOf`.

    root: the whole schema. place: JSON path of `schema` in it. Raises UserError if branches do not exclude each other.
    """
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


def unkept(schema: Schema) -> str | None:
    """Return an error message if a rule about keys is one that llguidance accepts but does not keep; else None.

    If a `patternProperties` pattern matches a property that has another schema, llguidance would let the model begin
    the property's name, but never end it. `minProperties` counts keys as they are written, and two of the keys that no
    `properties` names may be the same. Raises UserError if a pattern is not supported.
    """
    found: list[str] = []

    def look(one: Schema, place: str) -> Schema:
        own = _resolved(one, schema)
        whole = [own, *(_resolved(part, schema) for part in own.get("allOf", ()))]
        for more in ({}, *own.get("anyOf", ()), *own.get("oneOf", ())):
            parts = [*whole, _resolved(more, schema)]
            properties = [item for part in parts for item in (part.get("properties") or {}).items()]
            patterns = [item for part in parts for item in (part.get("patternProperties") or {}).items()]
            for pattern, of_pattern in patterns:
                found.extend(
                    f"patternProperties {pattern!r} at #{place} matches the property {name!r}, whose schema differs: "
                    "write a pattern that does not match it"
                    for name, other in properties
                    if other != of_pattern and _compiled(pattern).isinstance_python(name)
                )
            least = max(part.get("minProperties", 0) for part in parts)
            required = {name for part in parts for name in part.get("required", ())}
            # the schema around an `allOf` has the keys of all its branches
            if least > len(required) + 1 and _has_free_keys(parts) and place.split("/")[-2:-1] != ["allOf"]:
                found.append(
                    f"minProperties at #{place}: the grammar cannot tell whether {least} keys differ: require keys by "
                    "name, or leave it out"
                )
        return one

    mapped(schema, look)
    return found[0] if found else None


def wrong_key(text: str) -> str | None:
    """Return an error message if an object in the JSON `text` has a key twice, or one that is written as `\\u0061`.

    Grammars hold neither for keys that no `properties` names: a reader would keep only one of the values, and a
    property's name in escapes would have another schema than its own. Strings that are not keys have no such escapes.
    """
    if re.search(r"(?<!\\)(\\\\)*\\u(?!00[01])", text):
        return "a key is written with escapes"

    def check(pairs: list[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise UserError(f"an object has the key {max(keys, key=keys.count)!r} twice")

    try:
        json.loads(text, object_pairs_hook=check, parse_int=str)
    except (ValueError, RecursionError) as error:
        return flat(error)
    return None


@lru_cache(64)  # a compiled pattern has up to 10 MB
def _compiled(pattern: str) -> Any:
    """Return a validator of texts that `pattern` matches, in linear time. Raises UserError if it is not supported."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = flat(str(error).rpartition("rror: ")[2])
        raise UserError(f"pattern {pattern!r} cannot be checked ({reason}): write a simpler one") from None
