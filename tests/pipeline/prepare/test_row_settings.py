"""A row's own settings: sampling parameters, whose only valid values reach the actor, and OpenAI requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prompt_specs import spec_of
from pydantic import ValidationError

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.engine.types import SamplingParams
from actors.openai_requests import CHAT, TEXT, read_request
from pipeline.config.job import SamplingConfig
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, SAMPLING, prepare_table
from pipeline.prepare.row_settings import BATCH_COLUMNS

BASE = SamplingParams(max_new_tokens=10)


def prepared(checkpoint: Path, columns: dict[str, Any], **changes: Any) -> tuple[list[Any], list[Any]]:
    """Overrides, parsed, and errors."""
    rows = len(next(iter(columns.values())))
    spec = spec_of(checkpoint, params=BASE, **{"sampling": "s", **changes})
    done = prepare_table(pa.table({"prompt": ["hi"] * rows, **columns}), spec)
    errors = done[ERROR].to_pylist()
    assert [bool(ids) for ids in done[PROMPT_IDS].to_pylist()] == [error is None for error in errors]
    return [text and json.loads(text) for text in done[SAMPLING].to_pylist()], errors


def test_overrides_from_a_struct_and_columns_agree(checkpoint: Path) -> None:
    struct = [{"temperature": 0.5, "max_new_tokens": 5, "stop": None}, None, {"temperature": None, "top_k": 3}]
    expected = [{"temperature": 0.5, "max_new_tokens": 5}, None, {"top_k": 3}]
    assert prepared(checkpoint, {"s": struct}) == (expected, [None] * 3)
    columns = {"t": [0.5, None, None], "limit": [5, None, None], "k": [None, None, 3]}
    mapping = {"temperature": "t", "max_new_tokens": "limit", "top_k": "k"}
    assert prepared(checkpoint, columns, sampling=mapping) == (expected, [None] * 3)


def test_values_that_change_nothing_are_accepted_in_rows_bodies_and_jobs(checkpoint: Path) -> None:
    """vLLM's clients write them; they were row errors, and a job that set them was refused."""
    shared: dict[str, Any] = {
        **{"best_of": 1, "skip_special_tokens": True, "include_stop_str_in_output": False, "priority": 0},
        **{"service_tier": "auto", "functions": [], "logit_bias": {}, "stream": False},
    }
    given = {**shared, "top_k": -1, "max_new_tokens": 5}
    parsed = {"top_k": 0, "max_new_tokens": 5}
    own = {name: name for name in ("top_k", "skip_special_tokens")}
    assert prepared(checkpoint, {"s": [given, shared]}) == ([parsed, None], [None] * 2)
    cells = {"top_k": ["-1", "2"], "skip_special_tokens": ["true", "false"]}
    found, errors = prepared(checkpoint, cells, sampling=own)
    assert found == [{"top_k": 0}, None] and errors[0] is None and "skip_special_tokens" in str(errors[1])
    for url, prompt in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "a"})):
        body = {**shared, **prompt, "top_k": -1, "max_tokens": 5}
        assert BASE.merged(read_request(url, body).sampling) == SamplingParams(max_new_tokens=5, top_k=0)
    assert SamplingConfig.model_validate(given) == SamplingConfig(max_new_tokens=5, top_k=0)
    assert BASE.merged(given) == SamplingParams(max_new_tokens=5) == SamplingParams(max_new_tokens=5, top_k=-1)
    for name, value in (
        ("best_of", 2),
        ("priority", False),
        ("skip_special_tokens", 1),
        ("top_k", -2),
        ("max_new_tokens", 2**31),
    ):
        _, [error] = prepared(checkpoint, {"s": [{name: value}]})
        assert name in error
        with pytest.raises(ValidationError, match=name):
            SamplingConfig.model_validate({name: value})


def test_cells_of_a_csv_file_spell_numbers(checkpoint: Path) -> None:
    """pandas writes whole numbers as 5.0 if a cell of the column is empty."""
    columns = {"n": ["5.0", " 7", ""], "t": ["0.5", "1e-1", ""], "s": ["1.5", "", "x"], "e": ["True", "0", ""]}
    own = {"max_new_tokens": "n", "temperature": "t", "stop": "s", "ignore_eos": "e"}
    found, errors = prepared(checkpoint, columns, sampling=own)
    assert errors == [None] * 3 and found == [
        {"max_new_tokens": 5, "temperature": 0.5, "stop": ["1.5"], "ignore_eos": True},
        {"max_new_tokens": 7, "temperature": 0.1, "ignore_eos": False},
        {"stop": ["x"]},
    ]
    _, errors = prepared(checkpoint, {"t": ["hot", "5.5"]}, sampling={"max_new_tokens": "t"})
    assert errors[0] == "sampling: max_new_tokens = 'hot': must be a whole number" and "= 5.5: must be" in errors[1]


