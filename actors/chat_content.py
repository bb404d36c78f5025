"""Finds out whether a chat template reads a message's content as text or as a list of parts, and converts messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from actors.engine.errors import UserError

TRIAL = "Qx7Zk"  # in a rendering, shows that the template writes a message's text; templates may cut a longer text
_WHOLE = "ALL_OF_THE_PART"  # in a rendering, shows that the template prints a whole list of parts instead of its texts
_QUESTION = {"role": "user", "content": "?"}
# role -> messages before and after a message of this role in a trial; the user's form is found first
_AROUND = {"user": ([], []), "system": ([], [_QUESTION]), "assistant": ([_QUESTION], [_QUESTION])}
Message = Mapping[str, Any]
Forms = dict[str, tuple[type, ...]]  # role -> types of content that the template writes: str, list, both or none


def content_forms(render: Callable[[list[Message]], str]) -> Forms:
    """Return the types of content that a chat template writes, by trial conversations. render: applies the template.

    A template that refuses a role's trials counts as one of texts: its error will name the reason.
    """
    forms: Forms = {}
    for role, (before, after) in _AROUND.items():
        is_written: dict[type, bool] = {}
        for content in (TRIAL, [{"type": "text", "text": TRIAL, "trial": _WHOLE}]):
            trial = [*in_forms(before, forms), {"role": role, "content": content}, *in_forms(after, forms)]
            with suppress(Exception):  # a template may raise errors of any class
                rendered = render(trial)
                is_written[type(content)] = TRIAL in rendered and _WHOLE not in rendered
        forms[role] = tuple(kind for kind, shown in is_written.items() if shown) if is_written else (str,)
    return forms


def in_forms(messages: Sequence[Message], forms: Forms) -> list[Message]:
    """Return messages with their contents as the template writes them: texts, or lists of text parts.

    A list that becomes text has a line for each part. Raises UserError if the template leaves out a message's text.
    """
    return [{**one, "content": _in_form(one, forms)} if one.get("content") else one for one in messages]


def _in_form(message: Message, forms: Forms) -> Any:
    content, role = message["content"], str(message.get("role"))
    kinds = forms.get(role, forms["user"])
    if not kinds:
        raise UserError(f"the chat template leaves out the text of messages of role {role}")
    if isinstance(content, kinds) or not isinstance(content, str | list):
        return content
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else content
