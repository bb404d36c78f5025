"""Messages -> prompt text, through the checkpoint's chat template, which runs in transformers' sandbox."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import jinja2

from actors.engine.errors import UserError
from pipeline.messages import one_line
from pipeline.prepare.sandbox import BoundedSandbox, OutOfBounds, bounded
from pipeline.prepare.templates import TEMPLATE_ERRORS

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Chat:
    """What a job puts around every row's messages.

    system: left out where the row has a system message of its own. examples: (user, assistant) exchanges,
    behind the system message. values: for the chat template. now: what it is told the time is, seconds since 1970:
    a job that is resumed another day must write the same prompts.
    """

    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    now: float = 0.0


@cache
def bound_templates() -> ModuleType:
    """From here on this process runs chat templates, which come with a checkpoint, within bounds of time and memory.

    Returns the library's module of chat templates; importing it takes a second.
    """
    from transformers.utils import chat_template_utils

    # the library takes no environment from its callers; it compiles every chat template in this
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox  # type: ignore[attr-defined]
    return chat_template_utils


def _apply(tokenizer: Any, chat: Chat, messages: list[Mapping[str, Any]]) -> str:
    """The chat template over messages, within the bounds of `sandbox`; raises what it raises."""

    templates = bound_templates()

    def apply() -> Any:
        template = templates._compile_jinja_template(tokenizer.get_chat_template())
        template.environment.globals["strftime_now"] = lambda form: _clock(form, chat.now)
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **chat.values)

    text = bounded(apply)
    assert isinstance(text, str)
    return text


def _clock(form: str, now: float) -> str:
    """Chat templates may ask for the date: they get that of the job."""
    return time.strftime(str(form)[:1000], time.gmtime(now))


def render_chat(tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to where the answer begins. ValueError of one line if the chat template refuses it."""
    try:
        return _apply(tokenizer, chat, conversation(chat, messages))
    except OutOfBounds as error:
        raise UserError(f"chat template: {error}") from None
    except TEMPLATE_ERRORS as error:
        raise UserError(f"chat template: {one_line(error)}") from None


def conversation(chat: Chat, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """System message (the row's own wins), examples, the row's other messages."""
    own = [message["role"] for message in messages]
    start = next((place for place, role in enumerate(own) if role != "system"), len(own))
    system: list[Mapping[str, Any]] = list(messages[:start])
    if chat.system is not None and "system" not in own:
        system = [{"role": "system", "content": chat.system}]
    examples: list[Mapping[str, Any]] = [
        {"role": role, "content": text}
        for exchange in chat.examples
        for role, text in zip(("user", "assistant"), exchange, strict=True)
    ]
    return [*system, *examples, *messages[start:]]


def read_messages(value: Any) -> list[dict[str, Any]]:
    """A row's messages: a list of role and content, or JSON of one; parts of text become lines.

    Fields that are null are left out. ValueError names the message that is wrong.
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
    return [_message(place + 1, message) for place, message in enumerate(value)]


def _message(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"message {number} is {'null' if message is None else 'no object'}")
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if role is None:
        raise UserError(f"message {number} has no role")
    if role not in ROLES:
        raise UserError(f"message {number} has role {role!r}; known: {', '.join(ROLES)}")
    content = given.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(number, part) for part in content)
    if content is None:
        raise UserError(f"message {number} ({role}) has no content")
    if not isinstance(content, str):
        raise UserError(f"message {number} ({role}): content must be text or a list of parts of text")
    if role == "user" and not content.strip():
        raise UserError(f"message {number} ({role}) is empty")
    return {**given, "content": content}


def _part(number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise UserError(f"message {number} has a part of type {kind!r}; only text is answered")
    text = part.get("text")
    if not isinstance(text, str):
        raise UserError(f"message {number} has a part without text")
    return text


def check_chat(tokenizer: Any, chat: Chat, path: object) -> None:
    """ValueError of one line if the checkpoint has no chat template, or it refuses the job's system or examples."""
    signature = inspect.signature(tokenizer.apply_chat_template)
    taken = sorted({*signature.parameters, "messages"} & set(chat.values))
    if taken:
        raise UserError(f"input.chat_template_kwargs: {taken[0]} is set by the job itself; leave it out")
    try:
        tokenizer.get_chat_template()
    except ValueError:
        raise UserError(f"{path}: the tokenizer has no chat template, which messages and chats need") from None
    trial = conversation(chat, [{"role": "user", "content": "?"}])
    try:
        _apply(tokenizer, chat, trial)
    except OutOfBounds as error:
        raise UserError(f"{path}: the chat template {error}") from None
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{path}: the chat template does not parse: {one_line(error)}") from None
    except SyntaxError as error:
        raise UserError(f"{path}: the chat template cannot be compiled: {one_line(error)}") from None
    except TEMPLATE_ERRORS as error:
        if chat.system is not None or chat.examples:
            raise UserError(f"input: the chat template refuses system or examples: {one_line(error)}") from None
