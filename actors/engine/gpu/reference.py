"""The operations of `Operations` in plain torch, for devices without Triton; the tests hold the kernels against them.

Shapes as in `operations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from actors.engine.checkpoint.compressed import LIMITS
from actors.engine.checkpoint.layer_weights import NormWeights
from actors.engine.gpu.operations import LEAST_ROUNDED, Lanes, LayerPages, Rotary, StepTables
from actors.engine.gpu.splits import Splits
from actors.engine.sampling.sampler import draw, narrow
from actors.engine.working_memory import DRAWN_NUMBERS

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows


def begin(lanes: Lanes, rows: DeviceRows, tables: StepTables, hidden: Tensor) -> None:
    """Implements `Operations.begin`."""
    slots, longest = lanes.slots, tables.longest
    positions = rows.positions[slots]
    inside = positions.clamp(max=longest - 1)  # rows that have ended may lie behind
    generated = rows.generated[slots].clamp(0, len(tables.depths) - 1)
    lanes.positions.copy_(positions)
    lanes.depths.copy_(torch.where(rows.ended[slots], 0, tables.depths[generated]))
    if lanes.rotary is not None and tables.rotary is not None:
        for target, table in zip(lanes.rotary, tables.rotary, strict=True):
            target.copy_(table[inside])
    if tables.token_embeddings is not None:
        embedded = tables.token_embeddings[rows.last[slots]]
        learned = tables.position_embeddings
        hidden.copy_(embedded if learned is None else embedded + learned[inside])


def finish(slots: Tensor, tokens: Tensor, logprobs: Tensor | None, rows: DeviceRows) -> None:
    """Implements `Operations.finish`."""
    live, counts = ~rows.ended[slots], rows.counts[slots]
    if logprobs is not None:
        rows.logprobs.index_copy_(0, slots, rows.logprobs[slots] + torch.where(live, logprobs, 0.0))
    at = counts.clamp(max=rows.tokens.shape[1] - 1)
    rows.tokens[slots, at] = torch.where(live, tokens, rows.tokens[slots, at])
    counts = counts + live
    stops, least = rows.stops[slots], rows.least[slots]
    ends = ((tokens[:, None] == stops).any(dim=1) & (counts >= least)) | (counts >= rows.limits[slots])
    for target, values in (
        (rows.last, torch.where(live, tokens, rows.last[slots])),
        (rows.counts, counts),
        (rows.positions, rows.positions[slots] + live),
        (rows.generated, rows.generated[slots] + live),
        (rows.ended, rows.ended[slots] | ends),
    ):
        target.index_copy_(0, slots, values)


def sample(
    logits: Tensor,
    adjusted: Tensor,
    slots: Tensor,
    uniforms: Tensor | None,
    rows: DeviceRows,
    *,
    narrowed: bool,
    logprobs: bool,
) -> tuple[Tensor, Tensor | None]:
    """Implements `Operations.sample`, in parts: float64 copies of the logits take memory."""
    many = max(1, DRAWN_NUMBERS // logits.shape[1])
    tokens, scores = [], []
    for first in range(0, len(slots), many):
        part = slice(first, first + many)
        numbers = None if uniforms is None else uniforms[part]
        tokens.append(_drawn(adjusted[part], slots[part], numbers, rows, narrowed))
        if logprobs:
            wide = logits[part].float()
            scores.append(wide.gather(1, tokens[-1][:, None])[:, 0] - wide.logsumexp(dim=-1))
    return torch.cat(tokens), torch.cat(scores) if logprobs else None


def _drawn(logits: Tensor, slots: Tensor, numbers: Tensor | None, rows: DeviceRows, narrowed: bool) -> Tensor:
    """Next tokens [N] from logits [N, V] at random numbers [N]; None: every row is greedy."""
    tokens = logits.argmax(dim=-1)
    if numbers is None:
        return tokens
    temperature = rows.temperature[slots]
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0).float()[:, None]
    free = draw(scaled.double().softmax(dim=-1), numbers)
    if narrowed:
        top_k, top_p, min_p = rows.top_k[slots], rows.top_p[slots], rows.min_p[slots]
        few = draw(narrow(scaled, top_k, top_p, min_p), numbers)
        free = torch.where((top_k > 0) | (top_p < 1) | (min_p > 0), few, free)
    return torch.where(temperature > 0, free, tokens)


def norm(hidden: Tensor, weights: NormWeights) -> Tensor:
    """Implements `Operations.norm`."""
    if weights.bias is not None:
        return functional.layer_norm(hidden, hidden.shape[-1:], weights.weight, weights.bias, weights.eps)
    wide = hidden.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + weights.eps)
    return weights.weight * scaled.to(hidden.dtype)


def norm_heads(states: Tensor, query_heads: int, query_norm: NormWeights, key_norm: NormWeights) -> None:
    """Implements `Operations.norm_heads`."""
    kv_heads = (states.shape[1] - query_heads) // 2
    first = 0
    for weights, heads in ((query_norm, query_heads), (key_norm, kv_heads)):
        groups = states[:, first : first + heads].reshape(-1, len(weights.weight))
        states[:, first : first + heads] = norm(groups, weights).view(len(states), heads, -1)
        first += heads


def add(hidden: Tensor, change: Tensor, lanes: Lanes, rank: int) -> None:
    """Implements `Operations.add`."""
    hidden += torch.where((lanes.depths > rank)[:, None], change, torch.zeros_like(change))


def add_norm(hidden: Tensor, change: Tensor, lanes: Lanes, rank: int, weights: NormWeights) -> Tensor:
    """Implements `Operations.add_norm`."""
    add(hidden, change, lanes, rank)
    return norm(hidden, weights)


def gate(wide: Tensor) -> Tensor:
    """Implements `Operations.gate`."""
    gates, up = wide.chunk(2, dim=-1)
    return functional.silu(gates) * up


def round_rows(hidden: Tensor, dtype: torch.dtype, least_rows: int) -> tuple[Tensor, Tensor]:
    """Implements `Operations.round_rows`."""
    limit = LIMITS["int8" if dtype == torch.int8 else "fp8"]
    wide = hidden.float()
    highest = wide.abs().amax(dim=1, keepdim=True)
    scaled = wide * torch.where(highest > LEAST_ROUNDED, limit / highest, 0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    scaled = torch.where(highest.isfinite(), scaled, 0.0).clamp(-limit, limit)
    codes = functional.pad(scaled, (0, 0, 0, max(0, least_rows - len(scaled)))).to(dtype)
    return codes, torch.where(highest.isfinite(), highest / limit, torch.nan)[:, 0]


def scale_sums(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, relu: bool
) -> Tensor:
    """Implements `Operations.scale_sums`."""
    scaled = sums[: len(row_scales)].float() * (row_scales[:, None] * scales)
    if bias is not None:
        scaled = scaled + bias.float()
    return (scaled.relu() if relu else scaled).to(dtype)


def rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rope as in transformers: states [B, heads, D], cosines and sines [B, R] of the first R numbers of a head."""
    size = cosines.shape[-1]
    first, second = states[..., :size].chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    done = states[..., :size] * cosines[:, None] + swapped * sines[:, None]
    return done if size == states.shape[-1] else torch.cat((done, states[..., size:]), dim=-1)


