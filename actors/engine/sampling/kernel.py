"""`sampler.sample` by the CPU's kernel, which reads a row's logits once and computes what that row asks for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from actors.engine.cpu import sampling as cpu
from actors.engine.sampling.penalties import changed_logits
from actors.engine.sampling.state import NO_TOKEN, Drawn, RowSampling, allowed_bits
from actors.engine.types import TokenLogprob


def sample(logits: Tensor, rows: Sequence[RowSampling], *, logprobs: bool) -> Drawn:
    """See `sampler.sample`. logits: [B, V], bfloat16 or float32, contiguous, on the CPU."""
    batch = _Batch(logits, rows, logprobs)
    # masks cost more than sampling: a greedy row needs none while its likeliest token is allowed
    masked = [row.needs_mask for row in rows]
    batch.run([index for index, with_mask in enumerate(masked) if not with_mask])
    for index, row in enumerate(rows):
        if row.allowed is not None and not masked[index]:
            token = int(batch.tokens[index])
            masked[index] = token != NO_TOKEN and not row.allowed.allows(token)
    batch.run([index for index, with_mask in enumerate(masked) if with_mask], masks=True)
    return Drawn(batch.tokens.tolist(), batch.logprobs.tolist(), batch.choice_logprobs.tolist(), batch.top)


class _Batch:
    """Rows of one step, and their results."""

    def __init__(self, logits: Tensor, rows: Sequence[RowSampling], logprobs: bool) -> None:
        self.logits, self.rows, self.wants_logprobs = logits, rows, logprobs
        self.tokens = np.zeros(len(rows), np.int64)
        self.logprobs, self.choice_logprobs = (np.full(len(rows), np.nan, np.float32) for _ in range(2))
        self.top: dict[int, TokenLogprob] = {}
        self._drawn = np.array([row.drawn for row in rows], np.int64)
        self._changes = _changes(logits, rows)

    def run(self, members: Sequence[int], *, masks: bool = False) -> None:
        """Sample the rows with these indices. masks: exclude tokens that are not allowed."""
        if not members:
            return
        rows = [self.rows[index] for index in members]
        places = np.array(members, np.int64)
        changes = self._changes
        if changes is not None:
            changes = cpu.Changes(np.ascontiguousarray(changes.bounds[places]), changes.tokens, changes.values)
        asked = [row.params.logprobs for row in rows]
        done = cpu.sample(
            self.logits,
            places,
            b"".join([row.packed for row in rows]),
            self._drawn[places],
            changes=changes,
            masks=cpu.Masks(allowed_bits(rows, self.logits.shape[1]), np.arange(len(rows))) if masks else None,
            most=min(max((count or 0 for count in asked), default=0), self.logits.shape[1]),
            logprobs=self.wants_logprobs,
        )
        self.tokens[places], self.logprobs[places] = done.tokens, done.logprobs
        self.choice_logprobs[places] = done.choice_logprobs
        for place, count in enumerate(asked):
            if count is not None:
                self.top[members[place]] = _top(done, place, count)


def _changes(logits: Tensor, rows: Sequence[RowSampling]) -> cpu.Changes | None:
    changes = changed_logits(logits, rows)
    if changes is None:
        return None
    index, tokens, values = (part.numpy() for part in changes)
    numbers = np.arange(len(rows))
    bounds = np.stack([np.searchsorted(index, numbers), np.searchsorted(index, numbers, side="right")], axis=1)
    return cpu.Changes(bounds, tokens, values)


def _top(done: cpu.Sampled, place: int, count: int) -> TokenLogprob:
    count = min(count, done.top_ids.shape[1])
    likeliest = zip(done.top_ids[place, :count].tolist(), done.top_logprobs[place, :count].tolist(), strict=True)
    return TokenLogprob(int(done.tokens[place]), float(done.logprobs[place]), tuple(likeliest))
