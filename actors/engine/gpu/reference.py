"""What the kernels of `kernels` compute, in plain torch: the oracle that they are held against, and the path of a
device without Triton.

Shapes: B lanes (one token each), Q query heads, H key/value heads, D head size, T tokens of a page, W pages of the
longest row, F feed-forward size. A lane whose depth is at most a layer's rank does not run it: nothing of it is written
and what is returned for it means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows


@dataclass(frozen=True)
class Tables:
    """What a lane begins with, by its position or its token. depths: int32 [M]. longest: places that there are.

    tokens, places: [V, E] and [longest, E], whose sum is hidden; None: as `Family.embeddings` says. turns: cosines and
    sines [longest, D].
    """

    depths: Tensor
    longest: int
    tokens: Tensor | None
    places: Tensor | None
    turns: tuple[Tensor, Tensor] | None


def norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[B, E] -> [B, E]: LayerNorm with a bias, RMSNorm without, both in float32 inside."""
    if bias is not None:
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


def begin(
    slots: Tensor,
    rows: DeviceRows,
    tables: Tables,
    places: Tensor,
    depths: Tensor,
    hidden: Tensor,
    turns: tuple[Tensor, Tensor] | None,
) -> None:
    """What a step's lanes begin with, by their rows `slots` [B]: the places [B] of their tokens; depths [B], 0 for one
    that has ended; cosines and sines, turns [B, D]; and hidden [B, E] if there are tables of it. All are written."""
    at, last = rows.places[slots], tables.longest - 1
    positions = rows.positions[slots].clamp(0, len(tables.depths) - 1)
    places.copy_(at)
    depths.copy_(torch.where(rows.ended[slots], 0, tables.depths[positions]))
    if turns is not None and tables.turns is not None:
        for target, table in zip(turns, tables.turns, strict=True):
            target.copy_(table[at.clamp(max=last)])
    if tables.tokens is not None:
        embedded = tables.tokens[rows.last[slots]]
        hidden.copy_(embedded if tables.places is None else embedded + tables.places[at.clamp(max=last)])


def finish(slots: Tensor, tokens: Tensor, told: Tensor | None, rows: DeviceRows) -> None:
    """Note the tokens [B] that lanes have drawn, and their log-probabilities, in their rows `slots` [B], and which rows
    end by them; those that have ended stay as they are."""
    live, counts = ~rows.ended[slots], rows.counts[slots]
    if told is not None:
        rows.logprobs.index_copy_(0, slots, rows.logprobs[slots] + torch.where(live, told, 0.0))
    at = counts.clamp(max=rows.tokens.shape[1] - 1)
    rows.tokens[slots, at] = torch.where(live, tokens, rows.tokens[slots, at])
    counts = counts + live
    stops, least = rows.stops[slots], rows.least[slots]
    ends = ((tokens[:, None] == stops).any(dim=1) & (counts >= least)) | (counts >= rows.limits[slots])
    for target, values in (
        (rows.last, torch.where(live, tokens, rows.last[slots])),
        (rows.counts, counts),
        (rows.places, rows.places[slots] + live),
        (rows.positions, rows.positions[slots] + live),
        (rows.ended, rows.ended[slots] | ends),
    ):
        target.index_copy_(0, slots, values)


def add(hidden: Tensor, change: Tensor, depths: Tensor, rank: int) -> None:
    """hidden [B, E] += change [B, E], where a lane's depth [B] is above rank."""
    hidden += torch.where((depths > rank)[:, None], change, torch.zeros_like(change))


def add_norm(
    hidden: Tensor, change: Tensor, depths: Tensor, rank: int, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """`add`, then `norm` of what has come of it [B, E]."""
    add(hidden, change, depths, rank)
    return norm(hidden, weight, bias, eps)


def gate(wide: Tensor) -> Tensor:
    """[B, 2 F], gate before up -> silu(gate) * up [B, F]."""
    gates, up = wide.chunk(2, dim=-1)
    return functional.silu(gates) * up


def norm_heads(states: Tensor, query_heads: int, query_weight: Tensor, key_weight: Tensor, eps: float) -> None:
    """RMSNorm of queries and keys in place; states [B, Q + 2 H, D], contiguous.

    query_weight, key_weight: [D] for the norm of each head, [Q D] and [H D] for that of all heads together.
    """
    kv_heads = (states.shape[1] - query_heads) // 2
    first = 0
    for weight, heads in ((query_weight, query_heads), (key_weight, kv_heads)):
        group = states[:, first : first + heads].reshape(-1, len(weight))
        states[:, first : first + heads] = norm(group, weight, None, eps).view(len(states), heads, -1)
        first += heads


def rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rope as in transformers: states [B, heads, D], cosines and sines [B, R] of the first R numbers of a head."""
    size = cosines.shape[-1]
    first, second = states[..., :size].chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    done = states[..., :size] * cosines[:, None] + swapped * sines[:, None]
    return done if size == states.shape[-1] else torch.cat((done, states[..., size:]), dim=-1)


def append(
    states: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    query_heads: int,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    places: Tensor,
    depths: Tensor,
    rank: int,
) -> Tensor:
    """Turn queries and keys, put keys and values into their pages; returns queries [B, Q, D].

    states: [B, Q + 2 H, D]. rotary: cosines and sines [B, D]. keys, values: the pool [pages, H, T, D]. table: int32
    [slots, W], the layer's own. slots, places: int64 [B], whose row a lane is and the token's place in it.
    """
    kv_heads = keys.shape[1]
    if rotary is not None:
        turned = rotated(states[:, : query_heads + kv_heads], *rotary)
        states = torch.cat((turned, states[:, query_heads + kv_heads :]), dim=1)
    page_tokens = keys.shape[2]
    pages = table[slots, places // page_tokens].long()
    runs = depths > rank
    pages = torch.where(runs, pages, torch.zeros_like(pages))  # page 0 is nobody's
    keys[pages, :, places % page_tokens] = states[:, query_heads : query_heads + kv_heads]
    values[pages, :, places % page_tokens] = states[:, query_heads + kv_heads :]
    return states[:, :query_heads]


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    places: Tensor,
    depths: Tensor,
    rank: int,
    scaling: float,
    splits: int = 1,
) -> Tensor:
    """queries [B, Q, D] over the tokens at places 0 ... `places` of their rows -> [B, Q, D].

    splits: of a row's tokens among programs; of no meaning here.
    """
    kv_heads, page_tokens = keys.shape[1:3]
    width = int(places.max()) // page_tokens + 1
    pages = table[slots, :width].long()

    def gathered(pool: Tensor) -> Tensor:
        """[B, H, width T, D]"""
        return pool[pages].transpose(1, 2).flatten(2, 3)

    seen = torch.arange(width * page_tokens, device=places.device) <= places[:, None]
    mask = seen[:, None, None] & (depths > rank)[:, None, None, None]
    mask |= (depths <= rank)[:, None, None, None]  # a softmax over nothing is no number
    groups = queries.shape[1] // kv_heads
    key, value = (gathered(pool).repeat_interleave(groups, dim=1) for pool in (keys, values))
    query = queries[:, :, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)[:, :, 0]