def append(
    states: Tensor,
    query_heads: int,
    rotary: Rotary,
    pages: LayerPages | None,
    lanes: Lanes,
    rank: int,
    dense: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Implements `Operations.append`."""
    kv_heads = (states.shape[1] - query_heads) // 2
    if rotary is not None:
        rotated_states = rotated(states[:, : query_heads + kv_heads], *rotary)
        states = torch.cat((rotated_states, states[:, query_heads + kv_heads :]), dim=1)
    keys, values = states[:, query_heads : query_heads + kv_heads], states[:, query_heads + kv_heads :]
    if pages is not None:
        own = pages.table[lanes.slots, lanes.positions // pages.keys.shape[2]].long()
        own = torch.where(lanes.depths > rank, own, torch.zeros_like(own))  # page 0 belongs to no row
        pages.write(own, lanes.positions, keys, values, round_rows)
    if dense is not None:
        dense[0].copy_(keys)
        dense[1].copy_(values)
    return states[:, :query_heads]


def attend(
    queries: Tensor, pages: LayerPages, lanes: Lanes, rank: int, scaling: float, splits: Splits | None = None
) -> Tensor:
    """Implements `Operations.attend`; it ignores `splits`."""
    kv_heads, page_tokens = pages.keys.shape[1:3]
    positions, runs = lanes.positions, (lanes.depths > rank)[:, None, None, None]
    width = int(positions.max()) // page_tokens + 1
    own = pages.table[lanes.slots, :width].long()

    visible = torch.arange(width * page_tokens, device=positions.device) <= positions[:, None]
    mask = (visible[:, None, None] & runs) | ~runs  # a softmax over no key is NaN
    groups = queries.shape[1] // kv_heads
    read = pages.read(own, queries.dtype)
    key, value = (
        one.transpose(1, 2).flatten(2, 3).repeat_interleave(groups, dim=1) for one in read
    )  # [B, Q, width T, D]
    query = queries[:, :, None]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)[:, :, 0]
