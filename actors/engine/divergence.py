"""Distances of a schedule from full depth: of its distributions over the same tokens, and of its own answers.

KL and top-1 agreement follow given responses under the schedule, regret the schedule's answers under full depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.schedule import Schedule
from actors.engine.teacher_forcing import IGNORED, batch_of, response_logits

LOGITS_AT_ONCE = 2**25  # numbers in one batch's logits, and in its attention mask; 128 MiB in fp32

Array = npt.NDArray[np.float64]
Pair = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True)
class Model:
    """Weights under a schedule."""

    decoder: Decoder
    schedule: Schedule


@dataclass(frozen=True)
class ForcedScores:
    """Sums over each row's response tokens, [N] for N rows.

    kl: KL(full depth || line), nats. nll: -log p of the tokens under the line, nats. agreed: positions at which both
    have the same most likely token. tokens: their number.
    """

    kl: Array
    nll: Array
    agreed: Array
    tokens: Array


def teacher_forced(
    full: Model, lines: Sequence[Model], pairs: Sequence[Pair], max_rows: int, *, first: int = 0
) -> list[ForcedScores]:
    """Scores of every line over (prompt ids, response ids) pairs, none of them empty.

    Every token's distribution [V] under the line, computed as at inference, is compared with full depth's. Models share
    a vocabulary; padding of one is ignored.

    Args:
        max_rows: of a batch.
        first: number of the first response token that counts; 1 leaves out the token that the prompt's pass predicts.
    """
    sums = np.zeros((len(lines), 3, len(pairs)))
    tokens = np.array([max(len(response) - first, 0) for _, response in pairs], dtype=np.float64)
    for rows in _batches(pairs, max_rows, full.decoder.vocab_size):
        batch = batch_of([pairs[row] for row in rows], full.decoder.device)
        batch.labels[:, :first] = IGNORED
        with torch.inference_mode():
            expected = response_logits(full.decoder, batch, full.schedule)
            for number, line in enumerate(lines):
                logits = response_logits(line.decoder, batch, line.schedule)
                sums[number][:, rows] = _divergence(expected, logits, batch.labels).cpu().numpy()
    return [ForcedScores(kl, nll, agreed, tokens) for kl, nll, agreed in sums]


def answer_regret(full: Model, pairs: Sequence[Pair], max_rows: int) -> Array:
    """How much less likely each answer's tokens are than full depth's own choices at their places: nats an answer, [N].

    log p of the likeliest token - log p of the answer's token under full depth, summed over the answer's tokens, the
    end token included. 0 for full depth's own greedy answers. pairs: (prompt ids, answer ids), none of them empty.
    """
    regret = np.zeros(len(pairs))
    for rows in _batches(pairs, max_rows, full.decoder.vocab_size):
        batch = batch_of([pairs[row] for row in rows], full.decoder.device)
        with torch.inference_mode():
            logits = response_logits(full.decoder, batch, full.schedule).float()
            counted = batch.labels != IGNORED
            chosen = logits.gather(-1, batch.labels.masked_fill(~counted, 0)[..., None])[..., 0]
            lost = (logits.amax(dim=-1) - chosen) * counted
            regret[rows] = lost.sum(dim=-1, dtype=torch.float64).cpu().numpy()
    return regret


def _divergence(expected: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Logits [B, R + 1, V] twice, labels [B, R + 1] -> KL, -log p of the labels, and the positions that agree.

    Each is summed over columns: [3, B] fp64.
    """
    shared = min(expected.shape[-1], logits.shape[-1])
    log_p = expected[..., :shared].float().log_softmax(dim=-1)
    log_q = logits[..., :shared].float().log_softmax(dim=-1)
    counted = labels != IGNORED
    nll = -log_q.gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)  # negative only by rounding
    agreed = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
    return torch.stack([(term * counted).sum(dim=-1, dtype=torch.float64) for term in (kl, nll, agreed)])


def _batches(pairs: Sequence[Pair], max_rows: int, vocab_size: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length that fit into memory; a single long row may exceed it."""
    rows: list[int] = []
    prompt = response = 0
    for row in sorted(range(len(pairs)), key=lambda row: (len(pairs[row][1]), len(pairs[row][0]))):
        wider, longer = max(prompt, len(pairs[row][0])), max(response, len(pairs[row][1]))
        most = (len(rows) + 1) * max(longer * vocab_size, (wider + longer) ** 2)
        if rows and (len(rows) == max_rows or most > LOGITS_AT_ONCE):
            yield rows
            rows, wider, longer = [], len(pairs[row][0]), len(pairs[row][1])
        rows.append(row)
        prompt, response = wider, longer
    if rows:
        yield rows
