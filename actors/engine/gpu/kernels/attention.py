"""Writes each lane's keys and values, or their codes of 8 bits, to its pages, and computes its attention over them.

Attention over pages in splits after Dao et al., "Flash-Decoding for long-context inference", 2023.
"""

# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.checkpoint.compressed import LIMITS
from actors.engine.gpu.kernels.compiled import check, check_lanes, check_pages, compiled_once
from actors.engine.gpu.kernels.rounding import rounded
from actors.engine.gpu.operations import Lanes, LayerPages, Rotary
from actors.engine.gpu.splits import Splits

BLOCK = 64  # tokens that a program of attention reads at once, a multiple of a page's
STAGES = 3  # of these reads in progress
WARPS = 4
WHOLE = Splits()
MATRIX_SIDE = 16  # least rows and columns of a product on tensor cores


@compiled_once
def _append(
    states,
    queries,
    cosines,
    sines,
    keys,
    values,
    dense_keys,
    dense_values,
    key_scales,
    value_scales,
    table,
    slots,
    positions,
    depths,
    rank,
    table_stride,
    limit,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    CODES: tl.constexpr,
    WHOLE: tl.constexpr,
    ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGED: tl.constexpr,
    DENSE: tl.constexpr,
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
    else:
        number = (head - Q) % H
        if DENSE:
            place = (lane * H + number) * D + column
            if head < Q + H:
                tl.store(dense_keys + place, one, mask=inside)
            else:
                tl.store(dense_values + place, one, mask=inside)
        if PAGED:
            if tl.load(depths + lane) > rank:
                position = tl.load(positions + lane)
                page = tl.load(table + tl.load(slots + lane) * table_stride + position // TOKENS).to(tl.int64)
                token = (page * H + number) * TOKENS + position % TOKENS
                target = token * D + column
                if CODES:
                    codes, scale = rounded(one.to(tl.float32), limit, WHOLE)
                    if head < Q + H:
                        tl.store(keys + target, codes.to(keys.dtype.element_ty), mask=inside)
                        tl.store(key_scales + token, scale)
                    else:
                        tl.store(values + target, codes.to(values.dtype.element_ty), mask=inside)
                        tl.store(value_scales + token, scale)
                else:
                    if head < Q + H:
                        tl.store(keys + target, one, mask=inside)
                    else:
                        tl.store(values + target, one, mask=inside)


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
    count, heads, size = states.shape
    kv_heads = (heads - query_heads) // 2
    check(states, states.dtype, count, query_heads + 2 * kv_heads, size)
    check_lanes(lanes, count)
    if pages is not None:
        check_pages(pages, states.dtype, size)
        assert pages.keys.shape[1] == kv_heads
    for numbers in dense or ():
        check(numbers, states.dtype, count, kv_heads, size)
    for turn in rotary or ():
        check(turn, states.dtype, count, turn.shape[1])
        assert turn.shape[1] <= size and turn.shape[1] % 2 == 0
    queries = states.new_empty(count, query_heads, size)
    cosines, sines = rotary or (states, states)
    keys, values, scales, table, tokens, stride = states, states, None, lanes.depths, 1, 0
    if pages is not None:
        keys, values, scales, table, tokens = pages.keys, pages.values, pages.scales, pages.table, pages.keys.shape[2]
        stride = table.stride(0)
    key_scales, value_scales = scales or (states, states)
    whole = keys.dtype == torch.int8
    dense_keys, dense_values = dense or (states, states)
    _append[(count, heads)](
        states,
        queries,
        cosines,
        sines,
        keys,
        values,
        dense_keys,
        dense_values,
        key_scales,
        value_scales,
        table,
        lanes.slots,
        lanes.positions,
        lanes.depths,
        rank,
        stride,
        LIMITS["int8" if whole else "fp8"],
        Q=query_heads,
        H=kv_heads,
        D=size,
        TOKENS=tokens,
        PAGED=pages is not None,
        DENSE=dense is not None,
        CODES=scales is not None,
        WHOLE=whole,
        ROTARY=0 if rotary is None else cosines.shape[1],
        WIDTH=triton.next_power_of_2(size),
        num_warps=1,
    )
    return queries


@triton.jit
def _share(length, SPLITS: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens of a program, in whole blocks; see `Splits`."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK, LEAST)


@compiled_once
def _attend(
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    slots,
    positions,
    depths,
    rank,
    scaling,
    table_stride,
    out,
    parts,
    heaviest,
    weights,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    CODES: tl.constexpr,
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
    share = _share(length, SPLITS, LEAST, BLOCK)
    first = split * share
    if first >= length:
        return
    end = tl.minimum(first + share, length)
    row, column, token = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    number, place = tl.arange(0, BLOCK // TOKENS), tl.arange(0, TOKENS)
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
        known = start + token < end
        page = tl.load(pages + start // TOKENS + number, mask=start + number * TOKENS < end, other=0).to(tl.int64)
        slot = ((page * H + head) * TOKENS)[:, None] + place[None, :]
        slot = tl.reshape(slot, (BLOCK,))
        source = slot[:, None] * D + column[None, :]
        seen = known[:, None] & inside[None, :]
        key = tl.load(keys + source, mask=seen, other=0.0).to(query.dtype)  # codes are exact in 16 bits
        value = tl.load(values + source, mask=seen, other=0.0).to(query.dtype)
        if ROWS == 1:
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]
        else:
            score = tl.dot(query, tl.trans(key), input_precision="ieee")
        if CODES:  # a token's scale belongs to its whole column of scores, and to its weight
            score = score * tl.load(key_scales + slot, mask=known, other=0.0)[None, :]
        score = tl.where(known[None, :], score * scaling, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if CODES:
            weight = weight * tl.load(value_scales + slot, mask=known, other=0.0)[None, :]
        if ROWS == 1:
            part = tl.sum(tl.trans(weight) * value.to(tl.float32), axis=0)[None, :]
        else:
            part = tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        summed = summed * shrink[:, None] + part
        top = higher
    real = row < G
    target = lane * Q + head * G + row
    written = real[:, None] & inside[None, :]
    if length <= share:  # the only program of its row
        done = summed / total[:, None]
        tl.store(out + target[:, None] * D + column[None, :], done.to(out.dtype.element_ty), mask=written)
    elif SPLITS > 1:
        target = target * SPLITS + split
        tl.store(heaviest + target, top, mask=real)
        tl.store(weights + target, total, mask=real)
        tl.store(parts + target[:, None] * D + column[None, :], summed, mask=written)


@compiled_once
def _combine(
    parts,
    heaviest,
    weights,
    out,
    positions,
    depths,
    rank,
    Q: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane, head = tl.program_id(0), tl.program_id(1)
    if tl.load(depths + lane) <= rank:
        return
    length = tl.load(positions + lane).to(tl.int32) + 1
    share = _share(length, SPLITS, LEAST, BLOCK)
    if length <= share:
        return
    split, column = tl.arange(0, MOST), tl.arange(0, WIDTH)
    base = (lane * Q + head) * SPLITS
    real, inside = split < tl.cdiv(length, share), column < D
    top = tl.load(heaviest + base + split, mask=real, other=float("-inf"))
    scale = tl.exp(top - tl.max(top, axis=0))
    total = tl.sum(scale * tl.load(weights + base + split, mask=real, other=0.0), axis=0)
    part = tl.load(
        parts + (base + split)[:, None] * D + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    done = tl.sum(part * scale[:, None], axis=0) / total
    tl.store(out + (lane * Q + head) * D + column, done.to(out.dtype.element_ty), mask=inside)


def attend(
    queries: Tensor, pages: LayerPages, lanes: Lanes, rank: int, scaling: float, splits: Splits = WHOLE
) -> Tensor:
    """Implements `Operations.attend`."""
    count, query_heads, size = queries.shape
    kv_heads, tokens = pages.keys.shape[1:3]
    check(queries, queries.dtype, count, query_heads, size)
    check_pages(pages, queries.dtype, size)
    check_lanes(lanes, count)
    assert BLOCK % tokens == 0 and query_heads % kv_heads == 0
    group = query_heads // kv_heads
    rows = 1 if group == 1 else max(MATRIX_SIDE, triton.next_power_of_2(group))
    width = max(triton.next_power_of_2(size), 1 if group == 1 else MATRIX_SIDE)
    output = torch.empty_like(queries)
    heads = (count, query_heads, splits.most)
    parts = heaviest = weights = output
    if splits.most > 1:
        parts = queries.new_empty(*heads, size, dtype=torch.float32)
        heaviest, weights = (queries.new_empty(heads, dtype=torch.float32) for _ in range(2))
    least = triton.cdiv(splits.least, BLOCK) * BLOCK
    key_scales, value_scales = pages.scales or (queries, queries)
    shape: dict[str, Any] = {
        "Q": query_heads,
        "D": size,
        "SPLITS": splits.most,
        "LEAST": least,
        "WIDTH": width,
        "BLOCK": BLOCK,
    }
    _attend[(count, kv_heads, splits.most)](
        queries,
        pages.keys,
        pages.values,
        key_scales,
        value_scales,
        pages.table,
        lanes.slots,
        lanes.positions,
        lanes.depths,
        rank,
        scaling,
        pages.table.stride(0),
        output,
        parts,
        heaviest,
        weights,
        H=kv_heads,
        TOKENS=tokens,
        CODES=pages.scales is not None,
        ROWS=rows,
        STAGES=STAGES,
        num_warps=WARPS,
        **shape,
    )
    if splits.most > 1:
        most = triton.next_power_of_2(splits.most)
        _combine[(count, query_heads)](
            parts, heaviest, weights, output, lanes.positions, lanes.depths, rank, MOST=most, **shape
        )
    return output
