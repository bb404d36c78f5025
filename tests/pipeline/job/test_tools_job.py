"""Jobs whose chats offer tools, and jobs whose thinking is split by the chat template's marks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_values, run_and_read
from openai.types.chat import ChatCompletion
from prompt_specs import spec_of

from actors import requests
from actors.engine.errors import UserError
from actors.engine.model.loading import load_tokenizer
from actors.engine.types import row_key
from actors.requests import RequestBuilder
from pipeline.prepare.chat import Chat, read_messages, render_chat
from pipeline.prepare.prompts import PROMPT_IDS, prepare_table

TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool.function.name }}:{{ tool | tojson | length }} {% endfor %}
<tool_call>{% endif %}{% for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})
{%- endfor %}{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "find", "arguments": {"place": "Zizzi"}}</tool_call>'
CHAT = [{"role": "user", "content": "where?"}]
SAID = [f"Let me see. {CALL}", CALL, "no call", '<tool_call>{"name"']


@pytest.fixture(scope="module")
def tool_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(checkpoint, tmp_path_factory.mktemp("tools") / "checkpoint", TEMPLATE)


def with_template(checkpoint: Path, folder: Path, template: str) -> Path:
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text(template)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    return folder


@pytest.fixture
def model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as a model trained for tools would write them, row by row: the tiny one's text is noise."""
    count = iter(range(10**6))
    monkeypatch.setattr(RequestBuilder, "text", lambda *_: (SAID[next(count) % len(SAID)], None))


def values(folder: Path, checkpoint: Path, tools: list[Any], **changes: Any) -> dict[str, Any]:
    """The file of a job whose rows have one chat. tools: the tools of each row."""
    pq.write_table(pa.table({"messages": [CHAT] * len(tools), "tools": tools}), folder / "in.parquet")
    own = {"input": {"messages": "messages", "tools": "tools"}, "schedule": {"speedup": 1}}
    own |= {"sampling": {"max_new_tokens": 4}, "shard_rows": 100}
    return job_values(folder / "in.parquet", folder / "out", checkpoint, **{**own, **changes})


def of_requests(folder: Path, checkpoint: Path, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """The file of a job whose rows are requests for the same chat. bodies: what else each asks for."""
    how = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [{"custom_id": str(n), **how, "body": {"messages": CHAT, **body}} for n, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return values(folder, checkpoint, [], input={"path": str(folder / "in.jsonl"), "format": "openai_batch"})


def test_the_prompt_is_transformers_own(tool_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tool_checkpoint)
    function: dict[str, Any] = {"name": "find", "arguments": '{"place": "é"}'}
    spoken: dict[str, Any] = {"id": "call_0", "type": "function", "function": function}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [spoken]}, {"role": "tool", "content": "here"}]
    messages = read_messages(chat)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"place": "é"}
    bare = {"role": "assistant", "tool_calls": [{"function": {"name": "find", "arguments": ""}}]}
    assert read_messages([bare])[0]["tool_calls"][0]["function"]["arguments"] == {}
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, Chat(), messages, TOOLS) == (expected, 0)
    assert '(find {"place": "é"})' in expected and expected.startswith("find:")
    for none in ("", None):
        spoken["function"] = {**function, "arguments": none}
        assert "(find {})" in render_chat(tokenizer, Chat(), read_messages(chat), TOOLS)[0]


