"""Finds out whether a chat template reads a message's content as text or as a list of parts, and converts messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from actors.engine.errors import UserError

TRIAL, _SECOND = "Qx7Zk", "Jw4Vf"  # texts of trial messages; short, because templates may cut long texts
_WHOLE = "ALL_OF_THE_PART"  # in a rendering, shows that the template prints a whole list of parts instead of its texts
_QUESTION = {"role": "user", "content": "?"}
# role -> messages before and after a message of this role in a trial; the user's form is found first
_AROUND = {"user": ([], []), "system": ([], [_QUESTION]), "assistant": ([_QUESTION], [_QUESTION])}
Message = Mapping[str, Any]
Forms = dict[str, tuple[str, ...]]  # role -> forms of content whose texts the template writes: text, part, parts


def content_forms(render: Callable[[list[Message]], str]) -> Forms:
    """Return the forms of content that a chat template writes, by trial conversations. render: applies the template.

    text: a text. part, parts: a list of one or more text parts. A template that refuses a role's trials counts as one
    of texts: its error will name the reason.
    """
    forms: Forms = {}
    parts = [{"type": "text", "text": text, "trial": _WHOLE} for text in (TRIAL, _SECOND)]
    for role, (before, after) in _AROUND.items():
        is_written: dict[str, bool] = {}
        for form, content in (("text", TRIAL), ("part", parts[:1]), ("parts", parts)):
            trial = [*in_forms(before, forms), {"role": role, "content": content}, *in_forms(after, forms)]
            with suppress(Exception):  # a template may raise errors of any class
                text = render(trial)
                is_written[form] = TRIAL in text and _WHOLE not in text and (form != "parts" or _SECOND in text)
        forms[role] = tuple(form for form, shown in is_written.items() if shown) if is_written else ("text",)
    return forms


def in_forms(messages: Sequence[Message], forms: Forms) -> list[Message]:
    """Return messages with their contents as the template writes them: texts, or lists of text parts.

    Parts that the template does not write are joined, with a line for each. Raises UserError if the template leaves out
    a message's text.
    """
    return [{**one, "content": _in_form(one, forms)} if one.get("content") else one for one in messages]


def _in_form(message: Message, forms: Forms) -> Any:
    content, role = message["content"], str(message.get("role"))
    # a tool's message has no trial, because templates need more of it; they may print parts as they are
    written = forms[role] if role in forms else forms["user"][:1]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return content
    if not written:
        raise UserError(f"the chat template leaves out the text of messages of role {role}")
    if isinstance(content, list) and ("parts" in written or ("part" in written and len(parts) == 1)):
        return content
    text = "\n".join(texts)
    return text if "text" in written else [{"type": "text", "text": text}]
