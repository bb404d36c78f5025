"""The operations of a decode step that exist twice: as Triton `kernels`, and in plain torch as their `reference`.

Shapes: B lanes (one token each), Q query heads, H key/value heads, D head size, R rotary size, T tokens of a page, W
pages of the longest row, E hidden size, F feed-forward size, I inputs and O outputs of a product, V vocabulary size, M
positions of the longest row. A layer of rank r runs for a lane whose depth is above r: for other lanes nothing is
written, and what is returned for them has no meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from actors.engine.checkpoint.layer_weights import NormWeights
from actors.engine.gpu.splits import Splits

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows

LEAST_ROUNDED = 2.0**-100  # of `round_rows`: the inverse of a smaller scale may not be finite
Rotary = tuple[Tensor, Tensor] | None  # cosines and sines
RoundRows = Callable[[Tensor, torch.dtype, int], tuple[Tensor, Tensor]]  # `Operations.round_rows`


@dataclass(frozen=True)
class Lanes:
    """The youngest B lanes of a step, or B tokens of prompts.

    Args:
        slots: int64 [B], the row of each lane, as its index in the device's state.
        positions: int64 [B], the position of the lane's token in its row.
        depths: int32 [B], how many layers run for the lane; 0 for a row that has ended.
        rotary: cosines and sines [B, R], or None.
    """

    slots: Tensor
    positions: Tensor
    depths: Tensor
    rotary: Rotary

    def youngest(self, count: int) -> Lanes:
        """The last `count` lanes."""
        return self.at(slice(-count, None))

    def at(self, part: slice) -> Lanes:
        """Some lanes in a row."""
        rotary = None if self.rotary is None else (self.rotary[0][part], self.rotary[1][part])
        return Lanes(self.slots[part], self.positions[part], self.depths[part], rotary)


@dataclass(frozen=True)
class LayerPages:
    """One layer's keys and values: the pool [pages, H, T, D] that all layers share, and the layer's page table, int32
    [slots, W].

    Args:
        keys, values: Of a token: numbers in the model's dtype; or, of int8 or float8_e4m3fn, codes.
        table: Of the layer.
        scales: Of the codes of keys and of values, float32 [pages, H, T]; None: there are no codes. A number is its
            code times the scale of its token and head, by `round_rows`; a head with a number that is not finite is NaN.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    scales: tuple[Tensor, Tensor] | None = None

    def write(self, pages: Tensor, positions: Tensor, keys: Tensor, values: Tensor, round_rows: RoundRows) -> None:
        """Keys and values [N, H, D] of N tokens, each into its page of pages, int64 [N], at its position in its row."""
        places = positions % self.keys.shape[2]
        for number, (pool, new) in enumerate(((self.keys, keys), (self.values, values))):
            if self.scales is None:
                pool[pages, :, places] = new
                continue
            codes, scales = round_rows(new.reshape(-1, new.shape[-1]), pool.dtype, 0)
            self.scales[number][pages, :, places] = scales.view(new.shape[:-1])
            pool.view(torch.uint8)[pages, :, places] = codes.view(torch.uint8).view(new.shape)

    def read(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [..., H, T, D] of pages, int64 [...], in `dtype`."""
        if self.scales is None:
            return self.keys[pages], self.values[pages]
        keys, values = (
            (pool.view(torch.uint8)[pages].view(pool.dtype).float() * scales[pages][..., None]).to(dtype)
            for pool, scales in zip((self.keys, self.values), self.scales, strict=True)
        )
        return keys, values


@dataclass(frozen=True)
class StepTables:
    """Tables from which a lane's inputs are read.

    Args:
        depths: int32 by generated position: how many layers run.
        longest: M.
        token_embeddings: [V, E], or None: `Family.embed` computes the hidden states.
        position_embeddings: [M, E], added to those of the tokens; or None.
        rotary: cosines and sines [M, R], or None.
    """

    depths: Tensor
    longest: int
    token_embeddings: Tensor | None
    position_embeddings: Tensor | None
    rotary: Rotary


class Operations(Protocol):
    """`kernels`, or `reference` where there is no Triton."""

    def begin(self, lanes: Lanes, rows: DeviceRows, tables: StepTables, hidden: Tensor) -> None:
        """Write the lanes' positions, depths and rotary from their rows, and hidden [B, E] if tables have it."""
        ...

    def finish(self, slots: Tensor, tokens: Tensor, logprobs: Tensor | None, rows: DeviceRows) -> None:
        """Record the sampled tokens [B] and their log-probabilities [B] in the rows `slots` [B], and which rows end;
        rows that have ended stay unchanged."""
        ...

    def sample(
        self,
        logits: Tensor,
        adjusted: Tensor,
        slots: Tensor,
        uniforms: Tensor | None,
        rows: DeviceRows,
        *,
        narrowed: bool,
        logprobs: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Next tokens int64 [B] of the rows `slots` [B], and their log-probabilities [B], nats, if asked for.

        Args:
            logits: [B, V].
            adjusted: [B, V], -inf for barred tokens; the same tensor without any.
            slots: Of the lanes.
            uniforms: float64 [B], a random number in [0, 1) for each lane; None: every row is greedy.
            rows: Temperature, top-k, top-p and min-p of each slot.
            narrowed: Whether a row has top-k, top-p or min-p.
            logprobs: Whether log-probabilities are asked for.
        """
        ...

    def norm(self, hidden: Tensor, weights: NormWeights) -> Tensor:
        """[B, E] -> [B, E], in float32 inside."""
        ...

    def norm_heads(self, states: Tensor, query_heads: int, query_norm: NormWeights, key_norm: NormWeights) -> None:
        """RMSNorm of queries and keys in place; states [B, Q + 2 H, D], contiguous.

        query_norm, key_norm: [D] for the norm of each head, [Q D] and [H D] for that of all heads together.
        """
        ...

    def add(self, hidden: Tensor, change: Tensor, lanes: Lanes, rank: int) -> None:
        """hidden [B, E] += change [B, E] in lanes that the layer runs for."""
        ...

    def add_norm(self, hidden: Tensor, change: Tensor, lanes: Lanes, rank: int, weights: NormWeights) -> Tensor:
        """`add`, then `norm` of the sum [B, E]."""
        ...

    def gate(self, wide: Tensor) -> Tensor:
        """[B, 2 F], gate before up -> silu(gate) * up [B, F]."""
        ...

    def round_rows(self, hidden: Tensor, dtype: torch.dtype, least_rows: int) -> tuple[Tensor, Tensor]:
        """hidden [B, I] -> codes of int8 or float8_e4m3fn [max(B, least_rows), I], of which rows behind B have no
        meaning, and their scales, float32 [B]: the largest code of a row is `compressed.LIMITS`. The scale of a row
        with a number that is not finite is NaN. Numbers below 2^-100 count as 0."""
        ...

    def scale_sums(
        self, sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, relu: bool
    ) -> Tensor:
        """Sums of products of codes, int32 [at least B, O], times both scales [B] and [O], plus bias [O] -> [B, O] in
        `dtype`, with relu if asked for."""
        ...

    def append(
        self,
        states: Tensor,
        query_heads: int,
        rotary: Rotary,
        pages: LayerPages | None,
        lanes: Lanes,
        rank: int,
        dense: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Rotate queries and keys and write keys and values, or their codes, to their pages; returns queries [B, Q, D].

        Args:
            states: [B, Q + 2 H, D].
            query_heads: Q.
            rotary: Cosines and sines [B, R] of the first R numbers of a head; None: no rope.
            pages: Of the layer; None: nothing is written there.
            lanes: B of them.
            rank: Of the layer.
            dense: [B, H, D] twice, which receive the keys and values too.
        """
        ...

    def attend(
        self, queries: Tensor, pages: LayerPages, lanes: Lanes, rank: int, scaling: float, splits: Splits = ...
    ) -> Tensor:
        """queries [B, Q, D] over the keys and values up to the lanes' positions -> [B, Q, D].

        splits: how a row's tokens are divided among programs; default not at all.
        """
        ...
