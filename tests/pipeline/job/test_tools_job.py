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

from actors.engine.errors import UserError
from actors.engine.model.tokenizer import load_tokenizer
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
def test_calls_stay_in_the_text(model_says: None, tmp_path: Path, tool_checkpoint: Path, as_text: bool) -> None:
    offered = [TOOLS, TOOLS, TOOLS, TOOLS, None]
    column = [None if one is None else json.dumps(one) for one in offered] if as_text else offered
    rows = run_and_read(values(tmp_path, tool_checkpoint, column))
    assert [row["generated_text"] for row in rows] == [*SAID, SAID[0]]
    assert [row["error"] for row in rows] == [None] * 5 and "tool_calls" not in rows[0]
    assert rows[4]["prompt_tokens"] < rows[0]["prompt_tokens"]


def test_rows_with_wrong_tools_have_errors(model_says: None, tmp_path: Path, tool_checkpoint: Path) -> None:
    column = ["{", json.dumps(TOOLS), '[{"type": "x"}]']
    rows = run_and_read(values(tmp_path, tool_checkpoint, column))
    assert rows[0]["error"].startswith("tools: not JSON") and rows[2]["error"].startswith("tool 1 must be")
    assert rows[1]["generated_text"] == SAID[0] and rows[1]["error"] is None


def test_a_grammar_can_force_a_call(tmp_path: Path, tool_checkpoint: Path) -> None:
    grammar = 'start: "<tool_call>" call "</tool_call>"\ncall: "{\\"name\\": \\"find\\"}"'
    job = values(tmp_path, tool_checkpoint, [TOOLS], output_format={"grammar": grammar})
    job["sampling"] = {"max_new_tokens": 100}
    [row] = run_and_read(job)
    assert row["error"] is None and row["generated_text"] == '<tool_call>{"name": "find"}</tool_call>'


def test_tools_in_a_batch_line_are_its_error(tmp_path: Path, tool_checkpoint: Path) -> None:
    bodies: list[dict[str, Any]] = [{"tools": TOOLS}, {"tools": [], "tool_choice": "none"}]
    run_and_read(of_requests(tmp_path, tool_checkpoint, bodies))
    [error] = [json.loads(line)["response"] for line in (tmp_path / "out" / "errors.jsonl").open()]
    message = "body: tools are not supported here: put them into a column that input.tools names"
    assert (error["status_code"], error["body"]["error"]["message"]) == (400, message)
    [body] = [json.loads(line)["response"]["body"] for line in (tmp_path / "out" / "results.jsonl").open()]
    assert ChatCompletion.model_validate(body, strict=True).choices[0].message.content is not None


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
