from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.engine.constraints.constraint import AllowedTokens
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.sampling import sampler as sampling
from actors.engine.sampling.sampler import _adjust, narrow, sample, sample_by_torch, uniforms
from actors.engine.sampling.state import RowSampling
from actors.engine.types import SamplingParams, row_key


def splitmix64(key: int, position: int) -> float:
    """The reference, in Python integers."""
    mask = 2**64 - 1
    bits = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return ((bits ^ (bits >> 31)) >> 11) / 2**53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6))
def test_random_numbers_are_splitmix64(key: int, position: int) -> None:
    assert uniforms(torch.tensor([key]), torch.tensor([position])).item() == splitmix64(key, position)


def assert_chi_square(seen: torch.Tensor, wanted: torch.Tensor) -> None:
    draws = seen.sum()
    possible = wanted > 0
    assert seen[~possible].sum() == 0
    expected = wanted[possible].double() * draws
    statistic = ((seen[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4.9 * math.sqrt(2 * freedom) + 15


LOGITS = torch.tensor([[2.0, 1.6, 1.5, 0.3, -0.2, -1.0, 0.9, 0.0]])


def library(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' own processors leave of logits [1, V], as probabilities [V]."""
    nothing = torch.tensor([[0]])
    wanted = TemperatureLogitsWarper(params.temperature)(nothing, logits)
    if params.top_k:
        wanted = TopKLogitsWarper(params.top_k)(nothing, wanted)
    if params.top_p < 1:
        wanted = TopPLogitsWarper(params.top_p)(nothing, wanted)
    if params.min_p > 0:
        wanted = MinPLogitsWarper(params.min_p)(nothing, wanted)
    return wanted.softmax(-1)[0]


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 12), st.floats(0.05, 1), st.floats(0, 1), st.sampled_from([0.3, 1.0, 3.0]))
def test_what_can_be_drawn_is_what_the_library_leaves(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    """The whole distribution, read off by drawing at every random number of a fine grid."""
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    limits = (
        torch.tensor([params.top_k]),
        *(torch.tensor([one], dtype=torch.float64) for one in (params.top_p, params.min_p)),
    )
    probabilities = narrow(logits / temperature, *limits)
    ours = (probabilities / probabilities.sum())[0].float()
    torch.testing.assert_close(ours, library(logits, params), atol=1e-5, rtol=1e-4)


HISTORY = ([3, 5, 5, 1], [2, 2, 5, 0, 2])  # prompt, answer so far


def with_history(params: SamplingParams) -> RowSampling:
    state = RowSampling.begin(params, 7, HISTORY[0])
    for token in HISTORY[1]:
        state.add(token)
    return state


def test_penalties_equal_the_library_and_their_definitions() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7)
    before = torch.tensor([HISTORY[0] + HISTORY[1]])
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(before, LOGITS.clone())
    adjusted = _adjust(LOGITS, [with_history(params)])
    torch.testing.assert_close(adjusted, wanted)
    # OpenAI's: mu - count * frequency - (count > 0) * presence, over the answer alone
    params = SamplingParams(temperature=1.0, presence_penalty=0.6, frequency_penalty=-0.25)
    counts = torch.tensor([[1.0, 0, 3, 0, 0, 1, 0, 0]])
    adjusted = _adjust(LOGITS, [with_history(params)])
    torch.testing.assert_close(adjusted, LOGITS - counts * -0.25 - (counts > 0) * 0.6)


def only(*tokens: int) -> AllowedTokens:
    return ChoiceTrie([(token,) for token in tokens], []).begin()


def test_barred_tokens_never_come_and_allowed_ones_alone_do() -> None:
    greedy, free = SamplingParams(), SamplingParams(temperature=1.0)
    rows = [RowSampling(greedy, 1, barred=(0, 1)), RowSampling(greedy, 1, allowed=only(4, 7)), RowSampling(greedy, 1)]
    drawn = sample(LOGITS.expand(3, -1), rows)
    assert drawn.tokens == [2, 7, 0]
    whole, two = LOGITS.log_softmax(-1)[0], LOGITS[0, [4, 7]].log_softmax(-1)
    torch.testing.assert_close(torch.tensor(drawn.logprobs), whole[[2, 7, 0]])
    torch.testing.assert_close(torch.tensor(drawn.choice_logprobs[1]), two[1])
    keys = [row_key(5, "f", row) for row in range(20_000)]
    drawn = sample(LOGITS.expand(20_000, -1), [RowSampling(free, key, allowed=only(1, 4, 7)) for key in keys])
    wanted = torch.zeros(8).index_copy(0, torch.tensor([1, 4, 7]), LOGITS[0, [1, 4, 7]].softmax(-1))
    assert_chi_square(torch.bincount(torch.tensor(drawn.tokens), minlength=8).double(), wanted)


def test_a_row_whose_possible_tokens_all_have_probability_0_costs_no_other_row() -> None:
    greedy, logits = SamplingParams(), torch.zeros(3, 8)
    logits[1, [4, 7]] = -torch.inf
    rows = [RowSampling(greedy, 1, barred=range(8)), RowSampling(greedy, 1, allowed=only(4, 7)), RowSampling(greedy, 1)]
    assert sample(logits, rows).tokens == sample_by_torch(logits, rows).tokens == [0, 4, 0]


def test_logprobs_are_the_models_own() -> None:
    whole = LOGITS.log_softmax(-1)[0]
    params = SamplingParams(temperature=1.7, top_k=2, presence_penalty=1, logprobs=3)
    drawn = sample(LOGITS.expand(2, -1), [with_history(params), RowSampling(SamplingParams(logprobs=0), 0)])
    torch.testing.assert_close(torch.tensor(drawn.logprobs), whole[drawn.tokens])
    assert drawn.top[0].token == drawn.tokens[0] and [token for token, _ in drawn.top[0].top] == [0, 1, 2]
    torch.testing.assert_close(torch.tensor([value for _, value in drawn.top[0].top]), whole[:3])
    assert drawn.top[1].top == () and abs(drawn.top[1].logprob - whole[0].item()) < 1e-6


@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(-5, 5), st.sampled_from([torch.bfloat16, torch.float32]))
def test_greedy_takes_the_first_of_the_likeliest(seed: int, vocabulary: int, highest: int, dtype: torch.dtype) -> None:
    """With bfloat16 logits ties are common; whether logprobs are asked for changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = (highest - torch.randint(7, (4, vocabulary), generator=generator)).to(dtype)
    rows = [RowSampling(SamplingParams(), row) for row in range(4)]
    want = [values.index(max(values)) for values in logits.tolist()]
    told, silent = (sample(logits, rows, logprobs=asked) for asked in (True, False))
    assert told.tokens == silent.tokens == want
    assert told.logprobs == pytest.approx(logits.float().log_softmax(-1)[range(4), want].tolist(), abs=1e-5)
    assert all(math.isnan(one) for one in silent.logprobs)


@pytest.mark.parametrize("many", [1, 2 * 40, 10**9])
def test_rows_are_drawn_the_same_in_any_number_of_parts(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"top_p": 0.7, "temperature": 1.0}, {"logprobs": 3}]
    rows = [RowSampling.begin(SamplingParams(**ways[row % 4]), 7 * row, [3, 4]) for row in range(9)]
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    whole = sample_by_torch(logits, rows)
    monkeypatch.setattr(sampling, "DRAWN_NUMBERS", many)
    parts = sample_by_torch(logits, rows)
    assert (parts.tokens, parts.logprobs, parts.top) == (whole.tokens, whole.logprobs, whole.top)
    assert set(parts.top) == {3, 7}
