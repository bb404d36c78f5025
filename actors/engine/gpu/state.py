"""What the device knows of the rows in flight, and the tail of a step: logits -> tokens, and whether they end a row.

Everything is of fixed shapes and nothing is read back, so that a CUDA graph can hold it; the host reads which rows have
ended some steps later. Numbers are drawn as in `sampling`, from each row's own key and place.
Shapes: R rows, B lanes, V vocabulary size, S stop tokens of a row at most, M most new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engine.gpu import reference
from actors.engine.gpu.pages import upload
from actors.engine.row import Row
from actors.engine.sampling import draw, narrow
from actors.engine.working_memory import DRAWN_NUMBERS


def on_device(row: Row, state: DeviceRows) -> bool:
    """Whether the device alone can say what comes next and when the row ends."""
    request = row.request
    told = request.choices or request.ending or request.sampling.logprobs is not None
    return not (told or row.sampling.penalized) and len(row.stop_ids) <= state.stops.shape[1]


@dataclass(frozen=True)
class Tail:
    """What the rows in flight ask of a step's end: whether numbers are drawn, from the likelier tokens alone; whether
    stop tokens are barred at first; whether log-probabilities are summed."""

    drawn: bool
    narrowed: bool
    barred: bool
    logprobs: bool

    @property
    def plain(self) -> bool:
        """Whether the likeliest tokens are all that is asked."""
        return not (self.barred or self.drawn or self.logprobs)

    @classmethod
    def of(cls, rows: Sequence[Row], logprobs: bool) -> Tail:
        """Of rows that `on_device` takes."""
        return cls(
            any(row.request.sampling.temperature > 0 for row in rows),
            any(row.sampling.narrowed and row.request.sampling.temperature > 0 for row in rows),
            any(row.request.sampling.min_new_tokens > 0 for row in rows),
            logprobs,
        )


class DeviceRows:
    """State of R rows, and of one more that is nobody's: it has ended, and padding lanes are its."""

    def __init__(
        self, rows: int, max_new_tokens: int, stop_tokens: int, device: torch.device, operations: Any = reference
    ) -> None:
        """operations: `kernels`, or `reference` where there is no Triton."""

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows + 1, *shape, dtype=dtype, device=device)

        self.rows, self.operations = rows, operations
        self.last = numbers()  # the token that comes next as input
        self.places = numbers()  # where it will lie in its row
        self.positions = numbers()  # which generated token it is
        self.counts = numbers()  # tokens drawn
        self.limits, self.least = numbers(), numbers()
        self.stops = numbers(max(1, stop_tokens)) - 1
        self.keys, self.top_k = numbers(), numbers()
        self.temperature, self.top_p, self.min_p = (numbers(dtype=torch.float64) for _ in range(3))
        self.tokens = numbers(max_new_tokens)
        self.logprobs = numbers(dtype=torch.float64)
        self.ended = torch.ones(rows + 1, dtype=torch.bool, device=device)

    def begin(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Rows before their first token take these slots."""
        device = self.last.device
        index = upload(slots, device)
        params = [row.request.sampling for row in rows]
        lengths = [len(row.request.prompt_ids) for row in rows]
        stops = np.full((len(rows), self.stops.shape[1]), -1)
        for place, row in enumerate(rows):
            own = sorted(row.stop_ids)[: stops.shape[1]]  # of a row with more the host looks for them
            stops[place, : len(own)] = own
        for target, values in (
            (self.places, np.array(lengths) - 1),
            (self.positions, np.full(len(rows), -1)),
            (self.counts, np.zeros(len(rows), dtype=np.int64)),
            (self.limits, np.array([row.limit for row in rows])),
            (self.least, np.array([one.min_new_tokens for one in params])),
            (self.stops, stops),
            (self.keys, np.array([row.request.key for row in rows], dtype=np.int64)),
            (self.top_k, np.array([one.top_k for one in params])),
            (self.temperature, np.array([one.temperature for one in params], dtype=np.float64)),
            (self.top_p, np.array([one.top_p for one in params], dtype=np.float64)),
            (self.min_p, np.array([one.min_p for one in params], dtype=np.float64)),
            (self.logprobs, np.zeros(len(rows))),
            (self.ended, np.zeros(len(rows), dtype=np.bool_)),
        ):
            target.index_copy_(0, index, upload(values, device))

    def take(self, slots: Tensor, logits: Tensor, tail: Tail) -> None:
        """Draw the next token of lanes [B] whose rows have not ended, from logits [B, V], and note what ends."""
        at_once = len(slots) if tail.plain else max(1, DRAWN_NUMBERS // logits.shape[1])
        parts = [self._next(*part, tail) for part in zip(slots.split(at_once), logits.split(at_once), strict=True)]
        tokens, told = parts[0] if len(parts) == 1 else (torch.cat(one) for one in zip(*parts, strict=True))
        self.operations.finish(slots, tokens, told if tail.logprobs else None, self)

    def _next(self, slots: Tensor, logits: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
        """The tokens [B] that come next, and their log-probabilities [B] where they are asked for."""
        adjusted = wide = logits if tail.plain else logits.float()
        if tail.barred:
            counts, stops = self.counts[slots], self.stops[slots]
            early = (counts < self.least[slots])[:, None] & (stops >= 0) & (stops < wide.shape[1])
            nowhere = torch.where(early, stops, stops.new_full((), wide.shape[1]))
            padded = torch.cat((wide, wide.new_zeros(len(wide), 1)), dim=1)
            adjusted = padded.scatter(1, nowhere, -torch.inf)[:, :-1]
        tokens = adjusted.argmax(dim=-1)
        if tail.drawn:
            temperature = self.temperature[slots]
            hot = temperature > 0
            scaled = adjusted / torch.where(hot, temperature, 1.0).float()[:, None]
            numbers = self.keys[slots], self.counts[slots]
            free = draw(scaled.double().softmax(dim=-1), *numbers)
            if tail.narrowed:
                top_k, top_p, min_p = self.top_k[slots], self.top_p[slots], self.min_p[slots]
                narrowed = draw(narrow(scaled, top_k, top_p, min_p), *numbers)
                free = torch.where((top_k > 0) | (top_p < 1) | (min_p > 0), narrowed, free)
            tokens = torch.where(hot, free, tokens)
        if not tail.logprobs:
            return tokens, tokens
        return tokens, wide.gather(1, tokens[:, None])[:, 0] - wide.logsumexp(dim=-1)
