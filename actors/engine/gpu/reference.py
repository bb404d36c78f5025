"""What the kernels of `kernels` compute, in plain torch: the oracle that they are held against, and the path of a
device without Triton.

Shapes: B lanes (one token each), Q query heads, H key/value heads, D head size, T tokens of a page, W pages of the
longest row, F feed-forward size. A lane whose depth is at most a layer's rank does not run it: nothing of it is written
and what is returned for it means nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """[B, E] -> [B, E]: LayerNorm with a bias, RMSNorm without, both in float32 inside."""
    if bias is not None:
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(hidden.dtype)


def add(hidden: Tensor, change: Tensor, depths: Tensor, rank: int) -> None:
    """hidden [B, E] += change [B, E], where a lane's depth [B] is above rank."""
    hidden += torch.where((depths > rank)[:, None], change, torch.zeros_like(change))


def gate(wide: Tensor) -> Tensor:
    """[B, 2 F], gate before up -> silu(gate) * up [B, F]."""
    gates, up = wide.chunk(2, dim=-1)
    return functional.silu(gates) * up


def rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """states [B, heads, D], cosines and sines [B, D] -> the states turned by halves, as in transformers."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cosines[:, None] + turned * sines[:, None]


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
