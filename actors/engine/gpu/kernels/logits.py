"""Logits -> logits to sample from, in one launch: each is read once and written once."""

# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.constraints.constraint import words_of
from actors.engine.gpu.kernels.compiled import check, compiled_once
from actors.engine.gpu.logits import MOST_SEEN, NO_NUMBER

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows

BLOCK = 1024  # logits of a program, or that it reads together
WARPS = 4


@triton.jit
def _is_allowed(masks, slot, column, words, real):
    word = tl.load(masks + slot * words + column // 32, mask=real, other=0)
    return ((word >> (column % 32)) & 1) > 0


@compiled_once
def _adjust(
    logits,
    slots,
    last,
    counts,
    least,
    stops,
    seen,
    penalties,
    masks,
    adjusted,
    vocabulary,
    words,
    stop_tokens,
    PENALIZED: tl.constexpr,
    BARRED: tl.constexpr,
    MASKED: tl.constexpr,
    MOST_SEEN: tl.constexpr,
    NO_NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + lane)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < vocabulary
    x = tl.load(logits + lane * vocabulary + column, mask=real, other=0.0).to(tl.float32)
    count = tl.load(counts + slot)
    if PENALIZED:
        place = seen + slot * vocabulary + column
        marks = tl.load(place, mask=real, other=0).to(tl.int32)
        is_last = real & (column == tl.load(last + slot)) & (count > 0)
        marks = tl.where(is_last, tl.minimum(tl.maximum(marks, 1) + 1, MOST_SEEN), marks)
        tl.store(place, marks.to(tl.int16), mask=is_last)
        repetition = tl.load(penalties + slot * 3)
        presence = tl.load(penalties + slot * 3 + 1)
        frequency = tl.load(penalties + slot * 3 + 2)
        changed = tl.where(x < 0, x * repetition, x / repetition)
        changed -= tl.where(marks > 1, presence, 0.0)
        changed -= frequency * tl.maximum(marks - 1, 0).to(tl.float32)
        x = tl.where(marks > 0, changed, x)
    if BARRED:
        early = count < tl.load(least + slot)
        for number in range(stop_tokens):
            stop = tl.load(stops + slot * stop_tokens + number)
            x = tl.where(early & (column == stop), float("-inf"), x)
    if MASKED:
        x = tl.where(x == x, x, NO_NUMBER)
        x = tl.where(_is_allowed(masks, slot, column, words, real), x, float("-inf"))
    tl.store(adjusted + lane * vocabulary + column, x.to(adjusted.dtype.element_ty), mask=real)


def adjust(logits: Tensor, slots: Tensor, rows: DeviceRows, *, penalized: bool, barred: bool, masked: bool) -> Tensor:
    """Implements `LogitsOperations.adjust`."""
    count, vocabulary = logits.shape
    check(logits, logits.dtype, count, vocabulary)
    check(slots, torch.int64, count)
    slot_count, words = rows.rows + 1, words_of(vocabulary)
    check(rows.penalties, torch.float32, slot_count, 3)
    if penalized:
        assert rows.seen is not None
        check(rows.seen, torch.int16, slot_count, vocabulary)
    if masked:
        assert rows.masks is not None
        check(rows.masks, torch.int32, slot_count, words)
    adjusted = torch.empty_like(logits, dtype=torch.float32 if penalized else logits.dtype)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _adjust[(count, triton.cdiv(vocabulary, block))](
        logits,
        slots,
        rows.last,
        rows.counts,
        rows.least,
        rows.stops,
        rows.last if rows.seen is None else rows.seen,
        rows.penalties,
        rows.last if rows.masks is None else rows.masks,
        adjusted,
        vocabulary,
        words,
        rows.stops.shape[1],
        PENALIZED=penalized,
        BARRED=barred,
        MASKED=masked,
        MOST_SEEN=MOST_SEEN,
        NO_NUMBER=NO_NUMBER,
        BLOCK=block,
        num_warps=WARPS,
    )
    return adjusted


@compiled_once
def _masked_logprobs(logits, slots, tokens, masks, logprobs, vocabulary, words, BLOCK: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + lane)
    row = logits + lane * vocabulary
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        real = column < vocabulary
        allowed = _is_allowed(masks, slot, column, words, real)
        x = tl.load(row + column, mask=real & allowed, other=float("-inf")).to(tl.float32)
        above = tl.maximum(peak, tl.max(x))
        if above > float("-inf"):
            total = total * tl.exp(peak - above) + tl.sum(tl.exp(x - above))
            peak = above
    token = tl.load(tokens + lane)
    tl.store(logprobs + lane, tl.load(row + token).to(tl.float32) - peak - tl.log(total))


def masked_logprobs(logits: Tensor, slots: Tensor, tokens: Tensor, rows: DeviceRows) -> Tensor:
    """Implements `LogitsOperations.masked_logprobs`."""
    count, vocabulary = logits.shape
    words = words_of(vocabulary)
    assert rows.masks is not None
    check(logits, logits.dtype, count, vocabulary)
    check(rows.masks, torch.int32, rows.rows + 1, words)
    for numbers in (slots, tokens):
        check(numbers, torch.int64, count)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    _masked_logprobs[(count,)](
        logits, slots, tokens, rows.masks, logprobs, vocabulary, words, BLOCK=block, num_warps=WARPS
    )
    return logprobs
