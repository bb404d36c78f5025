"""Reads a row's chat messages and tools, and joins the messages with the job's system message and examples."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jinja2

from actors.chat_content import TRIAL, Forms, content_forms, in_forms
from actors.control_tokens import control_tokens
from actors.engine.errors import UserError
from pipeline.messages import one_line
from pipeline.prepare.row_settings import from_json
from pipeline.prepare.templates import is_template, render

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """Settings that a job adds to the messages of every row.

    Args:
        system: System message for rows that have none; a template if it contains Jinja's braces.
        examples: (user, assistant) exchanges to insert after the system message; each text may be a template too.
        values: Variables for the chat template.
        continue_final: Whether the answer continues the row's last message, if that message is the assistant's.
        now: Time for the chat template, in seconds since 1970; constant, so that a resumed job makes equal prompts.
    """

    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    now: float = 0.0

    def rendered(self, row: Mapping[str, Any]) -> Chat:
        """Fill the templates in `system` and `examples` with a row's values. Raises UserError if a template fails."""

        def filled(text: str) -> str:
            return render(text, row) if is_template(text) else text

        examples = tuple((filled(user), filled(assistant)) for user, assistant in self.examples)
        return replace(self, system=self.system and filled(self.system), examples=examples)


def conversation(chat: Chat, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a row's whole chat: system message (the row's, else the job's), examples, the row's further messages."""
    roles = [message["role"] for message in messages]
    start = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
    system: list[Mapping[str, Any]] = list(messages[:start])
    if chat.system is not None and "system" not in roles:
        system = [{"role": "system", "content": chat.system}]
    examples: list[Mapping[str, Any]] = [
        {"role": role, "content": text}
        for exchange in chat.examples
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    return [*system, *examples, *messages[start:]]


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return a row's messages. value: a list of objects with role and content, or such a list as JSON text.

    A content is a text or a list of text parts; null fields are dropped. Raises UserError, with the number of the
    message, if a message is wrong.
    """
    if value is None:
        raise UserError("messages is null")
    if isinstance(value, str):
        value = from_json(value, "messages")
    if not isinstance(value, list):
        raise UserError(f"messages is a {type(value).__name__}; it must be a list")
    if not value:
        raise UserError("messages is empty")
    return [_message(f"message {number}", message) for number, message in enumerate(value, 1)]


def ends_with_assistant(value: Any) -> bool:
    """Tell whether a row's messages are valid and the last one is the assistant's."""
    try:
        return bool(read_messages(value)[-1]["role"] == "assistant")
    except UserError:
        return False


def _message(name: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{name} is {'null' if message is None else 'not an object'}")
    fields = {key: value for key, value in message.items() if value is not None}
    role, content, calls = (fields.get(key) for key in ("role", "content", "tool_calls"))
    if role is None:
        raise UserError(f"{name} has no role")
    if role == "developer":  # OpenAI's newer name for the role system; templates do not know it
        fields["role"] = role = "system"
    if role not in ROLES:
        raise UserError(f"{name} has role {role!r}; known: {', '.join(ROLES)}")
    if isinstance(content, list):
        content = [_part(name, part) for part in content]
        if not any(part["text"].strip() for part in content):
            content = ""
    if calls is not None:
        if not isinstance(calls, list):
            raise UserError(f"{name}: tool_calls is of type {type(calls).__name__}; it must be a list")
        fields["tool_calls"] = [_call(name, call) for call in calls]
        content = "" if content is None else content
    if content is None:
        raise UserError(f"{name} ({role}) has no content")
    if not isinstance(content, str | list):
        raise UserError(f"{name} ({role}): content must be text or a list of text parts")
    if role == "user" and isinstance(content, str) and not content.strip():
        raise UserError(f"{name} ({role}) is empty")
    return {**fields, "content": content}


def _call(name: str, call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which chat templates need. OpenAI's format has JSON text.

    A call without arguments has null or "" instead; it gets {}.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"{name}: a tool call must have the form {{function: {{name, arguments}}}}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = from_json(arguments, f"{name}: arguments of a tool call")
    return {**call, "function": {**function, "arguments": arguments}}


def _part(name: str, part: Any) -> dict[str, Any]:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if kind != "text":
        raise UserError(f"{name} has a part of type {kind!r}; only text is supported")
    if not isinstance(text, str):
        raise UserError(f"{name} has a part without text")
    return {key: value for key, value in part.items() if value is not None}


def check_tools(tokenizer: Any) -> None:
    """Raise UserError if the tokenizer's chat template cannot offer tools to the model."""
    try:
        template = tokenizer.get_chat_template(tools=[{}])
    except ValueError:
        raise UserError("tools: the tokenizer has no chat template, so it cannot take tools") from None
    if "tools" not in template:
        raise UserError("tools: the chat template does not support tools: leave tools out, or use another model")


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Check a row's tools. Return them as a list of {"type": "function", "function": {"name": …, …}}.

    value: a list of tools, or its JSON text, or None for no tools. Null fields are dropped from a list, but kept in
    JSON text. Raises a UserError with the number of the wrong tool, counted from 1.
    """
    if value is None:
        return []
    value = from_json(value, "tools") if isinstance(value, str) else without_nulls(value)
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


REASONING = ("reasoning_content", "thinking", "reasoning")  # keys for reasoning; templates read the first or the second
CONTINUED = "CONTINUED_FROM_HERE "  # marks the end of the message that the answer continues

Tools = Sequence[Mapping[str, Any]]
log = logging.getLogger(__name__)


def _filled(template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], now: float = 0.0) -> str:
    """Return the text that a chat template makes from messages and `values`. Raises errors of any class."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def strftime_now(form: object) -> str:
        return time.strftime(str(form)[:1000], time.gmtime(now))

    shown = [_with_reasoning(message) for message in messages]
    always = {"documents": None, "strftime_now": strftime_now, "messages": shown}
    return str(_compile_jinja_template(template).render({"tools": None, **values, **always}))


@lru_cache(maxsize=16)
def _forms(template: str, values: str) -> Forms:
    """Return `content_forms` of a chat template. values: the template's variables as JSON."""
    return content_forms(lambda messages: _filled(template, messages, json.loads(values)))


def _apply(tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
    """Return the prompt text that the chat template makes from messages. Raises errors of any class.

    If the answer continues the last message, the prompt ends with the content of this message, as in transformers.
    """
    continued = chat.continue_final and messages[-1]["role"] == "assistant"
    if continued:
        content = messages[-1]["content"]
        if isinstance(content, str):
            content += CONTINUED
        else:
            content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CONTINUED}]
        messages = [*messages[:-1], {**messages[-1], "content": content}]
    template = tokenizer.get_chat_template(tools=list(tools) or None)
    values = {**tokenizer.special_tokens_map, **chat.values, "add_generation_prompt": not continued}
    messages = in_forms(messages, _forms(template, json.dumps(values, default=str)))
    rendered = _filled(template, messages, {**values, "tools": list(tools) or None}, chat.now)
    if not continued:
        return rendered
    before, tag, behind = rendered.rpartition(CONTINUED.strip())
    if not tag:
        raise UserError("the chat template leaves out the end of the message that input.continue_final continues")
    # if the space at the end of CONTINUED is gone, the template strips messages: strip the content's end too
    return before if behind.startswith(" ") else before.rstrip()


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under both keys that chat templates read."""
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def render_chat(
    tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, parse: bool = False
) -> tuple[str, int]:
    """Return the prompt as text, and the number of control tokens (such as `<|im_end|>`) in messages and tools.

    tools: tools that the model may call. parse: keep control tokens in messages and tools as tokens. If False, mark
    them, so that they become plain text. Raises UserError if the chat template refuses the messages.
    """
    values = (conversation(chat, messages), list(tools))
    try:
        return control_tokens(tokenizer).prompt(lambda both: _apply(tokenizer, chat, *both), values, parse=parse)
    except UserError:
        raise
    except Exception as error:  # `_apply` raises errors of any class
        raise UserError(f"chat template: {one_line(error)}") from None


def check_chat(tokenizer: Any, chat: Chat, path: object) -> None:
    """Check the chat template with a trial conversation. path: the checkpoint's path, for error messages.

    Raises UserError if there is no chat template, if it does not compile, if it leaves out a message's text, or if it
    refuses the job's system message or examples. Logs a warning if the prompt begins without the BOS token.
    """
    signature = inspect.signature(tokenizer.apply_chat_template)
    reserved = sorted({*signature.parameters, "messages"} & set(chat.values))
    if reserved:
        raise UserError(f"input.chat_template_kwargs: {reserved[0]} is set by the job itself; leave it out")
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise UserError(f"{path}: the tokenizer has no chat template, which messages and chats need") from None
    trial = [
        {**message, "content": f"{message['content']}{TRIAL}_{number}_"}
        for number, message in enumerate(conversation(chat, [{"role": "user", "content": "?"}]))
    ]
    try:
        text = _apply(tokenizer, chat, trial)
        if lost := [one["role"] for number, one in enumerate(trial) if f"{TRIAL}_{number}_" not in text]:
            raise UserError(f"the chat template leaves out the text of messages of role {lost[0]}")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (jinja2.TemplateSyntaxError, SyntaxError) as error:
        raise UserError(f"{path}: the chat template does not parse: {one_line(error)}") from None
    except Exception as error:  # `_apply` raises errors of any class
        if chat.system is not None or chat.examples:
            raise UserError(f"input: the chat template refuses system or examples: {one_line(error)}") from None
        return
    bos = tokenizer.bos_token_id
    adds = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    if adds and bos not in tokenizer(text, add_special_tokens=False)["input_ids"]:
        log.warning(
            "%s: chats begin without %s, which the tokenizer puts before other texts; the model may need it: if "
            "answers are bad, begin the chat template with {{ bos_token }}",
            path,
            tokenizer.bos_token,
        )
