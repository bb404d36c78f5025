"""A checkpoint's chat template in transformers' sandbox, with the time of the job's plan."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from actors.control_tokens import control_tokens
from actors.engine.errors import UserError
from pipeline.messages import one_line
from pipeline.prepare.chat import Chat, conversation
from pipeline.prepare.templates import TEMPLATE_ERRORS

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
