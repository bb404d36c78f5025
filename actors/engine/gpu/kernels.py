"""What lies before, between and behind a decode step's products, as Triton kernels of fixed shapes, for CUDA graphs.

Nothing here reads a value back or hangs on one that is not on the device: how many tokens a row has, where they lie and
whether a lane runs the layer at all is read by the kernels. Held against `reference`, lane by lane.
Attention over pages in splits after Dao et al., "Flash-Decoding for long-context inference", 2023.
Shapes as in `reference`.
"""

# ruff: noqa: N803, N806, SIM102

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from actors.engine.gpu.reference import Tables
    from actors.engine.gpu.state import DeviceRows

BLOCK = 64  # tokens that a program of attention reads at once
STAGES = 3  # of these reads under way
WARPS = 4
MATRIX_SIDE = 16  # least rows and columns of a product on tensor cores
# one for all layers and lane counts: else each rank that is 1 or divides by 16, and each slice of lanes, has its own
compiled_once = triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["slots", "places", "depths"])


@compiled_once
def _begin(
    slots,
    last,
    row_places,
    positions,
    ended,
    depth_table,
    most,
    token_table,
    place_table,
    cosine_table,
    sine_table,
    longest,
    places,
    depths,
    hidden,
    cosines,
    sines,
    width,
    size,
    EMBEDS: tl.constexpr,
    PLACES: tl.constexpr,
    TURNS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    lane = tl.program_id(0)
    slot = tl.load(slots + lane)
    place = tl.load(row_places + slot)
    inside = tl.minimum(place, longest - 1)
    if tl.program_id(1) == 0:
        position = tl.minimum(tl.maximum(tl.load(positions + slot), 0), most - 1)
        depth = tl.load(depth_table + position)
        tl.store(places + lane, place)
        tl.store(depths + lane, tl.where(tl.load(ended + slot).to(tl.int32) != 0, 0, depth))
        if TURNS:
            turn = tl.arange(0, SIZE)
            known = turn < size
            tl.store(cosines + lane * size + turn, tl.load(cosine_table + inside * size + turn, mask=known), mask=known)
            tl.store(sines + lane * size + turn, tl.load(sine_table + inside * size + turn, mask=known), mask=known)
    if EMBEDS:
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        real = column < width
        one = tl.load(token_table + tl.load(last + slot) * width + column, mask=real)
        if PLACES:
            one += tl.load(place_table + inside * width + column, mask=real)
        tl.store(hidden + lane * width + column, one, mask=real)


def begin(
    slots: Tensor,
    rows: DeviceRows,
    tables: Tables,
    places: Tensor,
    depths: Tensor,
    hidden: Tensor,
    turns: tuple[Tensor, Tensor] | None,
) -> None:
    """As `reference.begin`; all contiguous."""
    width = hidden.shape[1]
    embeds, turned = tables.tokens is not None, turns is not None
    cosine_table, sine_table = tables.turns or (hidden, hidden)
    cosines, sines = turns or (hidden, hidden)
    size = cosines.shape[1]
    _begin[(len(slots), triton.cdiv(width, 1024) if embeds else 1)](
        slots,
        rows.last,
        rows.places,
        rows.positions,
        rows.ended,
        tables.depths,
        len(tables.depths),
        tables.tokens if embeds else hidden,
        hidden if tables.places is None else tables.places,
        cosine_table,
        sine_table,
        tables.longest,
        places,
        depths,
        hidden,
        cosines,
        sines,
        width,
        size,
        EMBEDS=embeds,
        PLACES=tables.places is not None,
        TURNS=turned,
        WIDTH=1024,
        SIZE=triton.next_power_of_2(size) if turned else 1,
    )


@compiled_once
def _finish(
    slots,
    tokens,
    told,
    last,
    row_tokens,
    counts,
    row_places,
    positions,
    ended,
    stops,
    least,
    limits,
    logprobs,
    most,
    stop_tokens,
    TOLD: tl.constexpr,
    STOPS: tl.constexpr,
):
    lane = tl.program_id(0)
    slot = tl.load(slots + lane)
    if tl.load(ended + slot).to(tl.int32) == 0:
        token = tl.load(tokens + lane)
        count = tl.load(counts + slot)
        tl.store(row_tokens + slot * most + tl.minimum(count, most - 1), token)
        count += 1
        tl.store(last + slot, token)
        tl.store(counts + slot, count)
        tl.store(row_places + slot, tl.load(row_places + slot) + 1)
        tl.store(positions + slot, tl.load(positions + slot) + 1)
        if TOLD:
            tl.store(logprobs + slot, tl.load(logprobs + slot) + tl.load(told + lane).to(tl.float64))
        column = tl.arange(0, STOPS)
        stop = tl.load(stops + slot * stop_tokens + column, mask=column < stop_tokens, other=-1)
        stopped = tl.sum((stop == token).to(tl.int32), axis=0) > 0
        over = (stopped & (count >= tl.load(least + slot))) | (count >= tl.load(limits + slot))
        tl.store(ended + slot, over)


def finish(slots: Tensor, tokens: Tensor, told: Tensor | None, rows: DeviceRows) -> None:
    """As `reference.finish`."""
    _finish[(len(slots),)](
        slots,
        tokens,
        tokens if told is None else told,
        rows.last,
        rows.tokens,
        rows.counts,
        rows.places,
        rows.positions,
        rows.ended,
        rows.stops,
        rows.least,
        rows.limits,
        rows.logprobs,
        rows.tokens.shape[1],
        rows.stops.shape[1],
        TOLD=told is not None,
        STOPS=triton.next_power_of_2(rows.stops.shape[1]),
        num_warps=1,
    )


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


def norm(hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.norm`; hidden is contiguous."""
    return _normed(hidden, None, None, 0, weight, bias, eps)


def add_norm(
    hidden: Tensor, change: Tensor, depths: Tensor, rank: int, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """As `reference.add_norm`; hidden and change are contiguous."""
    return _normed(hidden, change, depths, rank, weight, bias, eps)


def _normed(
    hidden: Tensor,
    change: Tensor | None,
    depths: Tensor | None,
    rank: int,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    output = torch.empty_like(hidden)
    width = hidden.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(len(hidden),)](
        hidden,
        change,
        depths,
        rank,
        output,
        weight,
        bias,
        eps,
        width,
        ADDS=change is not None,
        HAS_BIAS=bias is not None,
        WIDTH=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return output


@compiled_once
def _add(hidden, change, depths, rank, width, WIDTH: tl.constexpr):
    lane = tl.program_id(0)
    if tl.load(depths + lane) > rank:
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        inside = column < width
        old = tl.load(hidden + lane * width + column, mask=inside)
        new = tl.load(change + lane * width + column, mask=inside)
        tl.store(hidden + lane * width + column, old + new, mask=inside)


def add(hidden: Tensor, change: Tensor, depths: Tensor, rank: int) -> None:
    """As `reference.add`; both contiguous."""
    width = hidden.shape[1]
    _add[(len(hidden), triton.cdiv(width, 1024))](hidden, change, depths, rank, width, WIDTH=1024)


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
    """As `reference.gate`; wide is contiguous."""
    half = wide.shape[1] // 2
    output = wide.new_empty(len(wide), half)
    _gate[(len(wide), triton.cdiv(half, 1024))](wide, output, half, WIDTH=1024)
    return output


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
    places,
    depths,
    rank,
    table_stride,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    lane, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < D
    base = states + (lane * (Q + 2 * H) + head) * D
    one = tl.load(base + column, mask=inside, other=0.0)
    if TURNS:
        if head < Q + H:
            other = tl.load(base + (column + D // 2) % D, mask=inside, other=0.0)
            signed = tl.where(column < D // 2, -other, other)
            cosine = tl.load(cosines + lane * D + column, mask=inside, other=0.0)
            sine = tl.load(sines + lane * D + column, mask=inside, other=0.0)
            one = (one * cosine).to(one.dtype) + (signed * sine).to(one.dtype)
    if head < Q:
        tl.store(queries + (lane * Q + head) * D + column, one, mask=inside)
    elif tl.load(depths + lane) > rank:
        place = tl.load(places + lane)
        page = tl.load(table + tl.load(slots + lane) * table_stride + place // TOKENS).to(tl.int64)
        number = (head - Q) % H
        target = ((page * H + number) * TOKENS + place % TOKENS) * D + column
        if head < Q + H:
            tl.store(keys + target, one, mask=inside)
        else:
            tl.store(values + target, one, mask=inside)


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
    """As `reference.append`; all contiguous but the table, whose rows are."""
    lanes, heads, size = states.shape
    queries = states.new_empty(lanes, query_heads, size)
    cosines, sines = (states, states) if rotary is None else rotary
    _append[(lanes, heads)](
        states,
        queries,
        cosines,
        sines,
        keys,
        values,
        table,
        slots,
        places,
        depths,
        rank,
        table.stride(0),
        Q=query_heads,
        H=keys.shape[1],
        D=size,
        TOKENS=keys.shape[2],
        TURNS=rotary is not None,
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
    places,
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
    length = tl.load(places + lane).to(tl.int32) + 1
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
        place = start + token
        known = place < end
        page = tl.load(pages + place // TOKENS, mask=known, other=0).to(tl.int64)
        source = ((page * H + head) * TOKENS + place % TOKENS)[:, None] * D + column[None, :]
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
    share = tl.exp(top - tl.max(top, axis=0))  # 0 for a split that had no token
    total = tl.sum(share * tl.load(weights + base + split, mask=real, other=0.0), axis=0)
    part = tl.load(
        parts + (base + split)[:, None] * D + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
    )
    done = tl.sum(part * share[:, None], axis=0) / total
    tl.store(out + (lane * Q + head) * D + column, done.to(out.dtype.element_ty), mask=inside)


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
    """As `reference.attend`; splits: programs among which a row's tokens are divided."""
    lanes, query_heads, size = queries.shape
    kv_heads, tokens = keys.shape[1:3]
    group = query_heads // kv_heads
    rows = 1 if group == 1 else max(MATRIX_SIDE, triton.next_power_of_2(group))
    width = max(triton.next_power_of_2(size), 1 if group == 1 else MATRIX_SIDE)
    output = torch.empty_like(queries)
    heads = (lanes, query_heads, splits)
    parts = output if splits == 1 else queries.new_empty(*heads, size, dtype=torch.float32)
    heaviest, weights = (
        (output, output) if splits == 1 else (queries.new_empty(heads, dtype=torch.float32) for _ in range(2))
    )
    shape: dict[str, Any] = {"Q": query_heads, "D": size, "SPLITS": splits, "WIDTH": width}
    _attend[(lanes, kv_heads, splits)](
        queries,
        keys,
        values,
        table,
        slots,
        places,
        depths,
        rank,
        scaling,
        table.stride(0),
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
        _combine[(lanes, query_heads)](parts, heaviest, weights, output, depths, rank, MOST=most, **shape)
    return output
