"""Reads tool calls in answers, in the format that a chat template asks the model for.

hermes        <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of times; used by Hermes and Qwen
llama3_json   the answer is {"name": …, "parameters": {…}}, or several of these joined by ";"; used by Llama 3.1 and 3.2
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from actors.control_tokens import special_tokens
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.errors import UserError, flat

ToolFormat = Literal["hermes", "llama3_json"]
BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"  # a Llama model may write this tag before tool calls
# text in a chat template -> the unsupported format of tool calls that the template then has; the first match counts
_OTHERS = {
    "<function=": "Qwen3-Coder's <function=…>",
    "<arg_key>": "GLM's <arg_key>",
    "[TOOL_CALLS]": "Mistral's [TOOL_CALLS]",
    "tool▁calls▁begin": "DeepSeek's <｜tool▁calls▁begin｜>",
    "<|tool_call|>": "Granite's and Phi's <|tool_call|>",
    "<|tool_calls_section_begin|>": "Kimi's <|tool_calls_section_begin|>",
    "<start_function_call>": "FunctionGemma's <start_function_call>",
    "<|START_ACTION|>": "Cohere's <|START_ACTION|>",
    "<|channel|>": "gpt-oss's <|channel|>",
    "functools[": "Functionary's functools[…]",
}
_DECODER = json.JSONDecoder(strict=False)  # models write unescaped line ends and tabs in strings
ToolCall = dict[str, str]  # keys: `name`, and `arguments` (the text of a JSON object)


def tool_format(template: str) -> ToolFormat:
    """Return the tool-call format that a chat template asks for. Raises UserError if the format is not supported."""
    if "tools" not in template:
        raise UserError("tools: the chat template does not support tools: leave tools out, or use another model")
    for text, name in _OTHERS.items():
        if text in template:
            raise UserError(f"tools: the chat template asks for calls in {name}, which is not supported")
    if BEGIN in template:
        return "hermes"
    if '"name": function name' in template and '"parameters"' in template:
        return "llama3_json"
    raise UserError("tools: the chat template asks for calls in an unknown format; known: hermes, llama3_json")


def form_of(tokenizer: Any) -> ToolFormat:
    """Return the tool-call format of a tokenizer's chat template. Raises UserError if tool calls cannot be read."""
    try:
        template = tokenizer.get_chat_template(tools=[{}])
    except ValueError:
        raise UserError("tools: the tokenizer has no chat template, so it cannot take tools") from None
    form = tool_format(template)
    if form == "hermes" and BEGIN in special_tokens(tokenizer):
        raise UserError(
            f"tools: {BEGIN!r} is a special token, which has no text, so calls cannot be read: leave tools out"
        )
    return form


def forced_call(tools: Sequence[Mapping[str, Any]], choice: Any, form: ToolFormat) -> OutputFormat:
    """Return the output format of an answer that must call tools.

    Raises UserError if `choice` or the parameters of a tool are not supported.

    Args:
        tools: tools as `checked_tools` returns them.
        choice: OpenAI's `tool_choice`: "required" for one or more calls of any tools, or
            {"type": "function", "function": {"name": …}} for one call of the named tool.
        form: format of tool calls.
    """
    functions = [tool["function"] for tool in tools]
    if choice != "required":
        named = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
        wanted = named.get("name") if isinstance(named, Mapping) else None
        if wanted is None:
            raise UserError(f"body: tool_choice = {choice!r} is not supported: give required, or name one function")
        functions = [one for one in functions if one["name"] == wanted]
    if not functions:
        raise UserError("body: tool_choice names no tool of the request: add the tool to tools")
    key, (begin, end) = ("arguments", (f"{BEGIN}\n", f"\n{END}")) if form == "hermes" else ("parameters", ("", ""))
    between = "\n" if form == "hermes" else "; "
    more = f" ({json.dumps(between)} call)*" if choice == "required" else ""
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))]
    for number, one in enumerate(functions):
        schema = OutputFormat.of({"json_schema": {"type": "object", **(one.get("parameters") or {})}})
        try:
            schema.check()
        except UserError as error:
            raise UserError(f"tool {one['name']!r}: {error}") from None
        opening = json.dumps(f'{begin}{{"name": {json.dumps(one["name"])}, "{key}": ')
        closing = json.dumps(f"}}{end}")
        rules += [f"call_{number}: {opening} values_{number} {closing}", f"values_{number}: {schema.json_rule()}"]
    return OutputFormat("grammar", "\n".join(rules))


def split_calls(text: str, form: ToolFormat) -> tuple[str, list[ToolCall]]:
    """Split an answer into its text without tool calls, and the tool calls.

    Format llama3_json has no delimiters: an answer that cannot be read as calls is text. In format hermes, a call that
    cannot be read raises a ValueError with the call's number, counted from 1.
    """
    if form == "llama3_json":
        calls = _listed_calls(text)
        return ("", calls) if calls else (text, [])
    calls, kept = list[ToolCall](), list[str]()
    rest = text
    while BEGIN in rest:
        before, _, behind = rest.partition(BEGIN)
        kept.append(before)
        try:
            value, end = _DECODER.raw_decode(behind := behind.lstrip())
            rest = behind[end:].lstrip()
            if rest and not rest.startswith(END):
                raise ValueError(f"{END} is missing")
            calls.append(_call(value, "arguments"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tool call {len(calls) + 1}: {flat(error)}") from None
        rest = rest.removeprefix(END)
    return (text, []) if not calls else ("".join([*kept, rest]).strip(), calls)


def _listed_calls(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    rest = text.strip().removeprefix(PYTHON_TAG).lstrip()
    try:
        while rest:
            value, end = _DECODER.raw_decode(rest)
            key = "parameters" if "parameters" in value else "arguments"
            calls.append(_call(value, key))
            rest = rest[end:].lstrip()
            if rest and not rest.startswith(";"):
                return []
            rest = rest.removeprefix(";").lstrip()
    except (ValueError, TypeError, RecursionError):
        return []
    return calls


def _call(value: Any, key: str) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        raise ValueError(f'is not {{"name": text, "{key}": object}}')
    arguments = json.dumps(value[key], ensure_ascii=False, allow_nan=False)
    f"{value['name']}{arguments}".encode()  # raises ValueError for a lone surrogate, which UTF-8 cannot encode
    return {"name": value["name"], "arguments": arguments}


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Check a row's tools. Return them as a list of {"type": "function", "function": {"name": …, …}}.

    value: a list of tools, or its JSON text, or None for no tools. Null fields are dropped from a list, but kept in
    JSON text. Raises a UserError with the number of the wrong tool, counted from 1.
    """
    if value is None:
        return []
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"tools: not JSON: {flat(error)}") from None
    else:
        value = without_nulls(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UserError(f"tools is of type {type(value).__name__}; it must be a list")
    tools: list[dict[str, Any]] = []
    for number, tool in enumerate(value, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise UserError(f'tool {number} must be {{"type": "function", "function": object}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(f"tool {number} has no name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise UserError(f"tool {number}: parameters must be an object")
        tools.append({"type": "function", **tool})
    return tools


def without_nulls(value: Any) -> Any:
    """Drop null fields at any depth: a column of structs has all fields in each row, and unused fields are null."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value
