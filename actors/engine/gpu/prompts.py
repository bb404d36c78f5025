"""A pass over prompts: one behind another without padding, their attention, and where their keys and values go.

A pass is one of whole prompts together, or one long prompt in pieces: activations are there for a piece at a time.
Shapes: P prompts, N tokens of all of them, M of a piece, Q query heads, H key/value heads, D head size, C tokens of a
prefix.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.gpu.pages import PagedCache, upload
from actors.engine.working_memory import KEY_TOKENS, PIECE_TOKENS

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]
# what this torch's can be told
_TOLD = set() if varlen_attn is None else set(inspect.signature(varlen_attn).parameters)


class PrefixPages:
    """Keys and values [C, H, D] of a beginning that prompts share, layer by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Piece:
    """Tokens `first` to `end` of a pass, which are in `queries` prompts' order; each prompt's tokens see those of the
    prompt up to their own, which are the last of its `keys`, and behind the prefix.

    queries, keys: tokens of each prompt [P']. query_ends, key_ends: int32 [P' + 1], their sums. seen: of each key
    [sum of keys], where it lies in prefix + pass; None: as they lie.
    """

    first: int
    end: int
    queries: list[int]
    keys: list[int]
    query_ends: Tensor
    key_ends: Tensor
    seen: Tensor | None

    @property
    def tokens(self) -> slice:
        """Of the pass."""
        return slice(self.first, self.end)


class Prompts:
    """Prompts of one pass, and the rows that have them: several rows may share one.

    lengths: tokens of each prompt in this pass, at least one; more than PIECE_TOKENS only of one prompt alone. rows,
    sources: places of the rows, and the prompt of each. prefix, before: what lies before all prompts, and its tokens C;
    held_in: where this pass's own keys and values are kept, if it is the pass over a prefix.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        sources: Sequence[int],
        device: torch.device,
        *,
        prefix: PrefixPages | None = None,
        before: int = 0,
        held_in: PrefixPages | None = None,
    ) -> None:
        assert len(lengths) == 1 or sum(lengths) <= PIECE_TOKENS
        starts = [0, *itertools.accumulate(lengths)]
        self.prefix, self.held_in = prefix, held_in
        self.positions = upload(torch.cat([torch.arange(before, before + length) for length in lengths]), device)
        self.last = upload(torch.tensor(starts[1:]) - 1, device)
        self.pieces = list(_pieces(lengths, starts, before, device))
        # of each token that is kept, row by row: from where in prefix + pass, to which row and place
        picked, owners, places = [], [], []
        for row, source in zip(rows, sources, strict=True):
            picked.append(_with_prefix(starts[source], starts[source + 1], before))
            owners.append(torch.full((before + lengths[source],), row))
            places.append(torch.arange(before + lengths[source]))
        self._kept = len(rows) > 0
        if self._kept:
            self._picked, self._owners, self._places = (
                upload(torch.cat(one), device) for one in (picked, owners, places)
            )

    def keep(self, cache: PagedCache | None, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys and values [N, H, D] of this pass into the pages of its rows, behind those of the prefix."""
        if self.held_in is not None:
            self.held_in.layers[layer] = keys, values
        if not self._kept or cache is None or not cache.uses[layer]:
            return
        tokens = cache.keys.shape[2]
        for pool, new, number in ((cache.keys, keys, 0), (cache.values, values, 1)):
            if self.prefix is not None:
                new = torch.cat((self.prefix.layers[layer][number], new))
            # many rows may have one prompt
            parts = (one.split(KEY_TOKENS) for one in (self._owners, self._places, self._picked))
            for owners, places, picked in zip(*parts, strict=True):
                pages = cache.table[layer][owners, places // tokens].long()
                pool[pages, :, places % tokens] = new[picked]

    def attend(self, layer: int, piece: Piece, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """queries [M, Q, D] of a piece over the keys and values before them and their own -> [M, Q, D].

        keys, values: [N, H, D] of the pass, of which those up to the piece's end are there.
        """
        keys, values = keys[: piece.end], values[: piece.end]
        if self.prefix is not None:
            shared = self.prefix.layers[layer]
            keys, values = (torch.cat(pair) for pair in zip(shared, (keys, values), strict=True))
        if piece.seen is not None:
            keys, values = keys[piece.seen], values[piece.seen]
        if queries.device.type == "cuda" and varlen_attn is not None and queries.dtype != torch.float32:
            return _by_varlen(piece, queries, keys, values, scaling)
        if queries.device.type == "cuda":  # grouped heads in float32 have no kernel there that spares the scores
            keys, values = (_repeated(one, queries) for one in (keys, values))
        done = []
        parts = zip(queries.split(piece.queries), keys.split(piece.keys), values.split(piece.keys), strict=True)
        for query, key, value in parts:
            query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
            mask = None
            if query.shape[2] < key.shape[2]:
                mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
                mask = mask.tril(key.shape[2] - query.shape[2])
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            done.append(out[0].transpose(0, 1))
        return torch.cat(done)


def _pieces(lengths: Sequence[int], starts: Sequence[int], before: int, device: torch.device) -> Iterator[Piece]:
    """One of all prompts, or a prompt's own."""

    def piece(first: int, end: int, queries: list[int], keys: list[int], seen: Tensor | None) -> Piece:
        query_ends, key_ends = (
            upload(torch.tensor([0, *itertools.accumulate(one)], dtype=torch.int32), device) for one in (queries, keys)
        )
        seen = None if seen is None else upload(seen, device)
        return Piece(first, end, queries, keys, query_ends, key_ends, seen)

    if len(lengths) > 1:
        seen = [_with_prefix(*pair, before) for pair in itertools.pairwise(starts)] if before else None
        keys = [before + length for length in lengths]
        yield piece(0, starts[-1], list(lengths), keys, None if seen is None else torch.cat(seen))
        return
    for first in range(0, lengths[0], PIECE_TOKENS):
        end = min(lengths[0], first + PIECE_TOKENS)
        yield piece(first, end, [end - first], [before + end], None)


def _with_prefix(first: int, end: int, before: int) -> Tensor:
    """Where the tokens of a prefix and those of a prompt lie in prefix + pass."""
    return torch.cat((torch.arange(before), torch.arange(before + first, before + end)))


def _repeated(states: Tensor, queries: Tensor) -> Tensor:
    """Keys or values [N, H, D], each as often as heads of queries [M, Q, D] share it -> [N, Q, D]."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], dim=1)


def _by_varlen(piece: Piece, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """By torch's own attention over sequences one behind another; a query sees what lies before it from the end."""
    settings: dict[str, Any] = {"is_causal": True} if "is_causal" in _TOLD else {"window_size": (-1, 0)}
    if "scale" in _TOLD:
        settings["scale"] = scaling
    else:
        queries = queries * (scaling * queries.shape[2] ** 0.5)
    if queries.shape[1] != keys.shape[1]:
        if "enable_gqa" in _TOLD:
            settings["enable_gqa"] = True
        else:
            keys, values = (_repeated(one, queries) for one in (keys, values))
    longest = max(piece.queries), max(piece.keys)
    out = varlen_attn(queries, keys, values, piece.query_ends, piece.key_ends, *longest, **settings)
    assert isinstance(out, Tensor)
    return out
