"""OpenAI requests as prompts and sampling parameters; what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError
from actors.openai_requests import CHAT, TEXT, read_request
from pipeline.prepare.chat import Chat
from pipeline.prepare.prompt_spec import PromptSpec
from pipeline.prepare.prompts import ERROR, PROMPT_IDS, SAMPLING, prepare_table

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
        (CHAT, {"messages": MESSAGES, "max_token": 3}, "body: max_token is not supported; did you mean max_tokens?"),
        (CHAT, {"messages": MESSAGES, "stream": True}, "body: stream = True is not supported"),
        (CHAT, {"messages": MESSAGES, "stream": 0}, "body: stream = 0 is not supported"),
        (CHAT, {"messages": MESSAGES, "prompt": "a"}, "body: prompt is not supported"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "body: tool_choice = 'required' needs tools"),
        (CHAT, {"messages": MESSAGES, "logprobs": 1}, "body: logprobs = 1: must be true or false in a chat"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, "body: top_logprobs needs logprobs: true"),
        (CHAT, {"messages": MESSAGES, "model": 1}, "body: model must be text"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": 2}, "body: max_tokens and max_comp"),
        (CHAT, {}, "body: messages is missing"),
        (CHAT, {"messages": [], "response_format": {"type": "xml"}}, "body: response_format.type must be text, json_o"),
        (CHAT, {"messages": [], "response_format": []}, "body: response_format.type must be text, json_object or"),
        (
            CHAT,
            {"messages": [], "response_format": {"type": "json_schema"}},
            "body: response_format.json_schema.schema",
        ),
        (TEXT, {"prompt": "a", "response_format": {"type": "text"}}, "body: response_format is not supported"),
        (TEXT, {}, "body: prompt is missing"),
        (TEXT, {"prompt": ["a", "b"]}, "body: prompt must be one text or one list of token ids"),
        (TEXT, {"prompt": [1, True]}, "body: prompt must be one text or one list of token ids"),
        (TEXT, {"prompt": "a", "messages": MESSAGES}, "body: messages is not supported"),
        (TEXT, {"prompt": "a", "best_of": 2}, "body: best_of = 2 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(url: str, body: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UserError) as refused:
        read_request(url, body)
    assert str(refused.value).startswith(refusal)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "messages",
    "prompt",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "logprobs",
    "top_logprobs",
    "response_format",
    "seed",
    "x",
]


@given(st.sampled_from([CHAT, TEXT, ""]), st.dictionaries(st.sampled_from(KEYS), JSON))
def test_any_body_is_a_request_or_a_refusal(url: str, body: dict[str, Any]) -> None:
    try:
        request = read_request(url, body)
    except UserError:
        return
    assert (request.prompt is None) == (url == CHAT)


def prepared(checkpoint: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = {
        name: pa.array([row.get(name) for row in rows], pa.string()) for name in ("custom_id", "method", "url", "body")
    }
    spec = PromptSpec(str(checkpoint), 300, 64, chat=Chat(), is_batch=True)
    return list(prepare_table(pa.table(columns), spec).to_pylist())


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
        line(CHAT, {"messages": [{"role": "x"}]}),
        line(CHAT, [], custom_id=None),
        line(CHAT, [], method="GET"),
        line(CHAT, []),
        {**line(CHAT, {}), "body": "{"},
        line(TEXT, {"prompt": "  "}),
    ]
    found = prepared(chat_checkpoint, rows)
    texts = pa.table({"prompt": ["alpha bravo"]})
    plain = prepare_table(texts, PromptSpec(str(chat_checkpoint), 300, 64, column="prompt")).to_pylist()
    chats = pa.table({"m": [json.dumps(MESSAGES), json.dumps([{"role": "user", "content": "bravo"}])]})
    spoken = prepare_table(chats, PromptSpec(str(chat_checkpoint), 300, 64, messages="m", chat=Chat())).to_pylist()
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
        "message 1 has role 'x'; known: system, user, assistant, tool",
        "custom_id is missing",
        "method is 'GET'; it must be POST",
        "body is a list; it must be an object",
        "body: not JSON: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        "prompt is empty",
    ]


def test_a_checkpoint_without_chat_template_answers_texts(checkpoint: Path) -> None:
    chat, text = prepared(checkpoint, [line(CHAT, {"messages": MESSAGES}), line(TEXT, {"prompt": "alpha"})])
    assert chat[ERROR].startswith("chat template: ") and text[ERROR] is None
