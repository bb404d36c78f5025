"""Which fields of a schema have few values, and how many answers have each."""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from part_builders import LAYERS, part_spec

from pipeline.generate.output import part_bytes
from pipeline.generate.stats import ShardStats
from pipeline.generate.value_fields import (
    MOST_FIELDS,
    MOST_VALUES,
    field_counts,
    field_name,
    from_footer,
    value_fields,
)
from pipeline.input.shards import Shard


def found(properties: dict[str, Any], **more: Any) -> dict[str, list[str]]:
    schema = {"type": "object", "properties": properties, **more}
    fields = value_fields({"json_schema": json.dumps(schema)})
    return {field_name(path): list(texts.values()) for path, texts in fields.items()}


COLOUR = {"enum": ["red", "blue"], "type": "string"}
VALUES: dict[str, tuple[Any, list[str] | None]] = {
    "enum": (COLOUR, ["red", "blue"]),
    "const": ({"const": "a"}, ["a"]),
    "numbers": ({"enum": [1, 2.5, None]}, ["1", "2.5", "null"]),
    "boolean": ({"type": "boolean"}, ["true", "false"]),
    "boolean or null": ({"type": ["boolean", "null"]}, ["true", "false", "null"]),
    "reference": ({"$ref": "#/$defs/colour"}, ["red", "blue"]),
    "reference in a list of one": ({"allOf": [{"$ref": "#/$defs/colour"}]}, ["red", "blue"]),
    "optional": ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, ["red", "blue", "null"]),
    "text that looks like a value": ({"enum": ["true", True]}, ['"true"', "true"]),
    "free text": ({"type": "string"}, None),
    "text or null": ({"type": ["string", "null"]}, None),
    "one of them is free": ({"anyOf": [COLOUR, {"type": "string"}]}, None),
    "an object": ({"enum": [{"a": 1}]}, None),
    "a list": ({"type": "array", "items": COLOUR}, None),
    "long text": ({"enum": ["a" * 300]}, None),
    "many values": ({"enum": list(range(MOST_VALUES + 1))}, None),
    "no reference": ({"$ref": "#/$defs/other"}, None),
    "itself": ({"$ref": "#/$defs/loop"}, None),
    "anything": (True, None),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_property(name: str) -> None:
    schema, values = VALUES[name]
    definitions = {"colour": COLOUR, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    assert found({"x": schema}, **{"$defs": definitions}) == ({} if values is None else {"x": values})


def test_fields_of_objects_within_the_answer() -> None:
    inner = {"type": "object", "properties": {"colour": COLOUR, "name": {"type": "string"}}}
    assert found({"a": {"$ref": "#/$defs/inner"}, "b": COLOUR}, **{"$defs": {"inner": inner}}) == {
        "a.colour": ["red", "blue"],
        "b": ["red", "blue"],
    }
    assert found({"a.colour": {"const": 1}, "a": inner}) == {"a.colour": ["1"]}  # one of two with the same name
    tree = {"type": "object", "properties": {"leaf": {"type": "boolean"}, "left": {"$ref": "#"}}}
    fields = value_fields({"json_schema": json.dumps(tree)})
    assert [field_name(path) for path in fields] == ["leaf", "left.leaf", "left.left.leaf", "left.left.left.leaf"]
    assert len(found({f"f{number}": COLOUR for number in range(MOST_FIELDS + 3)})) == MOST_FIELDS


@pytest.mark.parametrize("form", [None, {"regex": "a"}, {"json_schema": '{"enum": ["a"]}'}, {"json_schema": "true"}])
def test_other_forms_have_none(form: dict[str, str] | None) -> None:
    assert value_fields(form) == {}


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b", 1]},
        "sure": {"type": "boolean"},
        "inner": {"type": "object", "properties": {"kind": COLOUR}},
        "text": {"type": "string"},
    },
}
SOME = st.sampled_from(["a", "b", 1, True, False, "red", "blue", None, [], {}])
ANSWER = st.fixed_dictionaries(
    {},
    optional={
        "kind": SOME,
        "sure": SOME,
        "text": SOME,
        "inner": st.one_of(SOME, st.fixed_dictionaries({"kind": SOME})),
    },
)


@given(
    st.lists(st.tuples(st.one_of(ANSWER, SOME), st.sampled_from(["whole", "cut off", "error", "none"])), max_size=30)
)
def test_counts_are_those_of_a_plain_count(rows: list[tuple[Any, str]]) -> None:
    texts = [{"cut off": json.dumps(answer)[:-1], "none": None}.get(how, json.dumps(answer)) for answer, how in rows]
    errors = ["cut off" if how == "error" else None for _, how in rows]
    wanted: dict[str, Counter[str]] = {"kind": Counter(), "sure": Counter(), "inner.kind": Counter()}
    for (answer, _), text, error in zip(rows, texts, errors, strict=True):
        try:
            held = json.loads(text or "")
        except ValueError:
            continue
        if error is not None or not isinstance(held, dict):
            continue
        assert held == answer or text != json.dumps(answer)
        inner = held.get("inner") if isinstance(held.get("inner"), dict) else {}
        allowed = {"kind": ["a", "b", 1], "sure": [True, False], "inner.kind": ["red", "blue"]}
        for name, value in (("kind", held.get("kind")), ("sure", held.get("sure")), ("inner.kind", inner.get("kind"))):
            if any(type(value) is type(one) and value == one for one in allowed[name]):
                wanted[name][value if isinstance(value, str) else json.dumps(value)] += 1
    fields = value_fields({"json_schema": json.dumps(SCHEMA)})
    part = pa.table({"generated_text": pa.array(texts, pa.string()), "error": pa.array(errors, pa.string())})
    assert json.loads(field_counts(part, fields)) == wanted
    assert field_counts(part, {}) == ""


def test_a_part_alone_gives_the_same_counts() -> None:
    """Its footer names the fields."""
    fields = value_fields({"json_schema": json.dumps(SCHEMA)})
    texts = ['{"kind": "a", "sure": true}', '{"kind": 1}', "none"]
    columns = {
        "id": ["x", "y", "z"],
        "sample_index": pa.array([0, 0, 0], pa.int32()),
        "generated_text": texts,
        "finish_reason": ["stop"] * 3,
        "prompt_tokens": [1, 2, 3],
        "generated_tokens": [4, 5, 6],
        "mean_depth": [None, 3.0, 3.0],
        "error": pa.array([None] * 3, pa.string()),
    }
    table = pa.table(columns)
    data = part_bytes(table, part_spec(value_fields=fields), Shard(0, "in", 0, 3))
    read = pq.read_table(io.BytesIO(data))
    assert from_footer(read) == fields
    rebuilt = ShardStats.of_part(0, read, LAYERS).field_counts
    assert json.loads(rebuilt) == {"kind": {"a": 1, "1": 1}, "sure": {"true": 1}, "inner.kind": {}}
    assert rebuilt == field_counts(table, fields)
    plain = part_bytes(table, part_spec(), Shard(0, "in", 0, 3))
    assert from_footer(pq.read_table(io.BytesIO(plain))) == {} and b"value_fields" not in plain
