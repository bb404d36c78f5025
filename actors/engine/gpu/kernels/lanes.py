"""What a step's lanes begin with, and what is noted of what they have drawn."""

# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from actors.engine.gpu.kernels.compiled import compiled_once

if TYPE_CHECKING:
    from actors.engine.gpu.reference import Tables
    from actors.engine.gpu.state import DeviceRows


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
