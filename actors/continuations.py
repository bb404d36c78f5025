"""Where a prompt ends and its continuation begins, in tokens.

A tokenizer may write the end of a prompt and the beginning of a continuation as one token, so both are tokenized
together. The rule is that of lm-eval (`TemplateLM._encode_pair`): white space at the prompt's end belongs to the
continuation, whose tokens are those of the whole text behind the prompt's own. Where lm-eval would lose a token that
spans the boundary, it belongs to the continuation here, and for all continuations of a row the prompt ends before it.
An empty prompt stands for the token that begins a sequence. With a tokenizer that closes a text with a special token,
and after token ids, continuations are tokenized by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from actors.engine.batching import common_length
from actors.engine.errors import UserError


def checked_texts(value: Any) -> list[str]:
    """A row's continuations: a text, or a list of texts. Raises UserError, which counts from 1, for others."""
    texts = [value] if isinstance(value, str) else list(() if value is None else value)
    if not texts:
        raise UserError("continuations is null or empty")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text:
            raise UserError(f"continuation {number} is {_kind(text)}; it must be text")
    return texts


def _kind(value: Any) -> str:
    return "null" if value is None else "empty" if value == "" else f"of type {type(value).__name__}"


def boundary_texts(
    tokenizer: Any, prompt: str, continuations: Sequence[str], *, is_chat: bool
) -> list[tuple[str, bool]]:
    """The texts whose tokens `split` takes, first the prompt's, each with whether the tokenizer adds special tokens.

    is_chat: a chat template has written the prompt, which white space and special tokens are part of.
    """
    if is_chat:
        return [(prompt, False), *((prompt + text, False) for text in continuations)]
    if _closes_texts(tokenizer):
        return [(prompt, True), *((text, False) for text in continuations)]
    return [(prompt.rstrip(), True), *((prompt + text, True) for text in continuations)]


def split(tokenizer: Any, encoded: Sequence[Sequence[int]], *, is_chat: bool) -> tuple[list[int], list[list[int]]]:
    """Tokens of a row's prompt, and of its continuations, from those of `boundary_texts`.

    Raises UserError for a continuation without tokens, or for no prompt where no token begins a sequence.
    """
    prompt, *others = encoded
    if not is_chat and _closes_texts(tokenizer):
        return list(prompt), checked_ids(others)
    common = common_length(encoded)
    return list(prompt[:common]) or [_first_token(tokenizer)], checked_ids([whole[common:] for whole in others])


@lru_cache(maxsize=2)
def _closes_texts(tokenizer: Any) -> bool:
    """Whether special tokens come behind a text, so that what follows it is a text of its own."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(tokenizer("a")["input_ids"][-1:] != plain[-1:])


def checked_ids(continuations: Sequence[Sequence[int]]) -> list[list[int]]:
    """Tokens of continuations. Raises UserError, which counts from 1, for one without."""
    for number, ids in enumerate(continuations, 1):
        if not ids:
            raise UserError(f"continuation {number} has no tokens")
    return [list(ids) for ids in continuations]


def _first_token(tokenizer: Any) -> int:
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token is None:
        raise UserError("prompt is empty, and the tokenizer has no token that begins a sequence")
    return int(token)
