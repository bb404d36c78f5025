"""Calls in messages, and thinking, over HTTP, whole and streamed, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import Running, running
from tiny_checkpoint import tiny_checkpoint

from pipeline.config.serve import ServeConfig
from pipeline.serve import plan_server

TEMPLATE = """{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ message.tool_calls }}{% endfor %}
{%- if add_generation_prompt %}<think>{% endif %}"""
CHAT: Any = [{"role": "user", "content": "Is it open?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a chat template that writes calls and begins thinking, and a long context."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tools") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Running]:
    with running(checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def thinking(checkpoint: Path) -> Iterator[Running]:
    """A model whose thinking ends with the first "a"."""
    with running(checkpoint, reasoning={"start": "<think>", "end": "a"}) as server:
        yield server


def chats(served: Running) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0).chat.completions


def test_a_conversation_goes_on_after_a_call(served: Running) -> None:
    how: Any = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history: Any = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    answered = [*history, {"role": "tool", "tool_call_id": "call_1", "content": "yes"}]
    [answer] = chats(served).create(**how, messages=answered).choices
    assert answer.finish_reason in ("stop", "length")


def test_thinking_is_apart_from_the_answer(served: Running, thinking: Running) -> None:
    how: Any = {"model": "tiny", "messages": CHAT, "seed": 5, "max_tokens": 120, "extra_body": {"ignore_eos": True}}
    [plain] = chats(served).create(**how).choices
    thought, end, text = plain.message.content.partition("a")
    assert end and thought and text
    [whole] = chats(thinking).create(**how).choices
    assert (whole.message.reasoning_content, whole.message.content) == (thought, text)
    deltas = [chunk.choices[0].delta for chunk in chats(thinking).create(**how, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == text


def test_a_form_holds_for_the_answer_after_thinking(thinking: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": PARAMETERS}}
    how: Any = {"model": "tiny", "messages": CHAT, "response_format": form, "seed": 5, "max_tokens": 200}
    [whole] = chats(thinking).create(**how).choices
    assert json.loads(whole.message.content) in ({"a": 1}, {"a": 2}) and whole.message.reasoning_content
    deltas = [chunk.choices[0].delta for chunk in chats(thinking).create(**how, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == whole.message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content


def test_a_file_names_the_marks_or_leaves_them_to_the_chat_template(checkpoint: Path) -> None:
    def marks(reasoning: Any) -> Any:
        config = ServeConfig.model_validate({"model": {"path": str(checkpoint)}, "reasoning": reasoning})
        return plan_server(config, on_this_machine=False).generator["reasoning"]

    assert marks(None) is None
    assert marks({}) == {"start": "<think>", "end": "</think>"}
    assert marks("auto") is None  # the template writes no end of thinking
