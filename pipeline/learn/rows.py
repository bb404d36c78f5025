"""Checks and tokenizes the prompts and responses that `tune` and `evaluate` read: texts or lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.control_tokens import one_bos
from pipeline.messages import is_unicode

Text = str | list[int]


def is_text(value: Any) -> bool:
    """Tell whether a value is a text that is not blank, or a list of token ids that is not empty."""
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and token >= 0 for token in value)
    return isinstance(value, str) and is_unicode(value) and bool(value.strip())


def token_ids(tokenizer: PreTrainedTokenizerBase, values: Sequence[Text], *, special: bool = True) -> list[list[int]]:
    """Tokenize the texts in `values` as jobs do; lists of token ids stay as they are.

    special: whether to add special tokens. A text that begins with a BOS token gets no second one.
    """
    texts = [value for value in values if isinstance(value, str)]
    found = tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else []
    encoded = (one_bos(tokenizer, ids) if special else ids for ids in found)
    return [next(encoded) if isinstance(value, str) else value for value in values]
