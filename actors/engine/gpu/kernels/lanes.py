"""The inputs of a step's lanes, and the records of the tokens that they sample."""

# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.gpu.kernels.compiled import check, check_lanes, compiled_once
from actors.engine.gpu.operations import Lanes, StepTables

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows


@compiled_once
def _begin(
    slots,
    last,
    row_positions,
    generated,
    ended,
    depth_table,
    most,
    token_table,
    position_table,
    cosine_table,
    sine_table,
    longest,
    positions,
    depths,
    hidden,
    cosines,
    sines,
    width,
    size,
    EMBEDS: tl.constexpr,
    LEARNED: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    lane = tl.program_id(0)
    slot = tl.load(slots + lane)
    position = tl.load(row_positions + slot)
    inside = tl.minimum(position, longest - 1)
    if tl.program_id(1) == 0:
        count = tl.minimum(tl.maximum(tl.load(generated + slot), 0), most - 1)
        depth = tl.load(depth_table + count)
        tl.store(positions + lane, position)
        tl.store(depths + lane, tl.where(tl.load(ended + slot).to(tl.int32) != 0, 0, depth))
        if ROPE:
            column = tl.arange(0, SIZE)
            real = column < size
            cosine = tl.load(cosine_table + inside * size + column, mask=real)
            tl.store(cosines + lane * size + column, cosine, mask=real)
            tl.store(sines + lane * size + column, tl.load(sine_table + inside * size + column, mask=real), mask=real)
    if EMBEDS:
        number = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        within = number < width
        embedded = tl.load(token_table + tl.load(last + slot) * width + number, mask=within)
        if LEARNED:
            embedded += tl.load(position_table + inside * width + number, mask=within)
        tl.store(hidden + lane * width + number, embedded, mask=within)


def begin(lanes: Lanes, rows: DeviceRows, tables: StepTables, hidden: Tensor) -> None:
    """Implements `Operations.begin`."""
    count, width = hidden.shape
    embeds = tables.token_embeddings is not None
    cosine_table, sine_table = tables.rotary or (hidden, hidden)
    cosines, sines = lanes.rotary or (hidden, hidden)
    size = cosines.shape[1]
    check_lanes(lanes, count)
    check(hidden, hidden.dtype, count, width)
    check(tables.depths, torch.int32, len(tables.depths))
    _check_rows(rows)
    for table in (tables.token_embeddings, tables.position_embeddings):
        if table is not None:
            check(table, hidden.dtype, len(table), width)
    if lanes.rotary is not None:
        assert tables.rotary is not None
        for turn, table in zip(lanes.rotary, tables.rotary, strict=True):
            check(turn, hidden.dtype, count, size)
            check(table, hidden.dtype, tables.longest, size)
    _begin[(count, triton.cdiv(width, 1024) if embeds else 1)](
        lanes.slots,
        rows.last,
        rows.positions,
        rows.generated,
        rows.ended,
        tables.depths,
        len(tables.depths),
        tables.token_embeddings if embeds else hidden,
        hidden if tables.position_embeddings is None else tables.position_embeddings,
        cosine_table,
        sine_table,
        tables.longest,
        lanes.positions,
        lanes.depths,
        hidden,
        cosines,
        sines,
        width,
        size,
        EMBEDS=embeds,
        LEARNED=tables.position_embeddings is not None,
        ROPE=lanes.rotary is not None,
        WIDTH=1024,
        SIZE=triton.next_power_of_2(size) if lanes.rotary is not None else 1,
    )


def _check_rows(rows: DeviceRows) -> None:
    count = rows.rows + 1
    for numbers in (rows.last, rows.positions, rows.generated, rows.counts, rows.limits, rows.least):
        check(numbers, torch.int64, count)
    for table in (rows.tokens, rows.stops):
        check(table, torch.int64, count, table.shape[1])
    check(rows.logprobs, torch.float64, count)
    check(rows.ended, torch.bool, count)


@compiled_once
def _finish(
    slots,
    tokens,
    token_logprobs,
    last,
    row_tokens,
    counts,
    row_positions,
    generated,
    ended,
    stops,
    least,
    limits,
    logprobs,
    most,
    stop_tokens,
    LOGPROBS: tl.constexpr,
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
        tl.store(row_positions + slot, tl.load(row_positions + slot) + 1)
        tl.store(generated + slot, tl.load(generated + slot) + 1)
        if LOGPROBS:
            tl.store(logprobs + slot, tl.load(logprobs + slot) + tl.load(token_logprobs + lane).to(tl.float64))
        column = tl.arange(0, STOPS)
        stop = tl.load(stops + slot * stop_tokens + column, mask=column < stop_tokens, other=-1)
        stopped = tl.sum((stop == token).to(tl.int32), axis=0) > 0
        over = (stopped & (count >= tl.load(least + slot))) | (count >= tl.load(limits + slot))
        tl.store(ended + slot, over)


def finish(slots: Tensor, tokens: Tensor, logprobs: Tensor | None, rows: DeviceRows) -> None:
    """Implements `Operations.finish`."""
    for numbers in (slots, tokens):
        check(numbers, torch.int64, len(slots))
    if logprobs is not None:
        check(logprobs, torch.float32, len(slots))
    _check_rows(rows)
    _finish[(len(slots),)](
        slots,
        tokens,
        tokens if logprobs is None else logprobs,
        rows.last,
        rows.tokens,
        rows.counts,
        rows.positions,
        rows.generated,
        rows.ended,
        rows.stops,
        rows.least,
        rows.limits,
        rows.logprobs,
        rows.tokens.shape[1],
        rows.stops.shape[1],
        LOGPROBS=logprobs is not None,
        STOPS=triton.next_power_of_2(rows.stops.shape[1]),
        num_warps=1,
    )
