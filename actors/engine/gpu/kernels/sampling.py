"""Logits -> tokens, one program a row: no sorting, and the logits come from memory once, after that from the L2 cache.

The definition is that of `sampling/sampler.py`: the inverse distribution function, in the vocabulary's order, at the
row's random number. The last token that top-k or top-p keeps is found by a search that halves its interval
several times in one pass.
"""

# ruff: noqa: N803

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.gpu.kernels.compiled import check, compiled_once

if TYPE_CHECKING:
    from actors.engine.gpu.state import DeviceRows

BLOCK = 1024  # logits that a program reads together
CUTS = 8  # values at which a pass of the search counts
ROUNDS = 6  # such passes; then values are tried one by one
WARPS = 8
_UNLIKELY = tl.constexpr(-87.0)  # logarithm of a weight that counts as 0
_NONE = tl.constexpr(float("-inf"))


@triton.jit
def _read(row, first, vocabulary, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)
    return tl.load(row + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _weigh(x, temperature, top):
    """exp(x / temperature - top), of the highest logit 1."""
    below = x / temperature - top
    return tl.where(below >= _UNLIKELY, tl.exp(below), 0.0)


@triton.jit
def _tally(row, vocabulary, least, temperature, top, BLOCK: tl.constexpr):
    """Number and weight of the logits that are at least `least`, and the highest one below it."""
    count = 0
    mass = 0.0
    under = _NONE
    for first in range(0, vocabulary, BLOCK):
        x = _read(row, first, vocabulary, BLOCK)
        over = x >= least
        count += tl.sum(over.to(tl.int32))
        mass += tl.sum(tl.where(over, _weigh(x, temperature, top), 0.0).to(tl.float64)).to(tl.float32)
        under = tl.maximum(under, tl.max(tl.where(over, _NONE, x)))
    return count, mass, under


@triton.jit
def _equal(row, vocabulary, value, BLOCK: tl.constexpr):
    count = 0
    for first in range(0, vocabulary, BLOCK):
        count += tl.sum((_read(row, first, vocabulary, BLOCK) == value).to(tl.int32))
    return count


@triton.jit
def _last_kept(
    row,
    vocabulary,
    least,
    most,
    temperature,
    top,
    wanted_count,
    wanted_mass,
    BLOCK: tl.constexpr,
    CUTS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """The lowest logit of the fewest highest ones that are `wanted_count`, or weigh `wanted_mass` if that is 0.

    Returns it, how many of those equal to it are among them, and their weight. `least` is low enough.
    """
    low = least
    high = most + tl.maximum(tl.abs(most) * 1e-5, 1e-5)
    for _ in range(ROUNDS):
        cuts = low + (high - low) * (tl.arange(0, CUTS) + 1).to(tl.float32) / (CUTS + 1)
        counts = tl.zeros([CUTS], tl.int32)
        masses = tl.zeros([CUTS], tl.float32)
        for first in range(0, vocabulary, BLOCK):
            x = _read(row, first, vocabulary, BLOCK)
            over = x[:, None] >= cuts[None, :]
            counts += tl.sum(over.to(tl.int32), axis=0)
            masses += tl.sum(tl.where(over, _weigh(x, temperature, top)[:, None], 0.0), axis=0)
        enough = ((wanted_count > 0) & (counts >= wanted_count)) | ((wanted_count == 0) & (masses >= wanted_mass))
        low = tl.maximum(low, tl.max(tl.where(enough, cuts, low)))
        high = tl.minimum(high, tl.min(tl.where(enough, high, cuts)))
    count, mass, value = _tally(row, vocabulary, high, temperature, top, BLOCK)
    ties = _equal(row, vocabulary, value, BLOCK)
    weight = tl.sum(_weigh(tl.full([1], value, tl.float32), temperature, top))
    while (value > least) & (
        ((wanted_count > 0) & (count + ties < wanted_count))
        | ((wanted_count == 0) & (mass + ties * weight < wanted_mass))
    ):
        count, mass, value = _tally(row, vocabulary, value, temperature, top, BLOCK)
        ties = _equal(row, vocabulary, value, BLOCK)
        weight = tl.sum(_weigh(tl.full([1], value, tl.float32), temperature, top))
    by_mass = tl.ceil((wanted_mass - mass) / tl.maximum(weight, 1e-38)).to(tl.int32)
    kept = tl.minimum(tl.maximum(tl.where(wanted_count > 0, wanted_count - count, by_mass), 1), ties)
    return value, kept, mass + kept * weight


@triton.jit
def _kept(x, temperature, top, cut, ties, lightest, seen, NARROWED: tl.constexpr):
    """Weights of a block, 0 for tokens that top-k, top-p or min-p excludes; and how many equal to `cut` were seen."""
    weights = _weigh(x, temperature, top)
    if NARROWED:
        tied = (x == cut).to(tl.int32)
        inside = (x > cut) | ((tied > 0) & (seen + tl.cumsum(tied) <= ties))
        weights = tl.where(inside & (weights >= lightest), weights, 0.0)
        seen += tl.sum(tied)
    return weights, seen


@compiled_once
def _sample(
    logits,
    adjusted,
    slots,
    uniforms,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    tokens,
    logprobs,
    vocabulary,
    RANDOM: tl.constexpr,
    NARROWED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
    CUTS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + lane)
    plain = logits + lane * vocabulary
    row = adjusted + lane * vocabulary
    column = tl.arange(0, BLOCK)
    most = _NONE
    token = 0
    peak = _NONE
    total = 0.0
    for first in range(0, vocabulary, BLOCK):
        x = _read(row, first, vocabulary, BLOCK)
        high = tl.max(x)
        token = tl.where(high > most, first + tl.argmax(x, axis=0), token)
        most = tl.maximum(most, high)
        if LOGPROBS:
            y = _read(plain, first, vocabulary, BLOCK)
            above = tl.maximum(peak, tl.max(y))
            total = total * tl.exp(peak - above) + tl.sum(tl.exp(y - above))
            peak = above
    if RANDOM:
        temperature = tl.load(temperatures + slot).to(tl.float32)
        if temperature > 0:
            top = most / temperature
            cut = _NONE
            ties = vocabulary
            lightest = 0.0
            if NARROWED:
                top_k = tl.load(top_ks + slot)
                top_p = tl.load(top_ps + slot).to(tl.float32)
                lightest = tl.load(min_ps + slot).to(tl.float32)
                least = most + temperature * _UNLIKELY
                if (top_k > 0) | (top_p < 1):
                    count, mass, _ = _tally(row, vocabulary, least, temperature, top, BLOCK)
                    if (top_k > 0) & (top_k < count):
                        cut, ties, mass = _last_kept(
                            row, vocabulary, least, most, temperature, top, top_k.to(tl.int32), 0.0, BLOCK, CUTS, ROUNDS
                        )
                    if top_p < 1:
                        value, kept, _ = _last_kept(
                            row,
                            vocabulary,
                            tl.maximum(cut, least),
                            most,
                            temperature,
                            top,
                            0,
                            top_p * mass,
                            BLOCK,
                            CUTS,
                            ROUNDS,
                        )
                        ties = tl.where(value > cut, kept, tl.minimum(kept, ties))
                        cut = tl.maximum(cut, value)
            kept_mass = tl.full([], 0.0, tl.float64)
            seen = 0
            for first in range(0, vocabulary, BLOCK):
                x = _read(row, first, vocabulary, BLOCK)
                weights, seen = _kept(x, temperature, top, cut, ties, lightest, seen, NARROWED)
                kept_mass += tl.sum(weights.to(tl.float64))
            wanted = tl.load(uniforms + lane) * kept_mass
            passed = tl.full([], 0.0, tl.float64)
            seen = 0
            found = -1
            last = -1
            for first in range(0, vocabulary, BLOCK):
                x = _read(row, first, vocabulary, BLOCK)
                weights, seen = _kept(x, temperature, top, cut, ties, lightest, seen, NARROWED)
                cumulated = passed + tl.cumsum(weights.to(tl.float64))
                hit = (cumulated > wanted) & (weights > 0)
                here = tl.min(tl.where(hit, first + column, 2147483647))
                found = tl.where((found < 0) & (here < 2147483647), here, found)
                last = tl.maximum(last, tl.max(tl.where(weights > 0, first + column, -1)))
                passed += tl.sum(weights.to(tl.float64))
            token = tl.where(found >= 0, found, tl.where(last >= 0, last, token))
    tl.store(tokens + lane, token)
    if LOGPROBS:
        tl.store(logprobs + lane, tl.load(plain + token).to(tl.float32) - peak - tl.log(total))


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
    """Implements `Operations.sample`."""
    count, vocabulary = logits.shape
    for states in (logits, adjusted):
        check(states, states.dtype, count, vocabulary)
    check(slots, torch.int64, count)
    if uniforms is not None:
        check(uniforms, torch.float64, count)
    tokens = torch.empty_like(slots)
    scores = torch.empty(count, dtype=torch.float32, device=logits.device) if logprobs else None
    _sample[(count,)](
        logits,
        adjusted,
        slots,
        tokens if uniforms is None else uniforms,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        tokens,
        tokens if scores is None else scores,
        vocabulary,
        RANDOM=uniforms is not None,
        NARROWED=narrowed,
        LOGPROBS=logprobs,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
        CUTS=CUTS,
        ROUNDS=ROUNDS,
        num_warps=WARPS,
    )
    return tokens, scores