def test_lists_of_stops(checkpoint: Path) -> None:
    columns = {"stops": [["a", "b"], [], None], "ids": [[1], None, None]}
    found, errors = prepared(checkpoint, columns, sampling={"stop": "stops", "stop_token_ids": "ids"})
    assert found == [{"stop": ["a", "b"], "stop_token_ids": [1]}, {"stop": []}, None] and errors == [None] * 3


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("temprature", 1, "sampling: unknown key temprature; did you mean temperature?"),
        ("temperature", float("nan"), "sampling: temperature = nan: "),
        ("temperature", float("inf"), "sampling: temperature = inf: "),
        ("max_new_tokens", True, "sampling: max_new_tokens = True: must be a whole number"),
        ("max_new_tokens", 0, "sampling: max_new_tokens = 0: must be 1 to"),
        ("max_new_tokens", float("-inf"), "sampling: max_new_tokens = -inf: must be a whole number"),
        ("top_k", 1e30, "sampling: top_k = 1000000000000000019884624838656: must be 0 (all) to 2147483647"),
        ("stop_token_ids", [99999999999], "sampling: stop_token_ids = (99999999999,): must be 0 to"),
        ("stop", "", "sampling: stop = "),
        ("stop", ["a", None], "sampling: stop = "),
        ("min_new_tokens", 11, "sampling: min_new_tokens = 11: must be 0 to max_new_tokens"),
        ("n", 2, "sampling: n = 2: needs a temperature above 0"),
        ("seed", -1, "sampling: seed = -1: "),
        ("a\nb", 1, "sampling: unknown key a b; known: "),
    ],
)
def test_invalid_overrides_are_a_row_error(checkpoint: Path, name: str, value: Any, error: str) -> None:
    rows = [{name: None, "top_p": 0.5}, {name: value, "top_p": None}, {name: None, "top_p": None}, None]
    found, errors = prepared(checkpoint, {"s": rows})
    assert found == [{"top_p": 0.5}, None, None, None]
    assert errors[0] is None and errors[2:] == [None] * 2
    assert errors[1].startswith(error) and "\n" not in errors[1]


def test_truncation_uses_the_rows_own_limit(checkpoint: Path) -> None:
    columns = {"prompt": ["a " * 200] * 3, "limit": [None, 40, 64]}
    own = {"max_new_tokens": "limit"}
    done = prepare_table(pa.table(columns), spec_of(checkpoint, params=BASE, too_long="truncate_left", sampling=own))
    assert [len(ids) for ids in done[PROMPT_IDS].to_pylist()] == [54, 24, 0]
    error = done[ERROR].to_pylist()[2]
    assert error is not None and error.endswith("64 new tokens leave no room in a context of 64")


MESSAGES = [{"role": "user", "content": "alpha"}]


def test_parameters_have_the_names_of_this_program() -> None:
    body = {
        "model": "any",
        "user": "someone",
        "messages": MESSAGES,
        "max_completion_tokens": 5,
        "max_tokens": 5,
        "temperature": 0.5,
        "stop": ["x"],
        "logprobs": True,
        "top_logprobs": 2,
        "n": None,
        "stream": False,
        "response_format": {"type": "text"},
    }
    request = read_request(CHAT, body)
    assert request.messages == MESSAGES and request.prompt is None
    assert request.sampling == {"max_new_tokens": 5, "temperature": 0.5, "stop": ["x"], "logprobs": 2}
    assert read_request(CHAT, {"messages": MESSAGES, "logprobs": True}).sampling == {"logprobs": 0}
    assert read_request(CHAT, {"messages": MESSAGES, "logprobs": False}).sampling == {}
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    form = read_request(CHAT, {"messages": MESSAGES, "response_format": named}).output_format
    assert form == OutputFormat("json_schema", json.dumps(schema))
    text = read_request(TEXT, {"prompt": ["a"], "logprobs": 3, "min_tokens": 2, "echo": False, "best_of": 1})
    assert (text.prompt, text.sampling) == ("a", {"min_new_tokens": 2, "logprobs": 3})
    assert read_request(TEXT, {"prompt": [1, 2]}).prompt == [1, 2]


