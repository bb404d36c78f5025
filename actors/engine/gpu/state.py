"""State of the rows in flight on the GPU, and the end of a step: logits -> tokens, and whether they end a row.

All shapes are fixed and nothing is read back, so that a CUDA graph can hold it; the host reads which rows have
ended some steps later. Tokens are sampled as in `sampling`, with each row's own key and number of tokens.
Shapes: R rows, B lanes, V vocabulary size, S most stop tokens of a row, M most new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.engine.gpu import reference
from actors.engine.gpu.operations import Operations
from actors.engine.gpu.pages import upload
from actors.engine.row import Row
from actors.engine.sampling import uniforms


def samples_on_device(row: Row, state: DeviceRows) -> bool:
    """Whether the GPU alone can sample the row and see it end."""
    request = row.request
    needs_host = request.constraint or request.ending or request.sampling.logprobs is not None or row.sampling.penalized
    return not needs_host and len(row.stop_ids) <= state.stops.shape[1]


@dataclass(frozen=True)
class SamplingVariant:
    """Operations at the end of a step that the rows in flight need; each variant has CUDA graphs of its own.

    Args:
        random: A row has a temperature.
        narrowed: A row with a temperature has top-k, top-p or min-p.
        barred: A row has a least number of new tokens, before which its stop tokens are barred.
        logprobs: Log-probabilities are summed.
    """

    random: bool
    narrowed: bool
    barred: bool
    logprobs: bool

    @property
    def plain(self) -> bool:
        """Whether the step ends with an argmax alone."""
        return not (self.barred or self.random or self.logprobs)

    @classmethod
    def of(cls, rows: Sequence[Row], logprobs: bool) -> SamplingVariant:
        """The variant of rows that are sampled on the GPU."""
        return cls(
            any(row.request.sampling.temperature > 0 for row in rows),
            any(row.sampling.narrowed and row.request.sampling.temperature > 0 for row in rows),
            any(row.request.sampling.min_new_tokens > 0 for row in rows),
            logprobs,
        )


class DeviceRows:
    """State of R slots, one a row, and of slot R, which holds a row that has ended: padding lanes point to it."""

    def __init__(
        self, rows: int, max_new_tokens: int, stop_tokens: int, device: torch.device, operations: Operations = reference
    ) -> None:
        """operations: `kernels`, or `reference` where there is no Triton."""

        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows + 1, *shape, dtype=dtype, device=device)

        self.rows, self.operations = rows, operations
        self.last = numbers()  # the token that is the next input
        self.positions = numbers()  # its position in prompt and answer
        self.generated = numbers()  # its position t in the answer
        self.counts = numbers()  # tokens generated
        self.limits, self.least = numbers(), numbers()
        self.stops = numbers(max(1, stop_tokens)) - 1
        self.keys, self.top_k = numbers(), numbers()
        self.temperature, self.top_p, self.min_p = (numbers(dtype=torch.float64) for _ in range(3))
        self.tokens = numbers(max_new_tokens)
        self.logprobs = numbers(dtype=torch.float64)
        self.ended = torch.ones(rows + 1, dtype=torch.bool, device=device)

    def begin(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Write the state of rows before their first token into their slots."""
        device = self.last.device
        index = upload(slots, device)
        params = [row.request.sampling for row in rows]
        lengths = [len(row.request.prompt_ids) for row in rows]
        stops = np.full((len(rows), self.stops.shape[1]), -1)
        for index_in_rows, row in enumerate(rows):
            ids = sorted(row.stop_ids)[: stops.shape[1]]  # a row with more of them is sampled by the host
            stops[index_in_rows, : len(ids)] = ids
        for target, values in (
            (self.positions, np.array(lengths) - 1),
            (self.generated, np.full(len(rows), -1)),
            (self.counts, np.zeros(len(rows), dtype=np.int64)),
            (self.limits, np.array([row.limit for row in rows])),
            (self.least, np.array([param.min_new_tokens for param in params])),
            (self.stops, stops),
            (self.keys, np.array([row.request.key for row in rows], dtype=np.int64)),
            (self.top_k, np.array([param.top_k for param in params])),
            (self.temperature, np.array([param.temperature for param in params], dtype=np.float64)),
            (self.top_p, np.array([param.top_p for param in params], dtype=np.float64)),
            (self.min_p, np.array([param.min_p for param in params], dtype=np.float64)),
            (self.logprobs, np.zeros(len(rows))),
            (self.ended, np.zeros(len(rows), dtype=np.bool_)),
        ):
            target.index_copy_(0, index, upload(values, device))

    def sample(self, slots: Tensor, logits: Tensor, variant: SamplingVariant) -> None:
        """Sample from logits [B, V] the next token of lanes whose rows have not ended, and record which rows end.

        slots: int64 [B], of the lanes.
        """
        if variant.plain:
            self.operations.finish(slots, logits.argmax(dim=-1), None, self)
            return
        adjusted = logits
        if variant.barred:
            counts, stops = self.counts[slots], self.stops[slots]
            early = (counts < self.least[slots])[:, None] & (stops >= 0) & (stops < logits.shape[1])
            values = torch.where(early, -torch.inf, torch.inf).to(logits.dtype)
            adjusted = logits.scatter_reduce(1, torch.where(early, stops, 0), values, "amin")
        numbers = uniforms(self.keys[slots], self.counts[slots]) if variant.random else None
        tokens, logprobs = self.operations.sample(
            logits, adjusted, slots, numbers, self, narrowed=variant.narrowed, logprobs=variant.logprobs
        )
        self.operations.finish(slots, tokens, logprobs, self)
