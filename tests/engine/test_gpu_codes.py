"""Codes of keys and values in pages: their error, and the kernels that write and read them against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_cache import rounded
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine.checkpoint.compressed import LIMITS, Kind  # noqa: E402
from actors.engine.gpu import kernels, reference  # noqa: E402
from actors.engine.gpu.operations import Lanes, LayerPages  # noqa: E402
from actors.engine.gpu.pages import PAGE_TOKENS  # noqa: E402
from actors.engine.gpu.products import DTYPES  # noqa: E402
from actors.engine.gpu.splits import Splits  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
KINDS = st.sampled_from(list(LIMITS))
many = settings(max_examples=20, deadline=None)


def pages_of(lengths: list[int], kv_heads: int, size: int, kind: Kind) -> LayerPages:
    """Pages for rows of so many tokens, in no order; page 0 is nobody's."""
    width = -(-max(lengths) // PAGE_TOKENS)
    table = (torch.randperm(len(lengths) * width) + 1).view(len(lengths), width).to(torch.int32).to(DEVICE)
    shape = len(lengths) * width + 1, kv_heads, PAGE_TOKENS, size
    keys, values = (torch.zeros(shape, dtype=DTYPES[kind], device=DEVICE) for _ in range(2))
    scales = torch.zeros(shape[:-1], device=DEVICE), torch.zeros(shape[:-1], device=DEVICE)
    return LayerPages(keys, values, table, scales)


def copied(pages: LayerPages) -> LayerPages:
    assert pages.scales is not None
    return LayerPages(
        pages.keys.clone(), pages.values.clone(), pages.table, (pages.scales[0].clone(), pages.scales[1].clone())
    )


def states_of(count: int, heads: int, size: int, spread: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, heads, D]; each head of each token has a magnitude of its own, and some numbers are outliers."""
    states = torch.randn(count, heads, size) * 10.0 ** (spread * (torch.rand(count, heads, 1) - 0.5))
    states[torch.rand(states.shape) < 0.02] *= 200
    return states.to(dtype).to(DEVICE)


def filled(pages: LayerPages, lengths: list[int], keys: Tensor, values: Tensor) -> None:
    """Write each row's tokens, keys and values [sum of lengths, H, D], as passes over prompts do."""
    rows = torch.cat([torch.full((length,), row) for row, length in enumerate(lengths)]).to(DEVICE)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    own = pages.table[rows, positions // PAGE_TOKENS].long()
    pages.write(own, positions, keys, values, reference.round_rows)


def half_step(numbers: Tensor, kind: Kind) -> Tensor:
    """How far codes of numbers [..., D] may lie from them: half the distance between two codes, in float64."""
    scale = numbers.double().abs().amax(dim=-1, keepdim=True) / LIMITS[kind]
    half = scale / 2 if kind == "int8" else torch.maximum(numbers.double().abs() / 16, scale / 2**10)
    return half.expand(numbers.shape) * (1 + 1e-5) + 2.0**-100


@many
@given(
    kind=KINDS,
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    size=st.sampled_from([1, 8, 24, 64]),
    spread=st.sampled_from([0, 4, 70]),  # of magnitudes, powers of ten
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_what_is_read_lies_within_half_a_step_of_what_was_written(
    kind: Kind, lengths: list[int], kv_heads: int, size: int, spread: int, dtype: torch.dtype, seed: int
) -> None:
    """Zeros stay zeros, and a head with a number that is not finite is no number, alone."""
    torch.manual_seed(seed)
    keys, values = (states_of(sum(lengths), kv_heads, size, spread, dtype) for _ in range(2))
    keys[seed % len(keys), seed % kv_heads] = 0
    values[seed % len(keys), seed % kv_heads, seed % size] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    pages = pages_of(lengths, kv_heads, size, kind)
    filled(pages, lengths, keys, values)
    read = pages.read(pages.table.long(), torch.float32)
    for got, wanted in zip(read, (keys, values), strict=True):
        rows = got.transpose(2, 3).flatten(1, 2)  # [R, W T, H, D]
        got = torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        broken = ~wanted.isfinite().all(dim=-1)
        assert torch.equal(got.isnan().all(dim=-1), broken) and torch.equal(got.isnan().any(dim=-1), broken)
        far = (got.double() - wanted.double()).abs()[~broken]
        assert (far <= half_step(wanted, kind)[~broken]).all()
        assert (got[~broken][wanted[~broken] == 0] == 0).all()


@many
@given(
    kind=KINDS,
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([8, 24, 64, 128]),
    spread=st.sampled_from([0, 2]),
    seed=st.integers(0, 999),
)
def test_attention_over_codes_is_near_that_over_numbers(
    kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, spread: int, seed: int
) -> None:
    """Within what follows from half a step: scores move by |q| times that of their key, so that every weight changes by
    at most a factor of e^2s, and values by that of their own."""
    torch.manual_seed(seed)
    keys, values = (states_of(sum(lengths), kv_heads, size, spread) for _ in range(2))
    queries = torch.randn(len(lengths), kv_heads * group, size).to(DEVICE)
    pages = pages_of(lengths, kv_heads, size, kind)
    filled(pages, lengths, keys, values)
    scaling = size**-0.5 / float(keys.abs().max())
    slots = torch.arange(len(lengths), device=DEVICE)
    depths = torch.ones(len(lengths), dtype=torch.int32, device=DEVICE)
    lanes = Lanes(slots, torch.tensor(lengths, device=DEVICE) - 1, depths, None)
    got = reference.attend(queries, pages, lanes, 0, scaling)
    first = 0
    for row, length in enumerate(lengths):
        key, value = (states[first : first + length].double() for states in (keys, values))
        first += length
        for head in range(kv_heads * group):
            own = head // group
            query = queries[row, head].double()
            weights = (key[:, own] @ query * scaling).softmax(dim=0)
            moved = (half_step(key[:, own], kind) * query.abs()).sum(dim=1).max() * scaling
            largest = value[:, own].abs().max()
            bound = half_step(value[:, own], kind).max() + (2 * moved).expm1() * largest
            far = (got[row, head].double() - weights @ value[:, own]).abs().max()
            assert far <= bound + 1e-5 * largest


def lanes_in_pages(
    lengths: list[int], kv_heads: int, group: int, size: int, kind: Kind, seed: int
) -> tuple[Tensor, Lanes, LayerPages]:
    """A new token of each row, one of which does not run the layer, over pages that hold the tokens before it."""
    torch.manual_seed(seed)
    dtype, count = torch.bfloat16 if CUDA else torch.float32, len(lengths)  # the interpreter has no bfloat16
    pages = pages_of(lengths, kv_heads, size, kind)
    keys, values = (states_of(sum(lengths), kv_heads, size, 1, dtype) for _ in range(2))
    filled(pages, lengths, keys, values)
    depths = torch.full((count,), 5, dtype=torch.int32, device=DEVICE)
    if count > 1:
        depths[seed % count] = 2
    rotary = torch.randn(2, count, size // 2).to(dtype).to(DEVICE)
    positions = torch.tensor(lengths, device=DEVICE) - 1
    lanes = Lanes(torch.arange(count, device=DEVICE), positions, depths, (rotary[0], rotary[1]))
    states = states_of(count, kv_heads * (group + 2), size, 2, dtype)
    states[seed % count, -1] = 0
    return states, lanes, pages


KERNEL_CASES: dict[str, Any] = {
    "kind": KINDS,
    "lengths": st.lists(st.integers(1, 150), min_size=1, max_size=4),
    "kv_heads": st.integers(1, 2),
    "group": st.sampled_from([1, 2, 5]),
    "size": st.sampled_from([8, 24, 64]),
    "seed": st.integers(0, 99),
}


@many
@given(**KERNEL_CASES)
def test_the_kernel_writes_the_codes_that_torch_writes(
    kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, seed: int
) -> None:
    """Or the next ones. Other tokens' codes stay, and nothing is written in a lane that does not run."""
    states, lanes, mine = lanes_in_pages(lengths, kv_heads, group, size, kind, seed)
    before, theirs = copied(mine), copied(mine)
    dense = torch.zeros(2, len(lengths), kv_heads, size, dtype=states.dtype, device=DEVICE)
    kernels.append(states, kv_heads * group, lanes.rotary, mine, lanes, 2, (dense[0], dense[1]))
    reference.append(states, kv_heads * group, lanes.rotary, theirs, lanes, 2)
    runs = lanes.depths > 2
    new = torch.zeros(mine.keys.shape[:3], dtype=torch.bool, device=DEVICE)
    places = mine.table[lanes.slots, lanes.positions // PAGE_TOKENS].long()[runs], (lanes.positions % PAGE_TOKENS)[runs]
    new[places[0], :, places[1]] = True
    new[0] = ~new[0]  # page 0 is nobody's
    assert mine.scales is not None and theirs.scales is not None and before.scales is not None
    pools = ((mine.keys, theirs.keys, before.keys), (mine.values, theirs.values, before.values))
    for (got, want, old), scales, numbers in zip(
        pools, zip(mine.scales, theirs.scales, strict=True), dense, strict=True
    ):
        assert torch.equal(got.float()[~new], old.float()[~new])
        torch.testing.assert_close(scales[0][1:], scales[1][1:], rtol=2**-7 if CUDA else 1e-5, atol=0)
        if kind == "int8":
            assert ((got.float() - want.float()).abs() <= 1)[1:].all()
        else:
            far, codes = (got.float() - want.float()).abs(), want.float().abs()
            # Triton's interpreter loses the carry of fractions that round up to a power of two
            known = torch.ones_like(codes, dtype=torch.bool) if CUDA else codes.log2() % 1 != 0
            assert (far <= (codes / 8).clamp(min=2**-9))[1:][known[1:]].all()
        if kind == "int8" or CUDA:
            read = got.float() * scales[0][..., None]
            written = read[places[0], :, places[1]].double()
            assert ((written - numbers[runs].double()).abs() <= half_step(numbers[runs], kind) * (1 + 1e-3)).all()


@many
@given(splits=st.builds(Splits, st.sampled_from([1, 2, 5]), st.sampled_from([1, 64, 128])), **KERNEL_CASES)
def test_the_kernel_attends_over_codes_as_torch_does(
    splits: Splits, kind: Kind, lengths: list[int], kv_heads: int, group: int, size: int, seed: int
) -> None:
    """Also where page 0 holds what is no number; and a lane's result is the same bits whatever lanes are beside it."""
    states, lanes, pages = lanes_in_pages(lengths, kv_heads, group, size, kind, seed)
    queries = torch.randn(len(lengths), kv_heads * group, size).to(states.dtype).to(DEVICE)
    keys, values = pages.read(torch.arange(len(pages.keys)).to(DEVICE), torch.float32)
    scaling, largest = 1 / float(keys.abs().max()), float(values.abs().max())
    want = reference.attend(queries, pages, lanes, 2, scaling)
    assert pages.scales is not None
    for scales in pages.scales:
        scales[0] = torch.nan
    got = kernels.attend(queries, pages, lanes, 2, scaling, splits)
    runs = lanes.depths > 2
    wide = 2**-4 if CUDA else 1e-5
    torch.testing.assert_close(got[runs] / largest, want[runs] / largest, rtol=wide, atol=wide)
    for lane in runs.nonzero()[:, 0].tolist():
        alone = kernels.attend(queries[lane : lane + 1], pages, lanes.at(slice(lane, lane + 1)), 2, scaling, splits)
        assert torch.equal(alone[0], got[lane])


@torch.inference_mode()
def test_the_definition_is_what_pages_hold() -> None:
    """The oracle's rounding, in float64, against the codes' own."""
    torch.manual_seed(0)
    for kind in LIMITS:
        keys, values = states_of(40, 3, 24, 2), states_of(40, 3, 24, 2)
        pages = pages_of([40], 3, 24, kind)
        filled(pages, [40], keys, values)
        got = pages.read(pages.table.long(), torch.float32)[0][0].transpose(1, 2).flatten(0, 1)[:40]
        torch.testing.assert_close(got.double().cpu(), rounded(keys.cpu(), kind), rtol=1e-5, atol=1e-7)
