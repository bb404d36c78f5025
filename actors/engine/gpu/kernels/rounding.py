"""Numbers rounded to 8 bits before a product, and the scales of its sums behind it."""

# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from actors.engine.checkpoint.compressed import LIMITS
from actors.engine.gpu.kernels.compiled import check, compiled_once
from actors.engine.gpu.operations import LEAST_ROUNDED

LEAST = tl.constexpr(LEAST_ROUNDED)
HALVES = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no place for fractions, and rounds half to even


@triton.jit
def rounded(row, limit, WHOLE: tl.constexpr):
    """Codes, as float32, and scale of numbers in float32: see `Operations.round_rows`."""
    size = tl.abs(row)
    finite = tl.min((size <= 3.4028234663852886e38).to(tl.int32)) > 0
    highest = tl.max(size)
    scaled = row * tl.where(highest > LEAST, limit / highest, 0.0)
    if WHOLE:
        scaled = (scaled + HALVES) - HALVES
    scaled = tl.where(finite, scaled, 0.0)
    # limit / highest may have been rounded up
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    return scaled, tl.where(finite, highest / limit, float("nan"))


@compiled_once
def _round_rows(x, codes, scales, limit, width, WHOLE: tl.constexpr, WIDTH: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    row = tl.load(x + lane * width + column, mask=inside, other=0.0).to(tl.float32)
    scaled, scale = rounded(row, limit, WHOLE)
    tl.store(codes + lane * width + column, scaled.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + lane, scale)


def round_rows(hidden: Tensor, dtype: torch.dtype, least_rows: int) -> tuple[Tensor, Tensor]:
    """Implements `Operations.round_rows`."""
    count, width = hidden.shape
    check(hidden, hidden.dtype, count, width)
    whole = dtype == torch.int8
    codes = hidden.new_empty(max(count, least_rows), width, dtype=dtype)
    scales = hidden.new_empty(count, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    limit = LIMITS["int8" if whole else "fp8"]
    warps = min(16, max(1, block // 512))
    _round_rows[(count,)](hidden, codes, scales, limit, width, WHOLE=whole, WIDTH=block, num_warps=warps)
    return codes, scales


@compiled_once
def _scale_sums(
    sums, row_scales, scales, bias, out, width, HAS_BIAS: tl.constexpr, RELU: tl.constexpr, WIDTH: tl.constexpr
):
    lane = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    total = tl.load(sums + lane * width + column, mask=inside, other=0).to(tl.float32)
    done = total * (tl.load(row_scales + lane) * tl.load(scales + column, mask=inside, other=0.0))
    if HAS_BIAS:
        done += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        done = tl.where(done < 0, 0.0, done)
    tl.store(out + lane * width + column, done.to(out.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, *, relu: bool
) -> Tensor:
    """Implements `Operations.scale_sums`."""
    count, width = len(row_scales), sums.shape[1]
    check(sums, torch.int32, len(sums), width)
    check(row_scales, torch.float32, count)
    check(scales, torch.float32, width)
    if bias is not None:
        check(bias, dtype, width)
    output = sums.new_empty(count, width, dtype=dtype)
    grid = count, triton.cdiv(width, 1024)
    _scale_sums[grid](sums, row_scales, scales, bias, output, width, HAS_BIAS=bias is not None, RELU=relu, WIDTH=1024)
    return output
