"""Penalties, barred tokens and masks applied to logits, and log-probabilities among the allowed tokens.

Defined here in plain torch; a GPU has the same as Triton kernels, `kernels.logits`. As in `sampling.penalties` and
`sampling.sampler`: penalties first, then barred and masked tokens.
Shapes: B lanes, V vocabulary size, R rows, S most stop tokens of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows

MOST_SEEN = 2**15 - 1  # a token of an answer counts at most MOST_SEEN - 1 times
NO_NUMBER = -1e30  # in place of NaN, so that an allowed token is sampled whatever the model computes


class LogitsOperations(Protocol):
    """This module, or `kernels.logits`."""

    def adjust(
        self, logits: Tensor, slots: Tensor, rows: DeviceRows, *, penalized: bool, barred: bool, masked: bool
    ) -> Tensor:
        """logits [B, V] of the rows `slots` [B] -> the logits to sample from [B, V], float32 if `penalized`.

        Called once for each token that a row samples.

        Args:
            logits: Unchanged.
            slots: Of the lanes.
            rows: Their state. With `penalized` the last token of each row is counted in `seen`.
            penalized: Whether a row has penalties.
            barred: Whether a row has a least number of tokens, before which its stop tokens are -inf.
            masked: Whether a row has a mask; tokens that are not allowed are -inf.
        """
        ...

    def masked_logprobs(self, logits: Tensor, slots: Tensor, tokens: Tensor, rows: DeviceRows) -> Tensor:
        """Log-probabilities float32 [B], nats, of tokens [B] among those that the masks of the rows `slots` [B] allow;
        logits [B, V]."""
        ...


def adjust(logits: Tensor, slots: Tensor, rows: DeviceRows, *, penalized: bool, barred: bool, masked: bool) -> Tensor:
    """Implements `LogitsOperations.adjust`."""
    adjusted = _penalized(logits.float(), slots, rows) if penalized else logits
    if barred:
        stops = rows.stops[slots]
        early = (rows.counts[slots] < rows.least[slots])[:, None] & (stops >= 0) & (stops < logits.shape[1])
        values = torch.where(early, -torch.inf, torch.inf).to(adjusted.dtype)
        adjusted = adjusted.scatter_reduce(1, torch.where(early, stops, 0), values, "amin")
    if masked:
        adjusted = torch.where(adjusted.isnan(), NO_NUMBER, adjusted)
        adjusted = adjusted.masked_fill(~_allowed(logits, slots, rows), -torch.inf)
    return adjusted


def _penalized(logits: Tensor, slots: Tensor, rows: DeviceRows) -> Tensor:
    assert rows.seen is not None
    last = rows.last[slots]
    before = rows.seen[slots, last]
    after = torch.where(rows.counts[slots] > 0, (before.int().clamp(min=1) + 1).clamp(max=MOST_SEEN), before)
    rows.seen[slots, last] = after.to(before.dtype)
    seen = rows.seen[slots]
    times = (seen.float() - 1).clamp(min=0)
    penalties = rows.penalties[slots]
    repetition, presence, frequency = (penalties[:, kind, None] for kind in range(3))
    new = torch.where(logits < 0, logits * repetition, logits / repetition)
    new = new - presence * (times > 0) - frequency * times
    return torch.where(seen > 0, new, logits)


def masked_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor, rows: DeviceRows) -> Tensor:
    """Implements `LogitsOperations.masked_logprobs`."""
    wide = logits.float()
    normalizer = wide.masked_fill(~_allowed(logits, slots, rows), -torch.inf).logsumexp(dim=-1)
    return wide.gather(1, tokens[:, None])[:, 0] - normalizer


def _allowed(logits: Tensor, slots: Tensor, rows: DeviceRows) -> Tensor:
    """bool [B, V]: whether a row's mask has a token."""
    assert rows.masks is not None
    token = torch.arange(logits.shape[1], device=logits.device)
    return (rows.masks[slots][:, token // 32] >> (token % 32) & 1).bool()
