"""Calls of tools in answers: which forms are read, and what is not a call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.errors import UserError
from actors.tool_calls import checked_tools, forced_call, split_calls, tool_format

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
HERMES = 'For each call return <tool_call>{"name": <function-name>, "arguments": <args>}</tool_call> {{ tools }}'
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of arguments}. {{ tools }}'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
OBJECTS = st.dictionaries(st.text(), JSON, max_size=3) | st.just({"code": "</tool_call> <tool_call>{"})


@given(st.lists(st.tuples(st.text(min_size=1), OBJECTS, st.sampled_from(["", " ", "\n"])), max_size=3))
def test_calls_come_back_as_they_were_written(calls: list[tuple[str, dict[str, Any], str]]) -> None:
    wanted = [{"name": name, "arguments": values} for name, values, _ in calls]
    marked = "I look it up.\n" + "\n".join(
        f"<tool_call>{space}{json.dumps({'name': name, 'arguments': values})}{space}</tool_call>"
        for name, values, space in calls
    )
    text, found = split_calls(marked, "hermes")
    assert [one | {"arguments": json.loads(one["arguments"])} for one in found] == wanted
    assert text == ("I look it up." if calls else marked)
    listed = "; ".join(json.dumps({"name": name, "parameters": values}) for name, values, _ in calls)
    text, found = split_calls(listed, "llama3_json")
    assert [one | {"arguments": json.loads(one["arguments"])} for one in found] == wanted
    assert text == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<tool_call>\n{"name": "f", "argum', "tool call 1: "),
        ("<tool_call>no</tool_call>", "tool call 1: Expecting value"),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>[]</tool_call>', "tool call 2: is not "),
        ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', "tool call 1: is not "),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "tool call 1: Out of range"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "tool call 1: Out of range"),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "surrogates not allowed"),
        ('<tool_call>{"name": "f", "arguments": {}} and more', "tool call 1: </tool_call> is missing"),
    ],
)
def test_a_damaged_call_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_calls(text, "hermes")


def test_a_call_may_lack_its_end_and_have_unescaped_line_ends_as_some_models_write_it() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "\t1\n2"}}'
    assert split_calls(text, "hermes") == ("", [{"name": "f", "arguments": '{"a": "\\t1\\n2"}'}])


@pytest.mark.parametrize(
    "text", ["", "Paris.", '{"answer": 1}', '{"name": "f", "parameters"', '{"name": "f"} x', "[1]", "7"]
)
def test_an_answer_of_llama_that_is_no_call_is_text(text: str) -> None:
    assert split_calls(text, "llama3_json") == (text, [])


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": 'q"\\é'}}])
def test_a_forced_call_is_a_grammar(form: Any, choice: Any) -> None:
    tools = [TOOL, {"type": "function", "function": {"name": 'q"\\é'}}]
    forced_call(tools, choice, form).check()
    untyped = [{"type": "function", "function": {"name": 'q"\\é', "parameters": {"properties": {"x": {}}}}}]
    assert '"type": "object"' in forced_call(untyped, choice, form).text  # no other value is a call


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("some", [TOOL], "body: tool_choice = 'some' is not supported"),
        ({"type": "function"}, [TOOL], "is not supported"),
        ({"type": "function", "function": {"name": "h"}}, [TOOL], "tool_choice names no tool of the request"),
        ("required", [], "tool_choice names no tool of the request"),
        ("required", [{"function": {"name": "f", "parameters": {"not": {}}}}], "tool 'f': json_schema: Unimplemented"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(choice: Any, tools: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        forced_call(tools, choice, "hermes")


def test_the_form_is_the_templates() -> None:
    assert tool_format(HERMES) == "hermes" and tool_format(LLAMA) == "llama3_json"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages }}", "tools: the chat template does not support tools"),
        ("{{ tools }}", "in an unknown format; known: hermes, llama3_json"),
        ("{{ tools }}[TOOL_CALLS]", r"asks for calls in Mistral's \[TOOL_CALLS\], which is not supported"),
        (f"{HERMES} <function=name>", "Qwen3-Coder's"),
        (f"{HERMES} <arg_key>", "GLM's"),
    ],
)
def test_a_template_of_another_form_is_refused_by_name(template: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tool_format(template)


def test_tools_are_json_or_a_list_whose_null_fields_are_dropped() -> None:
    assert checked_tools(json.dumps([TOOL])) == [TOOL]
    assert checked_tools(None) == [] == checked_tools("[]")
    cut = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert checked_tools([{**TOOL, "strict": None}]) == [cut]
    assert checked_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "tools: not JSON"),
        ('{"a": 1}', "tools is of type dict; it must be a list"),
        ("[1]", "tool 1 must be"),
        ([TOOL, {"type": "web_search"}], "tool 2 must be"),
        ([{"type": "function", "function": {}}], "tool 1 has no name"),
        ('[{"function": {"name": "f", "parameters": "text"}}]', "tool 1: parameters must be an object"),
    ],
)
def test_wrong_tools_are_named(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked_tools(value)
