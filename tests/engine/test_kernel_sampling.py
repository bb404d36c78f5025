"""The CPU's sampling kernel against torch's operations in float64, which define it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.cpu import kernels
from actors.engine.sampling import kernel as kernel_sampling
from actors.engine.sampling import sampler
from actors.engine.sampling.sampler import narrow, sample_by_torch, uniforms
from actors.engine.sampling.state import NO_TOKEN, RowSampling
from actors.engine.types import SamplingParams

pytestmark = pytest.mark.skipif(
    not kernels.available(torch.float32, torch.device("cpu")), reason="needs a C++ compiler"
)
ROUNDING = 2e-6  # of cumulated probability: weights are float32


class Allowed:
    """A constraint in which the same tokens may come at every step."""

    label = error = None
    ends = ()

    def __init__(self, tokens: set[int], scored: bool) -> None:
        self.tokens, self.scored = tokens, scored

    def allows(self, token: int) -> bool:
        return token in self.tokens

    def write(self, bits: NDArray[np.int32]) -> None:
        for token in self.tokens:
            bits.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def advance(self, token: int) -> bool:
        return False

    def is_complete(self) -> bool:
        return False


def logits_of(rows: int, width: int, shape: str, seed: int, dtype: torch.dtype) -> Tensor:
    """flat: as of random weights; peaked: as of a trained model; tied: few different values."""
    chance = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, width, generator=chance)
    made = {"flat": normal * 0.5, "peaked": -((normal * 3).abs() ** 1.5) * 3, "tied": (normal * 2).round()}[shape]
    return made.to(dtype)


def distribution(logits: Tensor, row: RowSampling) -> Tensor:
    """Exact probabilities [V] of a row with a temperature, without changes or mask."""
    params = row.params
    top_p, min_p = (torch.tensor([value], dtype=torch.float64) for value in (params.top_p, params.min_p))
    kept = narrow(logits.float()[None] / params.temperature, torch.tensor([params.top_k]), top_p, min_p)[0]
    return kept / kept.sum()


def states(rows: int, width: int, seed: int) -> list[RowSampling]:
    """Rows with parameters, history and constraints that differ from row to row."""
    chance = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        params = SamplingParams(
            temperature=float(chance.choice([0.0, 0.3, 1.0, 2.5])),
            top_k=int(chance.choice([0, 1, 3, 50, 10**6])),
            top_p=float(chance.choice([1.0, 0.1, 0.9, 0.999])),
            min_p=float(chance.choice([0.0, 0.0, 0.05, 1.0])),
            repetition_penalty=float(chance.choice([1.0, 1.3])),
            presence_penalty=float(chance.choice([0.0, 0.4])),
            logprobs=[None, 0, 4][chance.integers(3)],
        )
        prompt = chance.integers(width, size=int(chance.integers(1, 9))).tolist()
        row = RowSampling.begin(params, int(chance.integers(-(2**63), 2**63)), prompt)
        for token in chance.integers(width, size=int(chance.integers(5))).tolist():
            row.add(token)
        if chance.integers(3) == 0:
            row.barred = sorted({int(chance.integers(width)), prompt[0]})[: width - 1]
        if number % 3 == 2:
            tokens = set(chance.integers(width, size=int(chance.integers(1, 40))).tolist())
            row.allowed, row.barred = Allowed(tokens, bool(chance.integers(2))), ()
        made.append(row)
    return made


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 31, 255, 256, 257, 2048, 49152]),
    st.sampled_from(["flat", "peaked", "tied"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_everything_equals_the_definition(seed: int, width: int, shape: str, dtype: torch.dtype) -> None:
    logits = logits_of(7, width, shape, seed, dtype)
    rows = states(7, width, seed)
    ours = kernel_sampling.sample(logits, rows, logprobs=True)
    wanted = sample_by_torch(logits, rows, logprobs=True)
    for index, row in enumerate(rows):
        assert not row.barred or ours.tokens[index] not in row.barred or len(row.barred) == width
        if ours.tokens[index] == wanted.tokens[index]:
            assert ours.logprobs[index] == pytest.approx(wanted.logprobs[index], abs=2e-5)
            if row.allowed is not None and row.allowed.scored:
                assert ours.choice_logprobs[index] == pytest.approx(wanted.choice_logprobs[index], abs=2e-5)
        else:
            assert row.params.temperature > 0 and near_a_bound(logits[index], row, ours.tokens[index])
        assert (index in ours.top) == (row.params.logprobs is not None)
        if index in ours.top:
            top, reference = ours.top[index].top, wanted.top[index].top
            assert [value for _, value in top] == pytest.approx([value for _, value in reference], abs=2e-5)
            for (token, _), (other, _) in zip(top, reference, strict=True):  # which of two equal ones is open
                assert abs(logits[index, token].float() - logits[index, other].float()) < 2e-5


def near_a_bound(logits: Tensor, row: RowSampling, token: int) -> bool:
    """Whether the row's random number lies within rounding of the token's share of the distribution.

    A row with changes or a mask counts by its own logits, which only the definition knows: the token must be possible.
    """
    if row.allowed is not None:
        return row.allowed.allows(token)
    if row.penalized or row.barred:
        return token not in row.barred
    probabilities = distribution(logits, row)
    u = uniforms(torch.tensor([row.key]), torch.tensor([row.drawn])).item()
    end = probabilities.cumsum(0)[token].item()
    begin = end - probabilities[token].item()
    return begin - ROUNDING <= u <= end + ROUNDING


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([8, 300, 2048]),
    st.sampled_from(["flat", "peaked", "tied"]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (20, 0.7, 0.05), (0, 0.9999, 0.0)]),
)
def test_draws_lie_where_the_exact_distribution_has_them(
    seed: int, width: int, shape: str, temperature: float, cut: tuple[int, float, float]
) -> None:
    """Each of 200 draws: the token's share of the exact cumulated distribution holds the row's random number."""
    logits = logits_of(1, width, shape, seed, torch.bfloat16)
    top_k, top_p, min_p = cut
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = [RowSampling(params, seed, drawn) for drawn in range(200)]
    drawn = kernel_sampling.sample(logits.expand(200, -1).contiguous(), rows, logprobs=False)
    assert all(near_a_bound(logits[0], row, token) for row, token in zip(rows, drawn.tokens, strict=True))
    assert all(math.isnan(one) for one in drawn.logprobs)


@pytest.mark.parametrize("sample", [kernel_sampling.sample, sample_by_torch])
@pytest.mark.parametrize("shape", ["flat", "peaked"])
def test_a_row_is_the_same_in_every_batch(sample: Any, shape: str) -> None:
    """Each bit of it by the kernel; torch rounds other sums of log-probabilities."""
    logits, rows = logits_of(24, 5000, shape, 1, torch.bfloat16), states(24, 5000, 1)
    together = sample(logits, rows, logprobs=True)
    for index, row in enumerate(rows):
        alone = sample(logits[index : index + 1].contiguous(), [row], logprobs=True)
        assert alone.tokens == [together.tokens[index]]
        rounding = 0 if sample is kernel_sampling.sample else 1e-5
        assert alone.logprobs == pytest.approx([together.logprobs[index]], abs=rounding, rel=0)
        if row.allowed is not None and row.allowed.scored:
            wanted = [together.choice_logprobs[index]]
            assert alone.choice_logprobs == pytest.approx(wanted, abs=rounding, rel=0)
        assert (0 in alone.top) == (index in together.top)
        if 0 in alone.top:
            assert [token for token, _ in alone.top[0].top] == [token for token, _ in together.top[index].top]


@pytest.mark.parametrize("way", ["kernel", "torch", "sampler"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_row_whose_logits_are_no_numbers_has_no_token_and_costs_no_other(
    way: str, dtype: torch.dtype, temperature: float, top_k: int
) -> None:
    """NaN of both signs, +inf, or -inf everywhere; -inf at some places, as masks have it, is a number."""
    if way == "kernel" and not kernels.available(dtype, torch.device("cpu")):
        pytest.skip("no kernel reads this type")
    sample = {"kernel": kernel_sampling.sample, "torch": sample_by_torch, "sampler": sampler.sample}[way]
    whole = torch.randn(1, 300, generator=torch.Generator().manual_seed(5)) - 9
    rows, wrong = [whole, whole.clone().index_fill(1, torch.tensor([7, 23]), -math.inf)], [False, False]
    for value in (math.nan, -math.nan, math.inf):
        for place in (0, 7, 299):
            rows += [whole.clone().index_fill(1, torch.tensor([place]), value)]
            wrong.append(True)
    rows, wrong = [*rows, torch.full((1, 300), -math.inf), whole], [*wrong, True, False]
    logits = torch.cat(rows).to(dtype)
    params = SamplingParams(temperature=temperature, top_p=0.9 if temperature else 1.0, top_k=top_k, logprobs=2)
    plain = SamplingParams(temperature=temperature)
    for make in (
        lambda row: RowSampling(params, row),
        lambda row: RowSampling(plain, row),
        lambda row: RowSampling(plain, row, allowed=Allowed({5, 9}, True)),
        lambda row: RowSampling(plain, row, allowed=Allowed({5, 9}, False)),
        lambda row: RowSampling(plain, row, barred=[3]),
    ):
        states = [make(row) for row in range(len(rows))]
        for logprobs in (True, False):
            tokens = sample(logits, states, logprobs=logprobs).tokens
            assert [token == NO_TOKEN for token in tokens] == wrong
            good = [row for row in range(len(rows)) if not wrong[row]]
            alone = sample(logits[good].contiguous(), [states[row] for row in good], logprobs=logprobs).tokens
            assert [tokens[row] for row in good] == alone and min(alone) >= 0
