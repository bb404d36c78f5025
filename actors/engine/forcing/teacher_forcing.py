"""Logits of known responses under a schedule, every token through the layers that it runs at inference.

SkipDecode (arXiv 2307.02628): the prompt runs all layers (or those of d(0)), response token t as input runs the
layers of d(t). Responses are aligned behind left-padded prompts, so that the columns a layer needs are a
prefix: it runs over these alone, and a skipped layer costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from actors.engine.decoder import Decoder, causal_mask, part
from actors.engine.schedules.schedule import Schedule

IGNORED = -100  # label of a column that predicts nothing


@dataclass(frozen=True)
class ResponseBatch:
    """B pairs of prompt and response: prompts padded on the left to P columns, R response columns behind them.

    ids, positions: [B, P + R]. mask: [B, 1, P + R, P + R], added to attention scores.
    labels: [B, R + 1], the tokens that columns P - 1 ... P + R - 1 predict, else IGNORED.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    prompt_columns: int

    @classmethod
    def of(cls, pairs: Sequence[Mapping[str, Any]], device: torch.device) -> ResponseBatch:
        """The padded batch of `pairs`, see `collate`, on `device`."""
        fields = collate(pairs)
        moved: dict[str, Any] = {
            key: value.to(device) if isinstance(value, Tensor) else value for key, value in fields.items()
        }
        return cls(**moved)


def batch_of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> ResponseBatch:
    """The padded batch of (prompt ids, response ids) pairs on `device`."""
    rows = [{"input_ids": [*prompt, *response], "prompt_tokens": len(prompt)} for prompt, response in pairs]
    return ResponseBatch.of(rows, device)


def collate(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs of `input_ids` (prompt, then response) and `prompt_tokens` -> the fields of a padded `ResponseBatch`.

    Plain tensors: the Trainer moves them to the device, and counts predicted tokens by `labels`.
    """
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
    return {"ids": ids, "positions": positions, "mask": mask, "labels": labels, "prompt_columns": prompt_columns}


def response_logits(decoder: Decoder, batch: ResponseBatch, schedule: Schedule, *, recompute: bool = False) -> Tensor:
    """Logits [B, R + 1, V] of columns P - 1 ... P + R - 1, each column through the layers that it runs at inference.

    recompute: keep only each layer's input for the backward pass (gradient checkpointing).
    """
    hidden, rotary = decoder.embed(batch.ids, batch.positions)
    columns = batch.ids.shape[1]
    prompt_layers = set(schedule.prompt_layers)
    response = columns - batch.prompt_columns
    # of the scores' own type, or the sum is computed and kept in fp32
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    mask = batch.mask.to(torch.get_autocast_dtype(device_type) if autocast else hidden.dtype)
    for layer in range(decoder.num_layers):
        if layer not in prompt_layers:
            continue  # every response token skips it too
        end = batch.prompt_columns + schedule.uses(layer, response + 1)
        visible = mask[:, :, :end, :end]
        if (window := decoder.windows[layer]) is not None:
            far = ~causal_mask(end, 0, window, mask.device)
            visible = visible.masked_fill(far, torch.finfo(mask.dtype).min)
        inputs = (layer, hidden[:, :end], part(rotary[layer], columns=slice(end)), visible)
        output = (
            checkpoint(decoder.run_layer, *inputs, use_reentrant=False) if recompute else decoder.run_layer(*inputs)
        )
        hidden = output if end == columns else torch.cat([output, hidden[:, end:]], dim=1)
    predicting = hidden[:, batch.prompt_columns - 1 :]
    return decoder.logits(predicting.flatten(0, 1)).view(*predicting.shape[:2], -1)
