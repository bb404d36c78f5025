"""Prompts with their responses -> token ids -> padded batches. It knows no schedule, loss or model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from actors.engine.errors import UserError
from pipeline.config.tune import TuneDataConfig
from pipeline.storage.parquet import read_columns

log = logging.getLogger(__name__)
IGNORED = -100

Text = str | list[int]  # text, or its token ids


@dataclass(frozen=True)
class Pair:
    """A prompt and its response. ended: the end-of-sequence token follows the response."""

    prompt: Text
    response: Text
    ended: bool = True


@dataclass(frozen=True)
class Batch:
    """B pairs, prompts padded on the left to P columns, R response columns behind them.

    ids, positions: [B, P + R]. mask: [B, 1, P + R, P + R], added to attention scores.
    labels: [B, R + 1], what columns P - 1 ... P + R - 1 predict; IGNORED where nothing.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    prompt_columns: int

    @classmethod
    def of(cls, pairs: Sequence[Mapping[str, Any]], device: torch.device) -> Batch:
        """The padded batch of some pairs, see `collate`, on a device."""
        values: dict[str, Any] = collate(pairs)
        moved: dict[str, Any] = {key: one.to(device) if isinstance(one, Tensor) else one for key, one in values.items()}
        return cls(**moved)


def collate(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs of `input_ids` (prompt then response) and `prompt_tokens` -> the fields of one padded `Batch`."""
    prompt_columns = max(pair["prompt_tokens"] for pair in pairs)
    # the last response token is never an input
    response_columns = max(len(pair["input_ids"]) - pair["prompt_tokens"] for pair in pairs) - 1
    columns = prompt_columns + response_columns
    ids = torch.zeros(len(pairs), columns, dtype=torch.long)
    labels = torch.full((len(pairs), response_columns + 1), IGNORED)
    starts = torch.tensor([prompt_columns - pair["prompt_tokens"] for pair in pairs])
    for row, pair in enumerate(pairs):
        tokens = torch.tensor(pair["input_ids"])
        start = int(starts[row])
        ids[row, start : start + len(tokens) - 1] = tokens[:-1]
        response = tokens[pair["prompt_tokens"] :]
        labels[row, : len(response)] = response
    column = torch.arange(columns)
    visible = (column[None, :] >= starts[:, None])[:, None, :] & (column[None, :] <= column[:, None])[None]
    visible |= torch.eye(columns, dtype=torch.bool)  # a padding column sees itself, or softmax gives NaN
    mask = torch.where(visible, 0.0, torch.finfo(torch.bfloat16).min)[:, None]
    positions = (column[None, :] - starts[:, None]).clamp(min=0)
    # plain tensors: Trainer takes these to the device, and counts predicted tokens by `labels`
    return {"ids": ids, "positions": positions, "mask": mask, "labels": labels, "prompt_columns": prompt_columns}


def read_pairs(data: TuneDataConfig, paths: Sequence[str], reference: str) -> list[Pair]:
    """Pairs of text or token ids; a list of references gives a pair each.

    Raises ValueError of one line that names file and row: no text or ids, an empty response, or one that is
    none of `data.choices`.
    """
    pairs: list[Pair] = []
    labels = None if data.choices is None else set(data.choices)
    for path in paths:
        columns = (data.prompt, reference, *((data.ended,) if data.ended else ()))
        prompts, responses, *ended = read_columns(path, columns)
        if ended and not all(isinstance(one, bool) for one in ended[0]):
            raise UserError(f"{path}: {data.ended} must hold true or false in every row")
        for row, (prompt, given) in enumerate(zip(prompts, responses, strict=True)):
            if not _is_text(prompt):
                raise UserError(f"{path}: row {row}: {data.prompt} is empty, or neither text nor token ids")
            several = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
            for response in given if several else [given]:
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

    Raises ValueError for a token outside the vocabulary, or if the tokenizer has no end-of-sequence token.
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
    short = [row for row in rows if len(row["input_ids"]) <= max_tokens]
    if len(short) < len(rows):
        log.warning("%d of %d pairs are longer than %d tokens: left out", len(rows) - len(short), len(rows), max_tokens)
    return short


def _ids(tokenizer: PreTrainedTokenizerBase, values: Sequence[Text], special: bool) -> list[list[int]]:
    texts = [value for value in values if isinstance(value, str)]
    found = iter(tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else [])
    return [next(found) if isinstance(value, str) else value for value in values]
