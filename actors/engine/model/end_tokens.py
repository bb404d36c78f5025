"""Reads a checkpoint's end tokens (tokens that end an answer), and further settings of its generation config."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.model.file_digests import read_object

ANSWER = "An answer."
NOT_SETTINGS = (  # keys of generation_config.json that change no answer, or that the program follows
    *("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "_from_model_config"),
    *("use_cache", "output_attentions", "output_hidden_states"),
)


def end_tokens(folder: Path, tokenizer: Any, vocab_size: int) -> dict[int, list[str]]:
    """Return token id -> names of the sources that define the token as an end token.

    Sources: the generation config, the config, the tokenizer's end-of-sequence token, and the token that the chat
    template writes after an assistant's message. All are read, because in many published models one source lacks an
    end token. Raises UserError for an id outside the vocabulary.
    """
    ends: dict[int, list[str]] = {}
    for place, ids in _named(folder, tokenizer):
        for token in ids:
            where = place if place.startswith("the ") else f"{place}: eos_token_id"
            if not isinstance(token, int):
                raise UserError(f"{folder}: {where} is {token!r}; it must be a token's number, or a list of numbers")
            if not 0 <= token < vocab_size:
                raise UserError(f"{folder}: {where}: {token} lies outside the vocabulary of {vocab_size}")
            ends.setdefault(token, []).append(place)
    return ends


def _named(folder: Path, tokenizer: Any) -> Iterator[tuple[str, list[int]]]:
    for name in ("generation_config.json", "config.json"):
        yield name, _listed(_values(folder, name).get("eos_token_id"))
    yield "the tokenizer", _listed(tokenizer.eos_token_id)
    yield "the chat template", _listed(_end_of_turn(tokenizer))


def _values(folder: Path, name: str) -> dict[str, Any]:
    return read_object(folder / name) if (folder / name).is_file() else {}


def _listed(ids: Any) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]


def _end_of_turn(tokenizer: Any) -> int | None:
    """Return the added token that the chat template writes after an assistant's message; None if there is none."""
    if tokenizer.chat_template is None:
        return None
    chat = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": ANSWER}]
    in_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
    behind = ""
    for messages in (in_parts, chat):  # a template may write only one of the two forms
        # a template may raise any exception. Ignore it here: jobs with chats check their template elsewhere
        with suppress(Exception):
            _, found, rest = str(tokenizer.apply_chat_template(messages, tokenize=False)).rpartition(ANSWER)
            behind = rest.lstrip() if found else behind
    added = {one.content: token for token, one in tokenizer.added_tokens_decoder.items() if one.content.strip()}
    found = max((content for content in added if behind.startswith(content)), key=len, default="")
    return None if found == tokenizer.bos_token else added.get(found)


def settings_not_followed(folder: Path, given: Collection[str]) -> Mapping[str, Any]:
    """Return the settings of the generation config that the job does not set. given: parameters that the job sets."""
    known = {*NOT_SETTINGS, *given, *(["do_sample"] if "temperature" in given else [])}
    values = _values(folder, "generation_config.json")
    return {name: value for name, value in values.items() if name not in known and value is not None}
