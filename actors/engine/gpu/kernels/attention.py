"""Writes each lane's keys and values to its pages, and computes its attention over them.

Attention over pages in splits after Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.gpu.kernels.compiled import check_contiguous, compiled_once
from actors.engine.gpu.operations import Lanes, LayerPages, Rotary

BLOCK = 64  # tokens that a program of attention reads at once
STAGES = 3  # of these reads in progress
WARPS = 4
MATRIX_SIDE = 16  # least rows and columns of a product on tensor cores


@compiled_once
def _append(
    states,
    queries,
    cosines,
    sines,
    keys,
    values,
    table,
    slots,
    positions,
    depths,
    rank,
    table_stride,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < D
    base = states + (lane * (Q + 2 * H) + head) * D
    one = tl.load(base + column, mask=inside, other=0.0)
    if ROTARY > 0:
        if head < Q + H:
            rotates = column < ROTARY
            other = tl.load(base + (column + ROTARY // 2) % ROTARY, mask=rotates, other=0.0)
            signed = tl.where(column < ROTARY // 2, -other, other)
            cosine = tl.load(cosines + lane * ROTARY + column, mask=rotates, other=1.0)
            sine = tl.load(sines + lane * ROTARY + column, mask=rotates, other=0.0)
            one = (one * cosine).to(one.dtype) + (signed * sine).to(one.dtype)
    if head < Q:
        tl.store(queries + (lane * Q + head) * D + column, one, mask=inside)
    elif tl.load(depths + lane) > rank:
        position = tl.load(positions + lane)
        page = tl.load(table + tl.load(slots + lane) * table_stride + position // TOKENS).to(tl.int64)
        number = (head - Q) % H
        target = ((page * H + number) * TOKENS + position % TOKENS) * D + column
        if head < Q + H:
            tl.store(keys + target, one, mask=inside)
        else:
            tl.store(values + target, one, mask=inside)


def append(states: Tensor, query_heads: int, rotary: Rotary, pages: LayerPages, lanes: Lanes, rank: int) -> Tensor:
    """Implements `Operations.append`."""
    count, heads, size = states.shape
    check_contiguous(states, pages.keys, pages.values, lanes.slots, lanes.positions, lanes.depths, *(rotary or ()))
    assert pages.table.stride(1) == 1
    queries = states.new_empty(count, query_heads, size)
    cosines, sines = (states, states) if rotary is None else rotary
    _append[(count, heads)](
        states,
        queries,
        cosines,
        sines,
        pages.keys,
        pages.values,
        pages.table,
        lanes.slots,
        lanes.positions,
        lanes.depths,
        rank,
        pages.table.stride(0),
        Q=query_heads,
        H=pages.keys.shape[1],
        D=size,
        TOKENS=pages.keys.shape[2],
        ROTARY=0 if rotary is None else cosines.shape[1],
        WIDTH=triton.next_power_of_2(size),
        num_warps=1,
    )
    return queries


@compiled_once
def _attend(
    queries,
    keys,
    values,
    table,
    slots,
    positions,
    depths,
    rank,
    scaling,
    table_stride,
    out,
    heaviest,
    weights,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    lane, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(depths + lane) <= rank:
        return
    G: tl.constexpr = Q // H
    length = tl.load(positions + lane).to(tl.int32) + 1
    share = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
    first = split * share
    end = tl.minimum(first + share, length)
    row, column, token = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    inside = column < D
    query = tl.load(
        queries + (lane * Q + head * G + row[:, None]) * D + column[None, :],
        mask=(row[:, None] < G) & inside[None, :],
        other=0.0,
    )
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, WIDTH), tl.float32)
    pages = table + tl.load(slots + lane) * table_stride
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        position = start + token
        known = position < end
        page = tl.load(pages + position // TOKENS, mask=known, other=0).to(tl.int64)
        source = ((page * H + head) * TOKENS + position % TOKENS)[:, None] * D + column[None, :]
        seen = known[:, None] & inside[None, :]
        key = tl.load(keys + source, mask=seen, other=0.0)
        value = tl.load(values + source, mask=seen, other=0.0)
        if ROWS == 1:
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]
        else:
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(known[None, :], score * scaling, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if ROWS == 1:
            part = tl.sum(tl.trans(weight) * value.to(tl.float32), axis=0)[None, :]
        else:
            part = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        summed = summed * shrink[:, None] + part
        top = higher
    real = row < G
    target = (lane * Q + head * G + row) * SPLITS + split
    if SPLITS == 1:
        summed = summed / total[:, None]
    else:
        tl.store(heaviest + target, top, mask=real)
        tl.store(weights + target, total, mask=real)
    spread = target[:, None] * D + column[None, :]
    tl.store(out + spread, summed.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@compiled_once
def _combine(
    parts,
    heaviest,
    weights,
    out,
    depths,
    rank,
    Q: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane, head = tl.program_id(0), tl.program_id(1)
    if tl.load(depths + lane) <= rank:
        return
    split, column = tl.arange(0, MOST), tl.arange(0, WIDTH)
    base = (lane * Q + head) * SPLITS
    real, inside = split < SPLITS, column < D
    top = tl.load(heaviest + base + split, mask=real, other=float("-inf"))
    share = tl.exp(top - tl.max(top, axis=0))  # 0 for a split without tokens
    total = tl.sum(share * tl.load(weights + base + split, mask=real, other=0.0), axis=0)
    part = tl.load(
        parts + (base + split)[:, None] * D + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    done = tl.sum(part * share[:, None], axis=0) / total
    tl.store(out + (lane * Q + head) * D + column, done.to(out.dtype.element_ty), mask=inside)


def attend(queries: Tensor, pages: LayerPages, lanes: Lanes, rank: int, scaling: float, splits: int = 1) -> Tensor:
    """Implements `Operations.attend`."""
    count, query_heads, size = queries.shape
    check_contiguous(queries, pages.keys, pages.values, lanes.slots, lanes.positions, lanes.depths)
    assert pages.table.stride(1) == 1
    kv_heads, tokens = pages.keys.shape[1:3]
    group = query_heads // kv_heads
    rows = 1 if group == 1 else max(MATRIX_SIDE, triton.next_power_of_2(group))
    width = max(triton.next_power_of_2(size), 1 if group == 1 else MATRIX_SIDE)
    output = torch.empty_like(queries)
    heads = (count, query_heads, splits)
    parts = output if splits == 1 else queries.new_empty(*heads, size, dtype=torch.float32)
    heaviest, weights = (
        (output, output) if splits == 1 else (queries.new_empty(heads, dtype=torch.float32) for _ in range(2))
    )
    shape: dict[str, Any] = {"Q": query_heads, "D": size, "SPLITS": splits, "WIDTH": width}
    _attend[(count, kv_heads, splits)](
        queries,
        pages.keys,
        pages.values,
        pages.table,
        lanes.slots,
        lanes.positions,
        lanes.depths,
        rank,
        scaling,
        pages.table.stride(0),
        parts,
        heaviest,
        weights,
        H=kv_heads,
        TOKENS=tokens,
        ROWS=rows,
        BLOCK=BLOCK,
        STAGES=STAGES,
        num_warps=WARPS,
        **shape,
    )
    if splits > 1:
        most = triton.next_power_of_2(splits)
        _combine[(count, query_heads)](parts, heaviest, weights, output, lanes.depths, rank, MOST=most, **shape)
    return output
