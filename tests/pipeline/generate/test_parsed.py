"""JSON Schemas as Arrow types, and texts as their values."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from pipeline.generate.parsed import parse_answers, parsed_type


def of(schema: Any, **definitions: Any) -> pa.DataType:
    """Type of a property with the schema."""
    text = json.dumps({"type": "object", "properties": {"a": schema}, "$defs": definitions})
    return parsed_type(text).field("a").type


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "integer"}, pa.int64()),
        ({"type": ["integer", "number", "null"]}, pa.float64()),
        ({"type": ["boolean", "null"]}, pa.bool_()),
        ({"enum": ["x", "y", None]}, pa.string()),
        ({"const": 7}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, pa.int64()),
        ({"oneOf": [{"const": "x"}, {"const": "y"}]}, pa.string()),
        ({"allOf": [{"$ref": "#/$defs/one"}], "description": "d"}, pa.list_(pa.string())),
        ({"type": "array", "items": {"type": "array", "items": {"type": "number"}}}, pa.list_(pa.list_(pa.float64()))),
        ({"properties": {"b": {"type": "string"}}}, pa.struct([("b", pa.string())])),
        ({"properties": {"b": {"type": "string"}}, "allOf": [{"required": ["b"]}]}, pa.struct([("b", pa.string())])),
        ({"$ref": "#/$defs/one"}, pa.list_(pa.string())),
    ],
)
def test_types(schema: Any, kind: pa.DataType) -> None:
    assert of(schema, one={"type": "array", "items": {"type": "string"}}) == kind


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "#/properties/a has 0 types"),
        (True, "#/properties/a allows any value"),
        ({"type": ["string", "integer"]}, "has 2 types"),
        ({"enum": ["x", 1]}, "has 2 types"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "has anyOf with several types"),
        ({"properties": {"b": {}}, "allOf": [{"properties": {"c": {}}}]}, "has properties beside allOf"),
        ({"properties": {"b": {}}, "allOf": [True]}, "has properties beside allOf"),
        ({"type": "array"}, "is an array whose items have no single type"),
        ({"type": "array", "prefixItems": [{}], "items": {"type": "string"}}, "is an array whose items have no single"),
        ({"type": "object"}, "is an object without properties"),
        ({"$ref": "#/$defs/none"}, "refers to #/.defs/none, which is not in the schema"),
        ({"$ref": "#"}, "refers to itself by #"),
    ],
)
def test_a_part_without_one_type_is_refused_by_its_place(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(schema)


def test_a_schema_of_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output.parse: the schema must describe an object"):
        parsed_type('{"type": "string"}')


def test_texts_become_values_and_what_does_not_fit_an_error() -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.float64()))])
    texts = ['{"a": 1, "b": [1, 2.5], "more": "x"}', '{"b": null}', f'{{"a": {2**63}}}', '{"b": [1e999]}', '{"a"', None]
    values, errors = parse_answers(texts, [None, None, None, None, "cut off", "no prompt"], kind)
    assert values.to_pylist() == [{"a": 1, "b": [1.0, 2.5]}, {"a": None, "b": None}, None, None, None, None]
    assert errors[:2] == [None, None] and errors[4:] == ["cut off", "no prompt"]
    assert all((error or "").startswith("parsed: ") for error in errors[2:4])
