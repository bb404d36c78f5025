"""Messages of a chat: reading a row's, and the conversation with the job's system message and examples."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jinja2

from actors.control_tokens import control_tokens
from actors.engine.errors import UserError
from pipeline.messages import one_line
from pipeline.prepare.templates import TEMPLATE_ERRORS, is_template, render

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """What a job adds to every row's messages.

    Args:
        system: system message of rows that have none of their own; a template where it has Jinja's braces.
        examples: (user, assistant) exchanges after the system message; templates like `system`.
        values: variables for the chat template.
        continue_final: the answer continues the last message where it is the assistant's.
        now: the time that the chat template reads, seconds since 1970: constant, so that a resumed job writes the same
            prompts.
    """

    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    now: float = 0.0

    def rendered(self, row: Mapping[str, Any]) -> Chat:
        """Render the templates over a row's columns. Raises UserError with the reason if one fails."""
        if not any(map(is_template, self.texts)):
            return self
        system, *others = [render(text, row) if is_template(text) else text for text in self.texts]
        examples = tuple(zip(others[::2], others[1::2], strict=True))
        return replace(self, system=None if self.system is None else system, examples=examples)

    @property
    def texts(self) -> list[str]:
        """The system message, "" for none, and the texts of the examples."""
        return [self.system or "", *(text for exchange in self.examples for text in exchange)]


def conversation(chat: Chat, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """System message (the row's own, else the job's), examples, the row's other messages."""
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
    """A row's messages from a list of objects with role and content, or from JSON of such a list.

    Text parts of a content become lines; null fields are dropped. Raises UserError that names the wrong message.
    """
    if value is None:
        raise UserError("messages is null")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UserError(f"messages: not JSON: {one_line(error)}") from None
    if not isinstance(value, list):
        raise UserError(f"messages is a {type(value).__name__}; it must be a list")
    if not value:
        raise UserError("messages is empty")
    return [_message(number, message) for number, message in enumerate(value, 1)]


def ends_with_assistant(value: Any) -> bool:
    """Tell whether a row's messages are right and end with an assistant's turn."""
    try:
        return bool(read_messages(value)[-1]["role"] == "assistant")
    except UserError:
        return False


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"message {number} is {'null' if message is None else 'not an object'}")
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if role is None:
        raise UserError(f"message {number} has no role")
    if role not in ROLES:
        raise UserError(f"message {number} has role {role!r}; known: {', '.join(ROLES)}")
    content = fields.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    if "tool_calls" in fields:
        fields["tool_calls"] = [_call(number, call) for call in _listed(number, fields["tool_calls"])]
        content = "" if content is None else content
    if content is None:
        raise UserError(f"message {number} ({role}) has no content")
    if not isinstance(content, str):
        raise UserError(f"message {number} ({role}): content must be text or a list of parts of text")
    if role == "user" and not content.strip():
        raise UserError(f"message {number} ({role}) is empty")
    return {**fields, "content": content}


def _listed(number: int, calls: Any) -> list[Any]:
    if not isinstance(calls, list):
        raise UserError(f"message {number}: tool_calls is of type {type(calls).__name__}; it must be a list")
    return calls


def _call(number: int, call: Any) -> dict[str, Any]:
    """A call of a tool with its arguments as an object, as chat templates read it; OpenAI writes them as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"message {number}: a tool call must be {{function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise UserError(f"message {number}: arguments of a tool call: not JSON: {one_line(error)}") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _part(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UserError(f"message {number} has a part of type {kind!r}; only text is answered")
    text = part.get("text")
    if not isinstance(text, str):
        raise UserError(f"message {number} has a part without text")
    return text


REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message; templates read one of the first two
CONTINUED = "CONTINUED_FROM_HERE "  # behind a message that the answer continues

Tools = Sequence[Mapping[str, Any]]
log = logging.getLogger(__name__)


def _apply(tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
    """Render the chat template over messages. Raises `TEMPLATE_ERRORS`.

    A last message that the answer continues ends where its content ends, as in transformers.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def strftime_now(form: object) -> str:
        return time.strftime(str(form)[:1000], time.gmtime(chat.now))

    continued = chat.continue_final and messages[-1]["role"] == "assistant"
    if continued:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + CONTINUED}]
    values = {
        **tokenizer.special_tokens_map,
        **chat.values,
        "messages": [_with_reasoning(message) for message in messages],
        "tools": list(tools) or None,
        "documents": None,
        "add_generation_prompt": not continued,
        "strftime_now": strftime_now,
    }
    text = tokenizer.get_chat_template(tools=list(tools) or None)
    rendered = str(_compile_jinja_template(text).render(values))
    if not continued:
        return rendered
    before, tag, behind = rendered.rpartition(CONTINUED.strip())
    if not tag:
        raise UserError("the chat template leaves out the end of the message that input.continue_final continues")
    return before if behind.startswith(" ") else before.rstrip()  # the template strips contents


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has the names under which templates read it; without fields that are null."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def render_chat(
    tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, parse: bool = False
) -> tuple[str, int]:
    """The prompt, up to the beginning of the answer, and how many control tokens messages and tools spell.

    Args:
        tokenizer: the checkpoint's.
        chat: the job's system message, examples and template values.
        messages: of the row.
        tools: those that the model may call.
        parse: see `ControlTokens.prompt`.

    Raises UserError if the chat template refuses the messages.
    """

    def render(values: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]) -> str:
        return _apply(tokenizer, chat, *values)

    try:
        return control_tokens(tokenizer).prompt(render, (conversation(chat, messages), list(tools)), parse=parse)
    except UserError:
        raise
    except TEMPLATE_ERRORS as error:
        raise UserError(f"chat template: {one_line(error)}") from None


def check_chat(tokenizer: Any, chat: Chat, path: object) -> None:
    """Render a trial conversation.

    Args:
        tokenizer: the checkpoint's.
        chat: the job's system message, examples and template values.
        path: the checkpoint, for messages.

    Raises:
        UserError: there is no chat template, it does not compile, or it refuses the job's system message or examples.
    """
    signature = inspect.signature(tokenizer.apply_chat_template)
    reserved = sorted({*signature.parameters, "messages"} & set(chat.values))
    if reserved:
        raise UserError(f"input.chat_template_kwargs: {reserved[0]} is set by the job itself; leave it out")
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise UserError(f"{path}: the tokenizer has no chat template, which messages and chats need") from None
    trial = conversation(chat, [{"role": "user", "content": "?"}])
    try:
        text = _apply(tokenizer, chat, trial)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}: the chat template does not parse: {one_line(error)}") from None
    except SyntaxError as error:
        raise UserError(f"{path}: the chat template cannot be compiled: {one_line(error)}") from None
    except TEMPLATE_ERRORS as error:
        if chat.system is not None or chat.examples:
            raise UserError(f"input: the chat template refuses system or examples: {one_line(error)}") from None
        return
    bos = tokenizer.bos_token_id
    adds = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
    if adds and bos not in tokenizer(text, add_special_tokens=False)["input_ids"]:
        log.warning(
            "%s: chats begin without %s, which the tokenizer puts before other texts and which the model may need: if "
            "it answers badly, begin its chat template with {{ bos_token }}",
            path,
            tokenizer.bos_token,
        )
