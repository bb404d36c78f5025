"""A prefill pass: prompts concatenated without padding, their attention, and the pages of their keys and values.

A pass holds several whole prompts, or one long prompt in chunks: activations exist for a chunk at a time. Rows in
flight may ride along: each makes one decode step in the pass, whose products read the weights once for both.
Shapes: P prompts, N tokens of all of them, M of a chunk, B riding lanes, Q query heads, H key/value heads, D head size,
C tokens of a prefix, E hidden size, L layers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.gpu.operations import Lanes, LayerPages, Operations
from actors.engine.gpu.pages import PagedCache, shared_tokens, upload
from actors.engine.gpu.splits import Splits
from actors.engine.working_memory import CHUNK_TOKENS, KEY_TOKENS

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]
EVERY_LAYER = 2**31 - 1  # a depth above every rank
# parameters of this torch's varlen_attn
_PARAMETERS = set() if varlen_attn is None else set(inspect.signature(varlen_attn).parameters)


class PrefixKeys:
    """Keys and values [C, H, D] of a shared prefix, layer by layer, for the passes over what comes behind it."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layers: Sequence[int], row: int, tokens: int, cache: PagedCache, operations: Operations) -> None:
        """Write the first `tokens` to the pages that a row has for them in these layers."""
        copies = _Copies.of([(row, 0, tokens, 0)], cache.table.device)
        assert copies is not None
        for layer in layers:
            copies.write(cache.layer(layer), *self.layers[layer], operations)


@dataclass(frozen=True)
class _Copies:
    """Tokens that are copied to pages, int64 [tokens] each: the row, the position in it, the token's index."""

    rows: Tensor
    positions: Tensor
    index: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int, int]], device: torch.device) -> _Copies | None:
        """parts: row, first and end position, and the index of position 0 among the tokens that are copied."""
        lengths = [end - first for _, first, end, _ in parts]
        if not any(lengths):
            return None
        positions = np.concatenate([np.arange(first, end) for _, first, end, _ in parts])
        rows, zeros = (np.repeat([part[place] for part in parts], lengths) for place in (0, 3))
        return cls(*(upload(one, device) for one in (rows, positions, positions + zeros)))

    def write(self, pages: LayerPages, keys: Tensor, values: Tensor, operations: Operations) -> None:
        """keys, values: [N, H, D], of which `index` picks."""
        # in parts: many rows may share a prompt
        parts = (one.split(KEY_TOKENS) for one in (self.rows, self.positions, self.index))
        for rows, positions, index in zip(*parts, strict=True):
            numbers = pages.table[rows, positions // pages.keys.shape[2]].long()
            pages.write(numbers, positions, keys[index], values[index], operations.round_rows)


@dataclass(frozen=True)
class Chunk:
    """Tokens `first` to `end` of a pass. A token attends to the prefix and to its prompt's tokens up to itself.

    Args:
        queries: Tokens of each prompt in this chunk [P'].
        keys: Keys of each prompt [P'], of which the last ones belong to its queries.
        query_ends: int32 [P' + 1], cumulative sums of queries.
        key_ends: int32 [P' + 1], cumulative sums of keys.
        key_index: int64 [sum of keys], index of each key in prefix + pass; None for the identity.
    """

    first: int
    end: int
    queries: list[int]
    keys: list[int]
    query_ends: Tensor
    key_ends: Tensor
    key_index: Tensor | None

    @property
    def tokens(self) -> slice:
        """Its tokens in the pass."""
        return slice(self.first, self.end)


@dataclass(frozen=True)
class Riders:
    """Rows in flight that make a decode step in a prefill pass. Their tokens come before those of the prompts.

    Args:
        hidden: [B, E], embedded tokens.
        lanes: B of them, the youngest last.
        counts: [L], how many of the youngest lanes each layer runs for.
        splits: [L], see `Operations.attend`.
    """

    hidden: Tensor
    lanes: Lanes
    counts: Sequence[int]
    splits: Sequence[Splits]

    def __len__(self) -> int:
        return len(self.hidden)


class Prompts:
    """Prompts of one pass, and the rows that have them; several rows may share a prompt.

    Attributes:
        own_lanes: N lanes, one a token of the prompts.
        lanes: B + N, those of the riders first.

    Args:
        lengths: Tokens of each prompt in this pass, at least one; more than CHUNK_TOKENS only for a single prompt.
        rows: Slots of the rows.
        sources: Number of each row's prompt.
        prefix: Keys and values of the prefix of all prompts.
        before: Tokens C of the prefix.
        keep_in: Receives this pass's keys and values, for the pass over a prefix.
        riders: Rows in flight that make a step in this pass.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        sources: Sequence[int],
        device: torch.device,
        *,
        prefix: PrefixKeys | None = None,
        before: int = 0,
        keep_in: PrefixKeys | None = None,
        riders: Riders | None = None,
    ) -> None:
        assert len(lengths) == 1 or sum(lengths) <= CHUNK_TOKENS
        starts = [0, *itertools.accumulate(lengths)]
        self.prefix, self.keep_in, self.riders = prefix, keep_in, riders
        self.positions = upload(torch.cat([torch.arange(before, before + length) for length in lengths]), device)
        self.last = upload(torch.tensor(starts[1:]) - 1, device)
        self.chunks = list(_chunks(lengths, starts, before, device))
        # each prompt has one row: its tokens go to their pages as they are computed
        self.unshared = len(rows) == len(lengths) and len(set(sources)) == len(sources)
        owner = dict(zip(sources, rows, strict=True)) if self.unshared else {}
        slots = torch.cat([torch.full((length,), owner.get(prompt, 0)) for prompt, length in enumerate(lengths)])
        depths = torch.full((starts[-1],), EVERY_LAYER, dtype=torch.int32, device=device)
        self.own_lanes = self.lanes = Lanes(upload(slots, device), self.positions, depths, None)
        if riders is not None:
            self.lanes = _joined(riders.lanes, self.own_lanes)
        # tokens that `keep` writes: of the prefix those that no shared page holds, and of prompts that rows share all
        both = list(zip(rows, sources, strict=True))
        self._of_prefix = _Copies.of([(row, shared_tokens(before), before, 0) for row, _ in both], device)
        ends = [(row, before, before + lengths[source], starts[source] - before) for row, source in both]
        self._of_pass = _Copies.of([] if self.unshared else ends, device)

    def keep(self, cache: PagedCache | None, layer: int, keys: Tensor, values: Tensor, operations: Operations) -> None:
        """Write to the pages of the rows what is not written as it is computed.

        keys, values: [N, H, D] of this pass.
        """
        if self.keep_in is not None:
            self.keep_in.layers[layer] = keys, values
        if cache is None or not cache.uses[layer]:
            return
        own = cache.layer(layer)
        if self._of_prefix is not None and self.prefix is not None:
            self._of_prefix.write(own, *self.prefix.layers[layer], operations)
        if self._of_pass is not None:
            self._of_pass.write(own, keys, values, operations)

    def attend(self, layer: int, chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Causal attention of a chunk's queries [M, Q, D] over prefix and prompts -> [M, Q, D].

        keys, values: [N, H, D] of the pass, computed up to the chunk's end.
        """
        keys, values = keys[: chunk.end], values[: chunk.end]
        if self.prefix is not None:
            shared = self.prefix.layers[layer]
            keys, values = (torch.cat(pair) for pair in zip(shared, (keys, values), strict=True))
        if chunk.key_index is not None:
            keys, values = keys[chunk.key_index], values[chunk.key_index]
        if queries.device.type == "cuda" and varlen_attn is not None and queries.dtype != torch.float32:
            return _by_varlen(chunk, queries, keys, values, scaling)
        if queries.device.type == "cuda":  # grouped heads in float32 have no kernel that avoids the full score matrix
            keys, values = (_repeated(states, queries) for states in (keys, values))
        done = []
        parts = zip(queries.split(chunk.queries), keys.split(chunk.keys), values.split(chunk.keys), strict=True)
        for query, key, value in parts:
            query, key, value = (states.transpose(0, 1)[None] for states in (query, key, value))
            mask = None
            if query.shape[2] < key.shape[2]:
                mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
                mask = mask.tril(key.shape[2] - query.shape[2])
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            done.append(out[0].transpose(0, 1))
        return torch.cat(done)


def _chunks(lengths: Sequence[int], starts: Sequence[int], before: int, device: torch.device) -> Iterator[Chunk]:
    """One chunk of all prompts, or the chunks of a single prompt."""

    def chunk(first: int, end: int, queries: list[int], keys: list[int], key_index: Tensor | None) -> Chunk:
        query_ends, key_ends = (
            upload(torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32), device)
            for counts in (queries, keys)
        )
        key_index = None if key_index is None else upload(key_index, device)
        return Chunk(first, end, queries, keys, query_ends, key_ends, key_index)

    if len(lengths) > 1:
        index = torch.cat([_with_prefix(*pair, before) for pair in itertools.pairwise(starts)]) if before else None
        keys = [before + length for length in lengths]
        yield chunk(0, starts[-1], list(lengths), keys, index)
        return
    for first in range(0, lengths[0], CHUNK_TOKENS):
        end = min(lengths[0], first + CHUNK_TOKENS)
        yield chunk(first, end, [end - first], [before + end], None)


