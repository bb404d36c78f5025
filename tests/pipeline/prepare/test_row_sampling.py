"""A row's own sampling parameters: only what fits reaches the actor, and it says the same however it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.types import SamplingParams
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, SAMPLING, prepare_table
from pipeline.prepare.row_sampling import own_sampling, read_overrides

BASE = SamplingParams(max_new_tokens=10)


def prepared(checkpoint: Path, columns: dict[str, Any], **changes: Any) -> tuple[list[Any], list[Any]]:
    """Overrides, parsed, and errors."""
    rows = len(next(iter(columns.values())))
    values = {"column": "prompt", "sampling": BASE, "sampling_columns": "s", **changes}
    done = prepare_table(pa.table({"prompt": ["hi"] * rows, **columns}), PromptSpec(str(checkpoint), 300, 64, **values))
    errors = done[ERROR].to_pylist()
    assert [bool(ids) for ids in done[PROMPT_IDS].to_pylist()] == [error is None for error in errors]
    return [text and json.loads(text) for text in done[SAMPLING].to_pylist()], errors


def test_overrides_from_a_struct_a_map_json_and_columns_agree(checkpoint: Path) -> None:
    struct = [{"temperature": 0.5, "max_new_tokens": 5, "stop": None}, None, {"temperature": None, "top_k": 3}]
    expected = [{"temperature": 0.5, "max_new_tokens": 5}, None, {"top_k": 3}]
    assert prepared(checkpoint, {"s": struct}) == (expected, [None] * 3)
    text = [one and json.dumps(one) for one in struct]
    assert prepared(checkpoint, {"s": text}) == (expected, [None] * 3)
    pairs = [one and list(one.items()) for one in expected]
    assert prepared(checkpoint, {"s": pa.array(pairs, pa.map_(pa.string(), pa.float64()))}) == (expected, [None] * 3)
    columns = {"t": [0.5, None, None], "limit": [5, None, None], "k": [None, None, 3]}
    mapping = {"temperature": "t", "max_new_tokens": "limit", "top_k": "k"}
    assert prepared(checkpoint, columns, sampling_columns=mapping) == (expected, [None] * 3)


def test_lists_of_stops(checkpoint: Path) -> None:
    columns = {"stops": [["a", "b"], [], None], "ids": [[1], None, None]}
    found, errors = prepared(checkpoint, columns, sampling_columns={"stop": "stops", "stop_token_ids": "ids"})
    assert found == [{"stop": ["a", "b"], "stop_token_ids": [1]}, {"stop": []}, None] and errors == [None] * 3


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('{"temprature": 1}', "sampling: unknown key temprature; did you mean temperature?"),
        ('{"temperature": NaN}', "sampling: temperature = nan: "),
        ('{"temperature": Infinity}', "sampling: temperature = inf: "),
        ('{"temperature": 1e999}', "sampling: temperature = inf: "),
        (f'{{"temperature": {10**400}}}', "sampling: temperature = 1000"),
        ('{"max_new_tokens": true}', "sampling: max_new_tokens = True: must be a whole number"),
        ('{"max_new_tokens": "5"}', "sampling: max_new_tokens = '5': must be a whole number"),
        ('{"max_new_tokens": 0}', "sampling: max_new_tokens = 0: must be at least 1"),
        ('{"max_new_tokens": -Infinity}', "sampling: max_new_tokens = -inf: must be a whole number"),
        ('{"top_k": 1e30}', "sampling: top_k = 1000000000000000019884624838656: must be at most 2147483647"),
        ('{"stop_token_ids": [99999999999]}', "sampling: stop_token_ids = (99999999999,): must be at most"),
        ('{"stop": ""}', "sampling: stop = "),
        ('{"stop": ["a", null]}', "sampling: stop = "),
        ('{"stop": "\\ud800"}', "sampling: stop is not valid Unicode"),
        ('{"min_new_tokens": 11}', "sampling: min_new_tokens = 11: must be 0 to max_new_tokens"),
        ('{"n": 2}', "sampling: n = 2: needs a temperature above 0"),
        ('{"seed": -1}', "sampling: seed = -1: "),
        ('{"a\\nb": 1}', "sampling: unknown key a b; known: "),
        ("{", "sampling: not JSON: JSONDecodeError: "),
        ("[1]", "sampling is a list; it must be an object"),
        ("7", "sampling is a int; it must be an object"),
    ],
)
def test_invalid_overrides_are_a_row_error(checkpoint: Path, value: str, error: str) -> None:
    found, errors = prepared(checkpoint, {"s": ['{"top_k": 2}', value, "null", "{}", None]})
    assert found == [{"top_k": 2}, None, None, None, None]
    assert errors[0] is None and errors[2:] == [None] * 3
    assert errors[1].startswith(error) and "\n" not in errors[1]


def test_an_unknown_field_of_a_struct_is_an_error_where_it_is_set(checkpoint: Path) -> None:
    struct = [{"temp": 1.0, "top_p": None}, {"temp": None, "top_p": 0.5}]
    found, errors = prepared(checkpoint, {"s": struct})
    assert errors == ["sampling: unknown key temp; did you mean temperature?", None]
    assert found == [None, {"top_p": 0.5}]


def test_truncation_uses_the_rows_own_limit(checkpoint: Path) -> None:
    columns = {"prompt": ["a " * 200] * 3, "limit": [None, 40, 64]}
    values = {"column": "prompt", "sampling": BASE, "sampling_columns": {"max_new_tokens": "limit"}}
    done = prepare_table(pa.table(columns), PromptSpec(str(checkpoint), 300, 64, too_long="truncate_left", **values))
    assert [len(ids) for ids in done[PROMPT_IDS].to_pylist()] == [54, 24, 0]
    error = done[ERROR].to_pylist()[2]
    assert error is not None and error.endswith("64 new ones leave it no room in a context of 64")


CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(-1, 100) | st.floats() | st.none(),
        "temperature": st.floats() | st.integers(0, 2) | st.none(),
        "top_p": st.floats(0, 1),
        "presence_penalty": st.floats(-3, 3),
        "stop": st.lists(st.text(max_size=3), max_size=2) | st.text(max_size=3),
        "ignore_eos": st.booleans() | st.integers(0, 1),
        "seed": st.integers(-1, 2**64),
        "tempo": st.none() | st.integers(),
    },
)


@given(CHANGES)
@settings(max_examples=60, deadline=None)
def test_the_overrides_written_for_the_actor_are_those_checked(changes: dict[str, Any]) -> None:
    said = ""
    try:
        merged, text = own_sampling(BASE, changes)
    except ValueError as error:
        said = str(error)
    if said:
        assert said.startswith("sampling: ") and "\n" not in said
        return
    assert merged == BASE.merged(changes)
    if text is None:
        assert all(value is None for value in changes.values())
    else:
        values = json.loads(text)
        assert BASE.merged(read_overrides(text)) == merged == BASE.merged(values)
        assert text == json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
