"""Prompts with their responses, from Parquet files to token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.config.tune import TuneDataConfig
from pipeline.read.rows import read_columns

log = logging.getLogger(__name__)

Text = str | list[int]  # text, or its token ids


@dataclass(frozen=True)
class Pair:
    """A prompt and its response. ended: the end-of-sequence token follows the response."""

    prompt: Text
    response: Text
    ended: bool = True


def read_pairs(data: TuneDataConfig, paths: Sequence[str], reference: str) -> list[Pair]:
    """Pairs of text or token ids; each of a list of references makes a pair.

    Raises UserError that names file and row of an empty prompt or response, of one that is neither text nor token ids,
    or of a response that is none of `data.choices`.
    """
    pairs: list[Pair] = []
    labels = None if data.choices is None else set(data.choices)
    for path in paths:
        columns = (data.prompt, reference, *((data.ended,) if data.ended else ()))
        read = read_columns(path, columns, StorageConfig())
        prompts, responses, *ended = (read[name] for name in columns)
        if ended and not all(isinstance(value, bool) for value in ended[0]):
            raise UserError(f"{path}: {data.ended} must hold true or false in every row")
        for row, (prompt, value) in enumerate(zip(prompts, responses, strict=True)):
            if not _is_text(prompt):
                raise UserError(f"{path}: row {row}: {data.prompt} is empty, or neither text nor token ids")
            several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
            for response in value if several else [value]:
                if not _is_text(response):
                    raise UserError(
                        f"{path}: row {row}: {reference} is empty, or neither text nor token ids; leave the row out"
                    )
                if labels is not None and (not isinstance(response, str) or response not in labels):
                    raise UserError(f"{path}: row {row}: {response!r} is none of the {len(labels)} choices")
                if isinstance(response, str):
                    response = " ".join(response.split()) if data.collapse_whitespace else response.strip()
                pairs.append(Pair(prompt, response, ended[0][row] if ended else True))
    if not pairs:
        raise UserError(f"{paths[0]}: no rows to train or evaluate on")
    return pairs


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value.strip())


def encode(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], max_tokens: int, vocab_size: int
) -> list[dict[str, Any]]:
    """`input_ids` and `prompt_tokens` of each pair; longer pairs than `max_tokens` are left out with a warning.

    Raises UserError for a token outside the vocabulary, or if the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-sequence token, so that no end could be learned")
    prompts = _ids(tokenizer, [pair.prompt for pair in pairs], special=True)
    responses = _ids(tokenizer, [pair.response for pair in pairs], special=False)
    end = [tokenizer.eos_token_id]
    rows: list[dict[str, Any]] = []
    for number, (pair, prompt, response) in enumerate(zip(pairs, prompts, responses, strict=True)):
        ids = [*prompt, *response, *(end if pair.ended else [])]
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise UserError(f"pair {number}: a token id lies outside the model's vocabulary of {vocab_size}")
        rows.append({"input_ids": ids, "prompt_tokens": len(prompt)})
    fitting = [row for row in rows if len(row["input_ids"]) <= max_tokens]
    if len(fitting) < len(rows):
        log.warning(
            "%d of %d pairs are longer than %d tokens: left out", len(rows) - len(fitting), len(rows), max_tokens
        )
    return fitting


def _ids(tokenizer: PreTrainedTokenizerBase, values: Sequence[Text], special: bool) -> list[list[int]]:
    texts = [value for value in values if isinstance(value, str)]
    encoded = iter(tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else [])
    return [next(encoded) if isinstance(value, str) else value for value in values]
