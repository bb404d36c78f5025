"""Loads a checkpoint's tokenizer once per process, and tokenizes texts in batches, to limit memory use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from actors.control_tokens import one_bos
from actors.engine.errors import UserError
from actors.engine.model.tokenizer import load_tokenizer
from pipeline.checkpoints.local import PinnedFolder
from pipeline.checkpoints.resolve import RemoteCheckpoint, fetch
from pipeline.messages import is_unicode

Source = str | PinnedFolder | RemoteCheckpoint
BATCH_CHARACTERS = 2**20  # characters tokenized at once; a tokenizer needs over 100 bytes of memory per token
SHORT_CHARACTERS = 2**16  # `fewest_tokens` is 0 for texts up to this length


@lru_cache(maxsize=2)
def tokenizer_of(checkpoint: Source) -> Any:
    """Return the checkpoint's tokenizer. Raises UserError if the tokenizer is damaged."""
    return load_tokenizer(fetch(checkpoint, weights=False))


def shown_path(checkpoint: Source) -> str:
    """Return the path of a checkpoint, for error messages."""
    return checkpoint if isinstance(checkpoint, str) else checkpoint.path


@lru_cache(maxsize=2)
def _longest_token(checkpoint: Source) -> int:
    """Return the number of characters of the longest token in the vocabulary."""
    return max(map(len, tokenizer_of(checkpoint).get_vocab()))


def fewest_tokens(checkpoint: Source, text: str) -> int:
    """Return a lower bound for the number of tokens: 0 for a short text, else text length / longest token's length."""
    return 0 if len(text) <= SHORT_CHARACTERS else -(-len(text) // _longest_token(checkpoint))


def tokenize(checkpoint: Source, texts: Sequence[str], special_tokens: bool) -> Iterator[list[int]]:
    """Yield the token ids of each text, with at most one BOS token. About `BATCH_CHARACTERS` are tokenized at once.

    special_tokens: whether to add the tokenizer's special tokens. False for chats, whose template writes them.
    """
    first = size = 0
    for end, text in enumerate(texts, 1):
        size += len(text)
        if size >= BATCH_CHARACTERS or end == len(texts):
            tokenizer = tokenizer_of(checkpoint)
            encoded = tokenizer(
                list(texts[first:end]), add_special_tokens=special_tokens, return_attention_mask=False, verbose=False
            )["input_ids"]
            yield from (one_bos(tokenizer, ids) for ids in encoded)
            first, size = end, 0


def tokenize_labels(tokenizer: Any, labels: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return label -> token ids, without special tokens. Labels that are not valid Unicode are left out."""
    valid = [label for label in dict.fromkeys(labels) if is_unicode(label)]
    if not valid:
        return {}
    encoded = tokenizer(valid, add_special_tokens=False, verbose=False)["input_ids"]
    return {label: tuple(ids) for label, ids in zip(valid, encoded, strict=True)}


def longest(labels: Sequence[str], ids: Mapping[str, Sequence[int]]) -> int:
    """Return the longest label's number of tokens. Raises UserError if a label has no tokens, or another's tokens."""
    seen: dict[tuple[int, ...], str] = {}
    for label in labels:
        tokens = tuple(ids.get(label, ()))
        if not tokens:
            raise UserError(f"choices: {label!r} has no tokens")
        if tokens in seen:
            raise UserError(f"choices: {seen[tokens]!r} and {label!r} have the same tokens")
        seen[tokens] = label
    return max(len(tokens) for tokens in seen)
