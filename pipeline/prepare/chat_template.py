"""A checkpoint's chat template in the bounded sandbox.

The environment is the one that transformers documents for chat templates
(https://huggingface.co/docs/transformers/chat_templating_writing), whose own sandbox bounds neither time nor memory.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace

from actors.engine.errors import UserError
from pipeline.messages import one_line
from pipeline.prepare.chat import Chat, conversation
from pipeline.prepare.sandbox import BoundedSandbox, OutOfBounds, bounded
from pipeline.prepare.templates import TEMPLATE_ERRORS

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message; templates read one of the first two


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; the text stays."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # what it sets stays inside, as in transformers


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)`: its text does not show its values, which may be other namespaces that double in number."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: the name begins with an underscore")


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(text: str) -> jinja2.Template:
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.add_filter("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(text)


Tools = Sequence[Mapping[str, Any]]


def _apply(tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
    """The chat template over messages. Raises OutOfBounds and `TEMPLATE_ERRORS`."""
    text = tokenizer.get_chat_template(tools=list(tools) or None)
    values = {
        **tokenizer.special_tokens_map,
        **chat.values,
        "messages": [_with_reasoning(message) for message in messages],
        "tools": list(tools) or None,
        "documents": None,
        "add_generation_prompt": True,
        "strftime_now": partial(_clock, chat.now),
    }
    return bounded(lambda: _compiled(text).render(values))


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose reasoning has the names under which templates read it; without fields that are null."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _clock(now: float, form: object) -> str:
    """The date of the job's plan: a job that is resumed another day writes the same prompts."""
    return time.strftime(str(form)[:1000], time.gmtime(now))


def render_chat(tokenizer: Any, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Tools = ()) -> str:
    """The prompt, up to the beginning of the answer.

    tools: those that the model may call. Raises UserError if the chat template refuses the messages.
    """
    try:
        return _apply(tokenizer, chat, conversation(chat, messages), tools)
    except OutOfBounds as error:
        raise UserError(f"chat template: {error}") from None
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