@pytest.mark.parametrize(
    ("url", "body", "refusal"),
    [
        ("/v1/embeddings", {}, "url '/v1/embeddings' is not supported; known: /v1/chat/completions, /v1/completions"),
        (CHAT, {"messages": MESSAGES, "stream": True}, "body: stream = True is not supported"),
        (CHAT, {"messages": MESSAGES, "stream": 0}, "body: stream = 0 is not supported"),
        (CHAT, {"messages": MESSAGES, "prompt": "a"}, "body: prompt is not supported"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "body: tool_choice = 'required' is not supported"),
        (
            CHAT,
            {"messages": MESSAGES, "tools": [{}]},
            "body: tools are not supported here: put them into a column that",
        ),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, "body: logprobs = 1: must be true or false in a chat"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "body: top_logprobs needs logprobs: true"),
        (CHAT, {"messages": MESSAGES, "model": 1}, "body: model must be text"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "body: max_tokens and max_comp"),
        (CHAT, {}, "body: messages is missing"),
        (CHAT, {"messages": [], "response_format": []}, "body: response_format.type must be text, json_object or"),
        (CHAT, {"messages": [], "response_format": {"type": "json_schema"}}, "body: response_format.json_schema."),
        (TEXT, {"prompt": "a", "response_format": {"type": "text"}}, "body: response_format is not supported"),
        (TEXT, {}, "body: prompt is missing"),
        (TEXT, {"prompt": ["a", "b"]}, "body: prompt must be one text or one list of token ids"),
        (
            TEXT,
            {"prompt": 5},
            "body: prompt must be one text or one list of token ids: send one line or request for each prompt",
        ),
        (TEXT, {"prompt": [1, True]}, "body: prompt must be one text or one list of token ids"),
        (TEXT, {"prompt": "a", "messages": MESSAGES}, "body: messages is not supported"),
        (TEXT, {"prompt": "a", "best_of": 2}, "body: best_of = 2 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(url: str, body: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError) as refused:
        read_request(url, body)
    assert str(refused.value).startswith(refusal)


def requested(checkpoint: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = {name: pa.array([row.get(name) for row in rows], pa.string()) for name in BATCH_COLUMNS}
    done = prepare_table(pa.table(columns), spec_of(checkpoint, format="openai_batch"))
    return list(done.to_pylist())


def line(url: str, body: Any, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": json.dumps(body), **changes}


def test_rows_become_prompts(chat_checkpoint: Path) -> None:
    """A chat's special tokens are the template's; those of a text the tokenizer's, as for a prompt column."""
    rows = [
        line(CHAT, {"messages": MESSAGES, "max_tokens": 3}),
        line(TEXT, {"prompt": "alpha bravo"}),
        line(TEXT, {"prompt": [5, 6]}),
        line(CHAT, {"messages": [{"role": "user", "content": "bravo"}]}),
        line(TEXT, {"prompt": [5, 300]}),
        line(CHAT, {"messages": MESSAGES, "temperature": 300}),
        line(CHAT, {"messages": MESSAGES, "stop": "\ud800"}),
        line(CHAT, {"messages": [{"role": "x"}]}),
        line(CHAT, [], custom_id=None),
        line(CHAT, [], method="GET"),
        line(CHAT, []),
        {**line(CHAT, {}), "body": "{"},
        line(TEXT, {"prompt": "  "}),
    ]
    found = requested(chat_checkpoint, rows)
    texts = pa.table({"prompt": ["alpha bravo"]})
    plain = prepare_table(texts, spec_of(chat_checkpoint)).to_pylist()
    chats = pa.table({"m": [json.dumps(MESSAGES), json.dumps([{"role": "user", "content": "bravo"}])]})
    spoken = prepare_table(chats, spec_of(chat_checkpoint, messages="m")).to_pylist()
    assert [row[PROMPT_IDS] for row in found[:4]] == [
        spoken[0][PROMPT_IDS],
        plain[0][PROMPT_IDS],
        [5, 6],
        spoken[1][PROMPT_IDS],
    ]
    assert found[0][SAMPLING] == '{"max_new_tokens":3}'
    assert [row[ERROR] for row in found] == [
        *[None] * 4,
        "prompt: token 1 is 300; the vocabulary is 0 to 299",
        "sampling: temperature = 300.0: must be 0 (greedy), or 0.01 to 100.0",
        "sampling: stop is not valid Unicode",
        "message 1 has role 'x'; known: system, user, assistant, tool",
        "custom_id is missing",
        "method is 'GET'; it must be POST",
        "body is a list; it must be an object",
        "body: not JSON: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "prompt is empty",
    ]


def test_a_checkpoint_without_chat_template_answers_texts(checkpoint: Path) -> None:
    chat, text = requested(checkpoint, [line(CHAT, {"messages": MESSAGES}), line(TEXT, {"prompt": "alpha"})])
    assert chat[ERROR].startswith("chat template: ") and text[ERROR] is None
