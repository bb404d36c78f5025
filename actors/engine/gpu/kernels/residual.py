"""Norms, residuals and gates: the operations between a layer's products."""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.checkpoint.layer_weights import NormWeights
from actors.engine.gpu.kernels.compiled import check, compiled_once
from actors.engine.gpu.operations import Lanes


@compiled_once
def _norm(
    x,
    change,
    depths,
    rank,
    out,
    weight,
    bias,
    eps,
    width,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < width
    row = tl.load(x + lane * width + column, mask=inside, other=0.0)
    if ADDS:
        runs = tl.load(depths + lane) > rank
        more = tl.load(change + lane * width + column, mask=inside & runs, other=0.0)
        row = row + more
        tl.store(x + lane * width + column, row, mask=inside & runs)
    wide = row.to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0)
    if HAS_BIAS:
        centred = tl.where(inside, wide - tl.sum(wide) / width, 0.0)
        spread = tl.sum(centred * centred) / width
        shift = tl.load(bias + column, mask=inside, other=0.0)
        done = centred * tl.rsqrt(spread + eps) * scale.to(tl.float32) + shift.to(tl.float32)
        done = done.to(row.dtype)
    else:
        done = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(row.dtype) * scale
    tl.store(out + lane * width + column, done, mask=inside)


def check_norm(weights: NormWeights, dtype: torch.dtype, width: int) -> None:
    """Assert the layout of a norm's weights."""
    for numbers in (weights.weight, weights.bias):
        if numbers is not None:
            check(numbers, dtype, width)


def norm(hidden: Tensor, weights: NormWeights) -> Tensor:
    """Implements `Operations.norm`."""
    return _normed(hidden, None, None, 0, weights)


def add_norm(hidden: Tensor, change: Tensor, lanes: Lanes, rank: int, weights: NormWeights) -> Tensor:
    """Implements `Operations.add_norm`."""
    return _normed(hidden, change, lanes.depths, rank, weights)


def _normed(hidden: Tensor, change: Tensor | None, depths: Tensor | None, rank: int, weights: NormWeights) -> Tensor:
    count, width = hidden.shape
    check(hidden, hidden.dtype, count, width)
    check_norm(weights, hidden.dtype, width)
    if change is not None:
        assert depths is not None
        check(change, hidden.dtype, count, width)
        check(depths, torch.int32, count)
    output = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    _norm[(len(hidden),)](
        hidden,
        change,
        depths,
        rank,
        output,
        weights.weight,
        weights.bias,
        weights.eps,
        width,
        ADDS=change is not None,
        HAS_BIAS=weights.bias is not None,
        WIDTH=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return output


@compiled_once
def _norm_heads(
    states,
    query_weight,
    key_weight,
    eps,
    row,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    JOINED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane, group = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    if JOINED:  # group 0 is all queries, 1 all keys
        of_query = group == 0
        first = group * Q * D
        size = tl.where(of_query, Q * D, H * D)
    else:
        of_query = group < Q
        first = group * D
        size = D
    inside = column < size
    at = states + lane * row + first + column
    values = tl.load(at, mask=inside, other=0.0)
    scale = tl.load(query_weight + column, mask=inside & of_query, other=0.0)
    scale += tl.load(key_weight + column, mask=inside & (of_query == 0), other=0.0)
    wide = values.to(tl.float32)
    done = (wide * tl.rsqrt(tl.sum(wide * wide) / size + eps)).to(values.dtype) * scale
    tl.store(at, done, mask=inside)


def norm_heads(states: Tensor, query_heads: int, query_norm: NormWeights, key_norm: NormWeights) -> None:
    """Implements `Operations.norm_heads`."""
    lanes, heads, size = states.shape
    kv_heads = (heads - query_heads) // 2
    joined = len(query_norm.weight) != size
    check(states, states.dtype, lanes, query_heads + 2 * kv_heads, size)
    check_norm(query_norm, states.dtype, query_heads * size if joined else size)
    check_norm(key_norm, states.dtype, kv_heads * size if joined else size)
    assert query_norm.eps == key_norm.eps and query_norm.bias is key_norm.bias is None
    width = triton.next_power_of_2(query_heads * size if joined else size)
    _norm_heads[(lanes, 2 if joined else query_heads + kv_heads)](
        states,
        query_norm.weight,
        key_norm.weight,
        query_norm.eps,
        heads * size,
        Q=query_heads,
        H=kv_heads,
        D=size,
        JOINED=joined,
        WIDTH=width,
        num_warps=min(16, max(1, width // 512)),
    )


@compiled_once
def _add(hidden, change, depths, rank, width, WIDTH: tl.constexpr):
    lane = tl.program_id(0)
    if tl.load(depths + lane) > rank:
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = column < width
        old = tl.load(hidden + lane * width + column, mask=inside)
        new = tl.load(change + lane * width + column, mask=inside)
        tl.store(hidden + lane * width + column, old + new, mask=inside)


def add(hidden: Tensor, change: Tensor, lanes: Lanes, rank: int) -> None:
    """Implements `Operations.add`."""
    count, width = hidden.shape
    check(hidden, hidden.dtype, count, width)
    check(change, hidden.dtype, count, width)
    check(lanes.depths, torch.int32, count)
    _add[(len(hidden), triton.cdiv(width, 1024))](hidden, change, lanes.depths, rank, width, WIDTH=1024)


@compiled_once
def _gate(wide, out, half, WIDTH: tl.constexpr):
    lane = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < half
    gates = tl.load(wide + lane * 2 * half + column, mask=inside, other=0.0)
    up = tl.load(wide + lane * 2 * half + half + column, mask=inside, other=0.0)
    exact = gates.to(tl.float32)
    opened = (exact / (1.0 + tl.exp(-exact))).to(gates.dtype)
    tl.store(out + lane * half + column, opened * up, mask=inside)


def gate(wide: Tensor) -> Tensor:
    """Implements `Operations.gate`."""
    half = wide.shape[1] // 2
    check(wide, wide.dtype, len(wide), 2 * half)
    output = wide.new_empty(len(wide), half)
    _gate[(len(wide), triton.cdiv(half, 1024))](wide, output, half, WIDTH=1024)
    return output
