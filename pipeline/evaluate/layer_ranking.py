"""A keep order learned from the model: layers ranked by the loss without them, on a few prompts."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.schedule import Schedule
from actors.engine.teacher_forcing import IGNORED, ResponseBatch, response_logits

log = logging.getLogger(__name__)
Row = tuple[Sequence[int], Sequence[int]]  # token ids of prompt and response
ROWS_PER_PASS = 16  # of similar length, for little padding; bounds the memory of logits [B, R + 1, V]


def learned_order(decoder: Decoder, rows: Sequence[Row], warmup: int) -> tuple[int, ...]:
    """The `warmup` lowest layers, then the others, the most important first: a keep order for `ScheduleSpec`.

    Greedy elimination, as in SLEB (Song et al., 2024, arXiv 2402.09025): of the remaining layers, repeatedly bypass the
    one without which the loss of the responses is lowest; the last to go is the most important. Scores of each layer
    alone (block influence: Men et al., 2024, arXiv 2403.03853) do not detect that of two layers which replace each
    other one must stay. As in generation, layers are bypassed for response tokens only.

    Cost: with m = L - warmup layers to rank, m (m + 1) / 2 - 1 teacher-forced forward passes over the rows, each
    cheaper as layers go. Deterministic; of equal layers the higher one is kept longer. The order of a model tuned to
    skip is biased towards the layers that it was tuned to keep. Raises UserError if no row has a prompt and a response.
    """
    batches = _batches(decoder, rows)
    remaining = list(range(warmup, decoder.num_layers))
    bypassed: list[int] = []
    was_training = decoder.model.training
    decoder.model.eval()
    try:
        while len(remaining) > 1:
            losses = {layer: _loss(decoder, batches, {*bypassed, layer}) for layer in remaining}
            least = min(remaining, key=lambda layer: (losses[layer], layer))
            log.info("layer %d: %.4f nats per token without it and %s", least, losses[least], bypassed)
            remaining.remove(least)
            bypassed.append(least)
    finally:
        decoder.model.train(was_training)
    return (*range(warmup), *remaining, *reversed(bypassed))


def _batches(decoder: Decoder, rows: Sequence[Row]) -> list[ResponseBatch]:
    pairs: list[dict[str, Any]] = [
        {"input_ids": [*prompt, *response], "prompt_tokens": len(prompt)}
        for prompt, response in rows
        if len(prompt) and len(response)
    ]
    if not pairs:
        raise UserError("no row with a prompt and a response to learn a keep order from")
    pairs.sort(key=lambda pair: len(pair["input_ids"]))
    return [
        ResponseBatch.of(pairs[start : start + ROWS_PER_PASS], decoder.device)
        for start in range(0, len(pairs), ROWS_PER_PASS)
    ]


@torch.no_grad()
def _loss(decoder: Decoder, batches: Sequence[ResponseBatch], bypassed: set[int]) -> float:
    """Mean cross-entropy per response token, nats, if response tokens skip the `bypassed` layers; inf for NaN."""
    kept = [layer for layer in range(decoder.num_layers) if layer not in bypassed]
    schedule = Schedule(decoder.num_layers, (len(kept),), (*kept, *sorted(bypassed)), warmup=0)
    total, count = 0.0, 0
    for batch in batches:
        logits = response_logits(decoder, batch, schedule)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total, count = total + float(loss), count + int((batch.labels != IGNORED).sum())
    return math.inf if math.isnan(total) else total / count
