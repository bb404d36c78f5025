"""Converts JSON Schemas to schemas that llguidance supports, and validates finished answers.

llguidance refuses keys that no grammar can express, and most uses of `oneOf`. If the branches of a `oneOf` exclude each
other by the value of a property (a discriminator) or by their types, the `oneOf` is replaced by an `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from actors.engine.errors import UserError, flat

NOT_IN_GRAMMARS = (
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "not", "if", "then", "else"),
    *("$dynamicRef", "$recursiveRef"),
)
# keywords whose value is a mapping from names to schemas, a list of schemas, or a single schema
OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SCHEMAS = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
CHECKED = "have answers checked after generation (output_format.check: after)"
Schema = dict[str, Any]


def for_grammar(schema: Schema, *, after: bool) -> Schema:
    """Return the schema with an equivalent `anyOf` in place of each `oneOf`.

    after: whether `problem` checks the finished answers. If so, keys that no grammar can express are left out, and
        branches of a `oneOf` may overlap.

    Raises:
        UserError: the branches of a `oneOf` do not exclude each other. The message gives the place of the `oneOf`.
    """
    no_patterns = after and overlap(schema) is not None
    converted: Schema = _mapped(
        schema, lambda one, place: _converted(one, schema, place, after=after, no_patterns=no_patterns), ""
    )
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


def _converted(schema: Schema, root: Schema, place: str, *, after: bool, no_patterns: bool) -> Schema:
    """Convert `schema` to a schema that llguidance supports. The schemas inside it are converted already."""
    branches = schema.get("oneOf")
    if isinstance(branches, list):
        tag = _tag(branches, root)
        if tag is None and not after and not _types_differ(branches, root):
            raise UserError(
                f"oneOf at #{place}: its branches do not exclude each other: give each branch its own type, or "
                f"give all a property with different const or enum values; or write anyOf, or {CHECKED}"
            )
        if tag is not None:
            branches = [
                {**one, "required": [*dict.fromkeys([*_resolved(one, root).get("required", ()), tag])]}
                for one in branches
            ]
        among = [{"anyOf": schema["anyOf"]}] if "anyOf" in schema else []
        schema = {key: value for key, value in schema.items() if key not in ("oneOf", "anyOf")}
        schema |= {"anyOf": branches, **({"allOf": [*schema.get("allOf", ()), *among]} if among else {})}
    if not after:
        return schema
    left_out = {*NOT_IN_GRAMMARS, *(["patternProperties"] if no_patterns else [])}
    # llguidance would count only required properties for minProperties and maxProperties
    if not set(schema.get("properties", {})) <= set(schema.get("required", ())):
        left_out |= {"minProperties", "maxProperties"}
    return {key: value for key, value in schema.items() if key not in left_out}


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
                    f"write a pattern that does not match it, or {CHECKED}"
                    for name, other in properties
                    if other != of_pattern and has_match(pattern, name)
                )
        return one

    _mapped(schema, look, "")
    return found[0] if found else None


def problem(text: str, schema: str) -> str | None:
    """Return why `text` is not JSON or violates `schema` (JSON text); None if `text` is valid."""
    from referencing.exceptions import Unresolvable

    try:
        error = next(iter(validator(schema).iter_errors(json.loads(text))), None)
    except UserError as wrong:
        return flat(wrong)
    except ValueError as wrong:
        return f"not JSON: {wrong}"
    except RecursionError:
        return "nested too deeply to be checked"
    except OverflowError:
        return "a number is too large to be checked"
    except Unresolvable as wrong:
        return f"the schema's $ref cannot be resolved: {flat(wrong)}"
    return None if error is None else f"{error.json_path}: {flat(error.message)}"


@lru_cache(256)
def validator(schema: str) -> Any:
    """Return a validator for `schema` (JSON text). Raises UserError if it is no JSON Schema, or cannot be checked."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    values = json.loads(schema)
    kind = validator_for(values, default=Draft202012Validator)
    try:
        kind.check_schema(values)
    except SchemaError as error:
        raise UserError(f"not a JSON Schema: {error.json_path}: {flat(error.message)}") from None
    text = json.dumps(values)
    if '"unevaluatedProperties":' in text and '"patternProperties":' in text:
        raise UserError("unevaluatedProperties cannot be checked with patternProperties: use additionalProperties")

    def checked(one: Schema, place: str) -> Schema:
        for pattern in (*one.get("patternProperties", ()), *([one["pattern"]] if "pattern" in one else ())):
            has_match(pattern, "")
        return {key: value for key, value in one.items() if key != "$schema"}  # jsonschema would change the class

    return _without_backtracking(kind)(_mapped(values, checked, ""))


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


def _without_backtracking(kind: Any) -> Any:
    """Return jsonschema's validator class `kind` with `has_match` in place of Python's `re`, which may take hours.

    `multipleOf` divides exact numbers, because the float 19.99 is no multiple of the float 0.01.
    """
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, pattern: str, instance: Any, schema: Schema) -> Iterator[Any]:
        if isinstance(instance, str) and not has_match(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def multiple_of(validator: Any, step: float, instance: Any, schema: Schema) -> Iterator[Any]:
        if not validator.is_type(instance, "number"):
            return
        exact, exact_step = (Fraction(Decimal(repr(number))) for number in (instance, step))
        if exact % exact_step:
            yield ValidationError(f"{instance!r} is not a multiple of {step!r}")

    def pattern_properties(validator: Any, patterns: Schema, instance: Any, schema: Schema) -> Iterator[Any]:
        for pattern, one in patterns.items() if isinstance(instance, dict) else ():
            for name in instance:
                if has_match(pattern, name):
                    yield from validator.descend(instance[name], one, path=name, schema_path=pattern)

    def additional_properties(validator: Any, one: Any, instance: Any, schema: Schema) -> Iterator[Any]:
        patterns = schema.get("patternProperties", ())
        if patterns and isinstance(instance, dict):
            schema = {"properties": schema.get("properties", {})}
            instance = {
                name: value
                for name, value in instance.items()
                if not any(has_match(pattern, name) for pattern in patterns)
            }
        yield from kind.VALIDATORS["additionalProperties"](validator, one, instance, schema)

    keywords = {"patternProperties": pattern_properties, "additionalProperties": additional_properties}
    return extend(kind, {"pattern": pattern, "multipleOf": multiple_of, **keywords})
