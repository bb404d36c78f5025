"""Labels as token ids: which sets of labels a tokenizer can tell apart. Decoding is the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from actors.engine.errors import UserError
from pipeline.messages import is_unicode


def tokenize_labels(tokenizer: Any, labels: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Label -> token ids without special tokens. Labels that are not valid Unicode are missing."""
    valid = [label for label in dict.fromkeys(labels) if is_unicode(label)]
    if not valid:
        return {}
    encoded = tokenizer(valid, add_special_tokens=False, verbose=False)["input_ids"]
    return {label: tuple(ids) for label, ids in zip(valid, encoded, strict=True)}


def longest(labels: Sequence[str], ids: Mapping[str, Sequence[int]]) -> int:
    """Tokens of the longest label. Raises UserError if a label has no tokens, or two labels have the same."""
    seen: dict[tuple[int, ...], str] = {}
    for label in labels:
        tokens = tuple(ids.get(label, ()))
        if not tokens:
            raise UserError(f"choices: {label!r} has no tokens")
        if tokens in seen:
            raise UserError(f"choices: {seen[tokens]!r} and {label!r} are the same to the tokenizer")
        seen[tokens] = label
    return max(len(tokens) for tokens in seen)
