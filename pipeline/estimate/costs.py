"""Linear cost models of a prefill pass and of a decode step, fitted to measured seconds.

    pass = a + b · requests + c · layers · tokens + d · layers · Σ tokens²
    step = a + b · rows + c · layers run + d · Σ depth + e · Σ depth · context

No coefficient is negative. Pure functions on numbers; imports neither torch nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.engine.schedules.schedule import Schedule

Numbers = NDArray[np.float64]
SWEEPS = 20_000  # of coordinate descent, at most


class KeptPrefix:
    """The prefix whose keys and values an engine keeps: the last one."""

    def __init__(self) -> None:
        self._ids: tuple[int, ...] = ()

    def is_new(self, prefix: Sequence[int]) -> bool:
        """Whether a pass with this prefix computes it; it is kept from then on."""
        before, self._ids = self._ids, tuple(prefix) or self._ids
        return self._ids != before


def pass_terms(
    schedule: Schedule, prompts: Sequence[int], prefix: int, requests: int, *, new_prefix: bool = False
) -> list[float]:
    """Terms of a prefill pass.

    Args:
        schedule: Layers of the prompts.
        prompts: Tokens of each distinct prompt, including `prefix` shared tokens.
        prefix: Shared tokens.
        requests: Rows that begin.
        new_prefix: Whether the prefix is computed too, in a pass of its own.
    """
    layers = len(schedule.prompt_layers)
    own = [tokens - prefix for tokens in prompts]
    square = sum(tokens * (tokens + prefix) for tokens in own)
    extra = prefix if new_prefix else 0
    tokens, squares = sum(own) + extra, square + extra * extra
    return [2.0 if extra else 1.0, float(requests), float(layers * tokens), float(layers * squares)]


def step_terms(schedule: Schedule, positions: Numbers, contexts: Numbers) -> list[float]:
    """Terms of a decode step. positions [R]: generated position t of each row. contexts [R]: tokens it attends to."""
    depths = np.asarray(schedule.depths, float)[np.minimum(positions.astype(int), len(schedule.depths) - 1)]
    return [1.0, float(len(depths)), float(depths.max()), float(depths.sum()), float((depths * contexts).sum())]


def fit(terms: Numbers, seconds: Numbers) -> Numbers:
    """Coefficients [C] ≥ 0 of least squares over terms [N, C] and seconds [N]; 0 without observations."""
    if not len(seconds):
        return np.zeros(terms.shape[1])
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)
    scaled = terms / scale
    gram, target = scaled.T @ scaled, scaled.T @ seconds
    found = np.zeros(len(scale))
    for _ in range(SWEEPS):
        before = found.copy()
        for index in reversed(range(len(found))):  # last first: the constant gets only what no other term explains
            if gram[index, index] > 0:
                rest = target[index] - gram[index] @ found + gram[index, index] * found[index]
                found[index] = max(0.0, rest / gram[index, index])
        if np.abs(found - before).max() <= 1e-9 * max(np.abs(found).max(), 1e-12):
            break
    return np.asarray(found / scale, float)


@dataclass(frozen=True)
class Costs:
    """Fitted coefficients, seconds per unit of each term."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]

    @classmethod
    def of(cls, passes: Sequence[Sequence[float]], steps: Sequence[Sequence[float]]) -> Costs:
        """Fit to measured passes and steps. Each is a list: its terms, then its seconds."""
        return cls(_fitted(passes, 4), _fitted(steps, 5))

    def prefill_seconds(self, terms: Sequence[float]) -> float:
        """Seconds of a prefill pass."""
        return sum(cost * term for cost, term in zip(self.prefill, terms, strict=True))

    def decode_seconds(self, terms: Sequence[float]) -> float:
        """Seconds of a decode step."""
        return sum(cost * term for cost, term in zip(self.decode, terms, strict=True))


def _fitted(observed: Sequence[Sequence[float]], count: int) -> tuple[float, ...]:
    table = np.asarray(observed, float).reshape(-1, count + 1)
    return tuple(float(value) for value in fit(table[:, :count], table[:, count]))