def _joined(first: Lanes, then: Lanes) -> Lanes:
    return Lanes(
        torch.cat((first.slots, then.slots)),
        torch.cat((first.positions, then.positions)),
        torch.cat((first.depths, then.depths)),
        None,
    )


def _with_prefix(first: int, end: int, before: int) -> Tensor:
    """Indices of a prefix's tokens and of a prompt's in prefix + pass."""
    return torch.cat((torch.arange(before), torch.arange(before + first, before + end)))


def _repeated(states: Tensor, queries: Tensor) -> Tensor:
    """Keys or values [N, H, D], repeated for the heads of queries [M, Q, D] that share them -> [N, Q, D]."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], dim=1)


def _by_varlen(chunk: Chunk, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """torch's attention over concatenated sequences; causal from the end of each sequence."""
    settings: dict[str, Any] = {"is_causal": True} if "is_causal" in _PARAMETERS else {"window_size": (-1, 0)}
    if "scale" in _PARAMETERS:
        settings["scale"] = scaling
    else:
        queries = queries * (scaling * queries.shape[2] ** 0.5)
    if queries.shape[1] != keys.shape[1]:
        if "enable_gqa" in _PARAMETERS:
            settings["enable_gqa"] = True
        else:
            keys, values = (_repeated(states, queries) for states in (keys, values))
    longest = max(chunk.queries), max(chunk.keys)
    out = varlen_attn(queries, keys, values, chunk.query_ends, chunk.key_ends, *longest, **settings)
    assert isinstance(out, Tensor)
    return out