def test_a_call_in_structs_has_its_own_arguments_alone(tool_checkpoint: Path) -> None:
    """Arrow gives each struct the fields of all calls in the column."""
    given: list[dict[str, Any]] = [{"place": "x"}, {"day": {"from": 1}}, {"day": {"to": None}}]
    calls = [{"function": {"name": "find", "arguments": arguments}} for arguments in given]
    rows = [[*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
    prepared = prepare_table(pa.table({"m": rows}), spec_of(tool_checkpoint, 512, messages="m"))
    texts = load_tokenizer(tool_checkpoint).batch_decode(prepared[PROMPT_IDS].to_pylist())
    written = ['{"place": "x"})', '{"day": {"from": 1}})', '{"day": {}})']
    assert [text.partition("find ")[2] for text in texts] == written


@pytest.mark.parametrize("as_text", [True, False])
def test_calls_are_a_column_of_structs(model_says: None, tmp_path: Path, tool_checkpoint: Path, as_text: bool) -> None:
    offered = [TOOLS, TOOLS, TOOLS, TOOLS, None]
    column = [None if one is None else json.dumps(one) for one in offered] if as_text else offered
    rows = run_and_read(values(tmp_path, tool_checkpoint, column))
    call = [{"name": "find", "arguments": '{"place": "Zizzi"}'}]
    assert [row["tool_calls"] for row in rows] == [call, call, [], None, None]
    assert [row["generated_text"] for row in rows] == ["Let me see.", "", "no call", SAID[3], SAID[0]]
    assert [row["error"] is None for row in rows] == [True, True, True, False, True]
    assert rows[3]["error"].startswith("tool call 1: ") and rows[4]["prompt_tokens"] < rows[0]["prompt_tokens"]


def test_rows_with_wrong_tools_have_errors(model_says: None, tmp_path: Path, tool_checkpoint: Path) -> None:
    column = ["{", json.dumps(TOOLS), '[{"type": "x"}]']
    rows = run_and_read(values(tmp_path, tool_checkpoint, column))
    assert rows[0]["error"].startswith("tools: not JSON") and rows[2]["error"].startswith("tool 1 must be")
    assert rows[1]["tool_calls"] and rows[1]["error"] is None


def test_requests_of_a_batch_file_call_tools(model_says: None, tmp_path: Path, tool_checkpoint: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "any"},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"tools": [{"type": "file_search"}]},
    ]
    run_and_read(of_requests(tmp_path, tool_checkpoint, bodies))
    bodies = [json.loads(line)["response"]["body"] for line in (tmp_path / "out" / "results.jsonl").open()]
    choices = [ChatCompletion.model_validate(body, strict=True).choices[0] for body in bodies]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls", choices[2].finish_reason]
    assert [choice.message.content for choice in choices] == ["Let me see.", None, "no call"]
    assert choices[2].message.tool_calls is None and choices[2].finish_reason != "tool_calls"
    first, second = (choice.message.tool_calls[0] for choice in choices[:2])
    assert (first.function.name, first.function.arguments) == ("find", '{"place": "Zizzi"}')
    assert first.id != second.id
    errors = [json.loads(line)["response"] for line in (tmp_path / "out" / "errors.jsonl").open()]
    assert [error["status_code"] for error in errors] == [400] * 3
    messages = [error["body"]["error"]["message"] for error in errors]
    assert messages[0] == "body: tool_choice = 'any' is not supported: give required, or name one function"
    assert messages[1].startswith("body: response_format cannot be combined with tools")
    assert messages[2].startswith("tool 1 must be")


SCHEMA = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/y"}},
    "required": ["x"],
    "additionalProperties": False,
}
FIND = {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "$defs": {"y": {"enum": [1, 2]}}}}}
BARE = {"type": "function", "function": {"name": 'g"é'}}


def test_a_request_can_force_a_call(tmp_path: Path, tool_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model writes noise; all of it is calls whose arguments fit, but for those that are cut off.

    The noise is the same in every run, whatever the folder's name: other noise may hold a number that is too large
    for a float, such as 1e999, which is an error of its row.
    """
    monkeypatch.setattr(requests, "row_key", lambda seed, source, *place: row_key(seed, "", *place))
    named = {"tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False}
    body = {"tools": [FIND, BARE], "temperature": 1.0, "max_tokens": 200}
    bodies = [{**body, "seed": n, **(named if n % 2 else {"tool_choice": "required"})} for n in range(8)]
    rows = run_and_read(of_requests(tmp_path, tool_checkpoint, bodies))
    for number, row in enumerate(rows):
        if row["error"] is not None:
            begin, text = '<tool_call>\n{"name": "', row["generated_text"]
            assert "cut off" in row["error"] and (text.startswith(begin) or begin.startswith(text))
            continue
        assert row["generated_text"] == "" and len(row["tool_calls"]) >= 1
        for call in row["tool_calls"]:
            assert call["name"] == 'g"é' or json.loads(call["arguments"]) in ({"x": 1}, {"x": 2})
        if number % 2:
            assert [call["name"] for call in row["tool_calls"]] == ["f"]
    assert all(row["error"] is None for row in rows[1::2])


def test_a_template_that_takes_no_tools_is_refused_at_the_plan(tmp_path: Path, chat_checkpoint: Path) -> None:
    with pytest.raises(UserError, match="tools: the chat template does not support tools"):
        run_and_read(values(tmp_path, chat_checkpoint, [TOOLS]))


@pytest.mark.parametrize(
    ("template", "thinking"), [("{{ messages[0].content }}<thinking>{# </thinking> #}", True), (TEMPLATE, False)]
)
def test_thinking_is_split_by_the_templates_marks(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, template: str, thinking: bool
) -> None:
    """The prompt begins the thinking; the tiny model's tokens are read as if they ended it."""
    folder = with_template(checkpoint, tmp_path / "checkpoint", template)
    plain = RequestBuilder.decode

    def decoded(self: RequestBuilder, tokens: list[int]) -> str:
        return plain(self, tokens) if len(tokens) > 8 else "it is</thinking> so"

    monkeypatch.setattr(RequestBuilder, "decode", decoded)
    [row] = run_and_read(values(tmp_path, folder, [None], reasoning="auto", input={"messages": "messages"}))
    assert row["reasoning"] == ("it is" if thinking else None)
    assert row["generated_text"] == ("so" if thinking else "it is</thinking> so")


def test_a_mark_that_is_a_special_token_is_refused_at_the_plan(tmp_path: Path, checkpoint: Path) -> None:
    changes = {"reasoning": {"end": "</s>"}, "input": {"template": "{{ messages[0].content }}"}}
    job = values(tmp_path, checkpoint, [None], **changes)
    with pytest.raises(UserError, match="reasoning: '</s>' is a special token"):
        run_and_read(job)
    assert not (tmp_path / "out").exists()
