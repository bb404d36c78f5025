from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from actors.engine.sampling import row_key, sample, uniforms
from actors.engine.types import SamplingParams


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


def test_keys_differ_by_every_part() -> None:
    keys = {
        row_key(*parts) for parts in [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    }
    assert len(keys) == 5
    assert row_key(0, "a", 0) == row_key(0, "a", 0)


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int) -> torch.Tensor:
    keys = [row_key(3, "f", row) for row in range(draws)]
    tokens, _ = sample(logits.expand(draws, -1), [params] * draws, keys, [0] * draws)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def assert_drawn_from(logits: torch.Tensor, params: SamplingParams, wanted: torch.Tensor) -> None:
    """Chi-square against the exact distribution, at one in a million."""
    draws = 20_000
    seen = frequencies(logits, params, draws)
    possible = wanted > 0
    assert seen[~possible].sum() == 0
    expected = wanted[possible].double() * draws
    statistic = ((seen[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4.9 * math.sqrt(2 * freedom) + 15


LOGITS = torch.tensor([[2.0, 1.6, 1.5, 0.3, -0.2, -1.0, 0.9, 0.0]])


def test_temperature_draws_the_exact_distribution() -> None:
    for temperature in (0.5, 1.0, 2.0):
        assert_drawn_from(LOGITS, SamplingParams(temperature=temperature), (LOGITS / temperature).softmax(-1)[0])


def test_top_k_and_top_p_equal_the_library() -> None:
    for top_k, top_p in ((3, 1.0), (0, 0.7), (5, 0.6), (0, 0.999), (1, 1.0), (0, 1e-6)):
        wanted = LOGITS / 0.8
        if top_k:
            wanted = TopKLogitsWarper(top_k)(torch.tensor([[0]]), wanted)
        if top_p < 1:
            wanted = TopPLogitsWarper(top_p)(torch.tensor([[0]]), wanted)
        assert_drawn_from(LOGITS, SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p), wanted.softmax(-1)[0])


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.5]), st.integers(0, 4), st.sampled_from([1.0, 0.5])),
        min_size=2,
        max_size=6,
    ),
    st.integers(0, 10**9),
)
def test_a_row_draws_the_same_whoever_its_neighbours_are(rows: list[tuple[float, int, float]], seed: int) -> None:
    logits = torch.randn(len(rows), 31, generator=torch.Generator().manual_seed(seed))
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in rows]
    keys = [row_key(seed, "f", row) for row in range(len(rows))]
    together, logprobs = sample(logits, params, keys, list(range(len(rows))))
    for row in range(len(rows)):
        token, logprob = sample(logits[row : row + 1], [params[row]], [keys[row]], [row])
        assert token.item() == together[row].item()
        torch.testing.assert_close(logprob[0], logprobs[row])


def test_logprobs() -> None:
    tokens, logprobs = sample(LOGITS, [SamplingParams()], [0], [0])
    assert tokens.item() == 0
    torch.testing.assert_close(logprobs[0], LOGITS.log_softmax(-1)[0, 0])
    tokens, logprobs = sample(LOGITS, [SamplingParams(temperature=1.0, top_k=2)], [5], [0])
    two = LOGITS[0, :2].softmax(-1)
    torch.testing.assert_close(logprobs[0], two[tokens.item()].log())
