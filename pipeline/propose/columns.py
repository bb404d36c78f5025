"""Which columns of an input are its id and its prompt. Pure functions over sampled values."""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from actors.engine.errors import UserError
from pipeline.messages import listed

IDS = ("id", "uuid", "key", "row_id", "custom_id", "index", "name")
CHATS = ("messages", "conversation", "conversations", "chat")
PROMPTS = ("prompt", "question", "instruction", "query", "request", "input")  # that say what to do
TEXTS = ("text", "content", "body", "document", "article", "review", "sentence", "description", "title")
REQUEST = {"custom_id", "method", "url", "body"}  # of an OpenAI batch
SUMMARY = "\n\nSummary:"  # where a text is to be continued
LONG = 400  # characters, from which a text is no id


@dataclass(frozen=True)
class Proposal:
    """Keys of section `input`, and why. keys: prompt, template, messages or format, with id. notes: a sentence each."""

    keys: dict[str, Any]
    notes: list[str]


def propose(columns: Mapping[str, Sequence[Any]]) -> Proposal:
    """The columns' roles. Raises UserError if no column can be a prompt.

    columns: sampled values by name, None where there is none.
    """
    if set(columns) >= REQUEST:
        return Proposal({"format": "openai_batch"}, ["Each line is a request with a custom_id: an OpenAI batch."])
    keys: dict[str, Any] = {}
    notes: list[str] = []
    found = _id(columns)
    if found is not None:
        keys["id"] = found
        notes.append(f"{found} has no value twice in the sampled rows: it becomes `id`.")
    else:
        notes.append("No column has another value in each row: ids are made of file and row number.")
    chat = _first(columns, CHATS, _is_chat)
    if chat is not None:
        return Proposal({**keys, "messages": chat}, [*notes, f"{chat} holds chats: the model's template renders them."])
    tokens = next((name for name, values in columns.items() if _all(values, _is_tokens)), None)
    texts = {name: values for name, values in columns.items() if name != found and _all(values, _is_text)}
    asks = [name for name in PROMPTS if name in texts]
    if {"instruction", "input"} <= set(asks):
        template = "{{ instruction }}\n\n{{ input }}"
        return Proposal({**keys, "template": template}, [*notes, "instruction and input make one prompt."])
    if asks:
        return Proposal({**keys, "prompt": asks[0]}, [*notes, f"{asks[0]} holds the prompts."])
    if tokens is not None:
        return Proposal({**keys, "prompt": tokens}, [*notes, f"{tokens} holds prompts as token ids."])
    named = [name for name in TEXTS if name in texts] or sorted(texts, key=lambda name: -_length(texts[name]))
    if not named:
        raise UserError(
            f"no column holds text, token ids or chats ({listed(columns)}); write a job with input.template"
        )
    text = named[0]
    if not text.isidentifier() or keyword.iskeyword(text):
        return Proposal({**keys, "prompt": text}, [*notes, f"{text} holds the longest texts: it is the prompt."])
    notes.append(f"{text} holds texts: the template asks for a summary of one sentence; change it.")
    return Proposal({**keys, "template": f"Summarize in one sentence.\n\n{{{{ {text} }}}}{SUMMARY}"}, notes)


def _id(columns: Mapping[str, Sequence[Any]]) -> str | None:
    """A column of different plain values, by its name."""
    likely = [name for name in columns if name.lower() in IDS or name.lower().endswith(("_id", "-id"))]
    for name in sorted(likely, key=lambda name: IDS.index(name.lower()) if name.lower() in IDS else 2):
        values = columns[name]
        plain = all(isinstance(value, str | int) and len(str(value)) < LONG for value in values)
        if plain and len(set(values)) == len(values):
            return name
    return None


def _first(columns: Mapping[str, Sequence[Any]], names: Sequence[str], fits: Any) -> str | None:
    """The column that fits, one of `names` before others."""
    fitting = [name for name, values in columns.items() if _all(values, fits)]
    return min(fitting, key=lambda name: names.index(name) if name in names else len(names), default=None)


def _all(values: Sequence[Any], fits: Any) -> bool:
    """Whether there are values and all of them fit, but for missing ones."""
    given = [value for value in values if value is not None]
    return bool(given) and all(map(fits, given))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _is_chat(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(entry, dict) and {"role", "content"} <= set(entry) for entry in value)
    )


def _length(values: Sequence[Any]) -> float:
    return mean(len(value) for value in values if value is not None)
