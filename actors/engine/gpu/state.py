"""State of the rows in flight on the GPU, and the end of a step: logits -> tokens, and whether they end a row.

All shapes are fixed and nothing is read back, so that a CUDA graph can hold it; the host reads which rows have
ended some steps later. Tokens are sampled as in `sampling.sampler`, with each row's own key and number of tokens.
Shapes: R rows, B lanes, V vocabulary size, S most stop tokens of a row, M most new tokens, W more tokens than a row
samples between two polls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.constraints.constraint import words_of
from actors.engine.constraints.grammar import write_masks
from actors.engine.gpu import logits as plain_logits
from actors.engine.gpu import reference
from actors.engine.gpu.logits import LogitsOperations
from actors.engine.gpu.operations import Operations
from actors.engine.gpu.pages import upload
from actors.engine.gpu.recent import Recent, RecentLogprobs
from actors.engine.gpu.variant import SamplingVariant
from actors.engine.row import Row
from actors.engine.sampling.sampler import uniforms


class DeviceRows:
    """State of R slots, one a row, and of slot R, which holds a row that has ended: padding lanes point to it.

    Args:
        rows: R.
        max_new_tokens: M.
        stop_tokens: S.
        vocabulary: V.
        device: Of all tensors.
        operations: `kernels`, or `reference` where there is no Triton.
        window: W.

    Attributes:
        seen: int16 [R + 1, V], 0 for tokens without penalty, else 1 + how often the token occurs in the answer; None
            before the first row with penalties.
        masks: int32 [R + 1, words], see `constraint.Bits`; all bits are set for rows without a mask. None before the
            first row with one.
    """

    def __init__(
        self,
        rows: int,
        max_new_tokens: int,
        stop_tokens: int,
        vocabulary: int,
        device: torch.device,
        operations: Operations = reference,
        *,
        window: int = 2,
    ) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows + 1, *shape, dtype=dtype, device=device)

        self.rows, self.vocabulary, self.operations = rows, vocabulary, operations
        self.logits_operations = _logits_operations(device)
        self.last = numbers()  # the token that is the next input
        self.positions = numbers()  # its position in prompt and answer
        self.generated = numbers()  # its position t in the answer
        self.counts = numbers()  # tokens generated
        self.limits, self.least = numbers(), numbers()
        self.stops = numbers(max(1, stop_tokens)) - 1
        self.keys, self.top_k = numbers(), numbers()
        self.temperature, self.top_p, self.min_p = (numbers(dtype=torch.float64) for _ in range(3))
        self.penalties = numbers(3, dtype=torch.float32)  # repetition, presence, frequency
        self.tokens = numbers(max_new_tokens)
        self.logprobs = numbers(dtype=torch.float64)
        self.ended = torch.ones(rows + 1, dtype=torch.bool, device=device)
        self.recent_logprobs = RecentLogprobs(rows, window, vocabulary, device)
        self._window = torch.arange(-window, 0, device=device)
        self.seen: Tensor | None = None
        self.masks: Tensor | None = None

    def is_masked(self, row: Row) -> bool:
        """Whether the host must say before each token of the row which ones are allowed."""
        many_barred = len(row.stop_ids) > self.stops.shape[1] and row.request.sampling.min_new_tokens > 0
        return row.progress is not None or many_barred

    def is_watched(self, row: Row) -> bool:
        """Whether the host must see each token of the row, with its log-probabilities."""
        request = row.request
        ends_unseen = row.progress is not None or request.ending is not None or len(row.stop_ids) > self.stops.shape[1]
        return ends_unseen or request.sampling.logprobs is not None

    def variant(self, rows: Sequence[Row], logprobs: bool) -> SamplingVariant:
        """The variant of a step of these rows. logprobs: whether completions carry their log-probability."""
        params = [row.request.sampling for row in rows]
        masked = any(self.is_masked(row) for row in rows)
        return SamplingVariant(
            random=any(param.temperature > 0 for param in params),
            narrowed=any(row.sampling.narrowed and row.request.sampling.temperature > 0 for row in rows),
            barred=any(param.min_new_tokens > 0 for param in params),
            penalized=any(row.sampling.penalized for row in rows),
            masked=masked,
            logprobs=logprobs or masked or any(param.logprobs is not None for param in params),
            watched=any(self.is_watched(row) for row in rows),
            top=any(param.logprobs for param in params),
        )

    def begin(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Write the state of rows before their first token into their slots."""
        device = self.last.device
        index = upload(slots, device)
        params = [row.request.sampling for row in rows]
        lengths = [len(row.request.prompt_ids) for row in rows]
        stops = np.full((len(rows), self.stops.shape[1]), -1)
        for index_in_rows, row in enumerate(rows):
            if row.progress is None:  # a constraint alone ends its row
                ids = sorted(row.stop_ids)[: stops.shape[1]]  # a row with more of them is watched
                stops[index_in_rows, : len(ids)] = ids
        penalties = [(param.repetition_penalty, param.presence_penalty, param.frequency_penalty) for param in params]
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
            (self.penalties, np.array(penalties, dtype=np.float32)),
            (self.logprobs, np.zeros(len(rows))),
            (self.ended, np.zeros(len(rows), dtype=np.bool_)),
        ):
            target.index_copy_(0, index, upload(values, device))
        self._begin_penalties(slots, rows)
        if self.masks is None and any(self.is_masked(row) for row in rows):
            self.masks = self.last.new_full((self.rows + 1, words_of(self.vocabulary)), -1, dtype=torch.int32)
        elif self.masks is not None:
            self.masks.index_fill_(0, index, -1)

    def _begin_penalties(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Count the prompts' tokens of rows with penalties."""
        penalized = [(slot, row) for slot, row in zip(slots, rows, strict=True) if row.sampling.penalized]
        if not penalized:
            return
        if self.seen is None:
            self.seen = self.last.new_zeros(self.rows + 1, self.vocabulary, dtype=torch.int16)
        device = self.last.device
        self.seen.index_fill_(0, upload([slot for slot, _ in penalized], device), 0)
        counts = [len(row.sampling.counts.tokens) for _, row in penalized]
        if any(counts):
            owners = np.repeat([slot for slot, _ in penalized], counts)
            tokens = np.array(list(chain.from_iterable(row.sampling.counts.tokens for _, row in penalized)))
            self.seen.index_put_((upload(owners, device), upload(tokens, device)), self.seen.new_ones(()))

    def set_masks(self, slots: Sequence[int], rows: Sequence[Row]) -> None:
        """Write which tokens may come next in rows that are masked and have not ended. slots: of the rows."""
        both = zip(slots, rows, strict=True)
        masked = [(slot, row) for slot, row in both if row.finish is None and self.is_masked(row)]
        if not masked:
            return
        assert self.masks is not None
        bits = np.full((len(masked), self.masks.shape[1]), -1, dtype=np.int32)
        bound = [
            (place, row.sampling.allowed) for place, (_, row) in enumerate(masked) if row.sampling.allowed is not None
        ]
        if bound:
            of_bound = np.empty((len(bound), bits.shape[1]), dtype=np.int32)
            write_masks([allowed for _, allowed in bound], of_bound)
            bits[[place for place, _ in bound]] = of_bound
        for mask, (_, row) in zip(bits, masked, strict=True):
            _clear(mask, row.sampling.barred)
        device = self.masks.device
        self.masks.index_copy_(0, upload([slot for slot, _ in masked], device), upload(bits, device))

    def sample(self, slots: Tensor, logits: Tensor, variant: SamplingVariant) -> None:
        """Sample from logits [B, V] the next token of lanes whose rows have not ended, and record which rows end.

        slots: int64 [B], of the lanes.
        """
        if variant.plain:
            self.operations.finish(slots, logits.argmax(dim=-1), None, self)
            return
        adjusted = logits
        if variant.changes_logits:
            adjusted = self.logits_operations.adjust(
                logits,
                slots,
                self,
                penalized=variant.penalized,
                barred=variant.barred,
                masked=variant.masked,
            )
        counts = self.counts[slots] if variant.random or variant.watched else None
        numbers = uniforms(self.keys[slots], counts) if variant.random and counts is not None else None
        tokens, logprobs = self.operations.sample(
            logits, adjusted, slots, numbers, self, narrowed=variant.narrowed, logprobs=variant.logprobs
        )
        if variant.watched and logprobs is not None and counts is not None:
            of_masked = None
            if variant.masked:
                of_masked = self.logits_operations.masked_logprobs(logits, slots, tokens, self)
            places = self.recent_logprobs.places(slots, counts)
            self.recent_logprobs.write(places, logprobs, of_masked)
            if variant.top:
                self.recent_logprobs.write_top(places, logits, tokens, logprobs)
        self.operations.finish(slots, tokens, logprobs, self)

    def recent(self, slots: Sequence[int], *, top: bool) -> Recent:
        """The last W tokens of these slots. top: whether with the likeliest tokens at each place."""
        index = upload(slots, self.last.device)[:, None]
        columns = self.counts[index] + self._window
        tokens = self.tokens[index, columns.clamp(0, self.tokens.shape[1] - 1)]
        logprobs, places = self.recent_logprobs, columns % len(self._window)
        return Recent(tokens, logprobs.values[index, places], logprobs.ids[index, places] if top else None)

    def tokens_of(self, slots: Sequence[int]) -> list[list[int]]:
        """All tokens so far of these slots; waits for the GPU."""
        counts = self.counts.tolist()
        tokens = self.tokens[:, : max(counts[slot] for slot in slots)].tolist()
        return [tokens[slot][: counts[slot]] for slot in slots]


def _logits_operations(device: torch.device) -> LogitsOperations:
    if device.type != "cuda":
        return plain_logits
    from actors.engine.gpu.kernels import logits

    return logits


def _clear(mask: NDArray[np.int32], tokens: Collection[int]) -> None:
    """Clear the bits of tokens."""
    for token in tokens:
        mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
