"""Exact mode: whatever is drafted, the answers are full depth's own."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import STOP, answer, any_schedule, requests, thoroughly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import oracle, oracle_answers
from test_engine import refill
from tiny_models import CONTEXT, LAYERS, tiny_model

from actors.engine.constraint import Constraint
from actors.engine.cpu import library
from actors.engine.decoder import Decoder
from actors.engine.draft_length import FIRST, MOST_DRAFTS, DraftLength, expected_tokens
from actors.engine.engine import Engine
from actors.engine.exact import ExactEngine, draft_layers
from actors.engine.label_trie import ChoiceTrie
from actors.engine.row import sample_rows
from actors.engine.schedule import Schedule, ScheduleSpec
from actors.engine.types import Completion, FinishReason, Request, SamplingParams

FULL = ScheduleSpec().build(LAYERS)
HALF = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


class Lengths(DraftLength):
    """Drafts of each round as given, again and again."""

    def __init__(self, counts: Sequence[int]) -> None:
        super().__init__()
        self.counts, self.round = counts, 0

    def choose(self, rows: int) -> int:
        self.round += 1
        return self.counts[self.round % len(self.counts)]

    def stepped(self, *_: object) -> None:
        pass

    def drafted(self, *_: object, **__: object) -> None:
        pass


def exact(decoder: Decoder, drafts: Schedule = HALF, counts: Sequence[int] = (3,), **options: object) -> ExactEngine:
    return ExactEngine(
        decoder, FULL, options.pop("stop", STOP), drafter=options.pop("drafter", decoder), drafts=drafts,
        length=Lengths(counts), **options
    )  # type: ignore[arg-type]  # fmt: skip


def test_answers_equal_the_oracle_at_full_depth(decoder: Decoder, library: Decoder) -> None:
    """Of every family, greedy and sampled rows together; with the layers of the CPU path and with the library's."""
    rows = requests(5, seed=3) + requests(5, seed=3, sampled=True)
    for layers in (decoder, library):
        engine = exact(layers, counts=(3, 1, 0, 5))
        answers = answer(engine, rows, max_rows=5)
        for row, got in zip(rows, answers, strict=True):
            assert list(got.token_ids) == oracle(library, FULL, row, STOP, got.token_ids)
        stats = engine.take_stats()
        assert 0 < stats.accepted_tokens <= stats.drafted_tokens < stats.verified_tokens
        assert stats.decode_steps == sum(len(got.token_ids) - 1 for got in answers)
        assert stats.layer_steps == stats.full_layer_steps == LAYERS * stats.decode_steps


def test_rows_admitted_in_mid_flight_equal_the_oracle(decoder: Decoder, library: Decoder) -> None:
    rows = requests(10, seed=3, sampled=True)
    got = [list(one.token_ids) for one in refill(exact(decoder, counts=(2, 4)), rows, 5, random.Random(7))]
    assert got == oracle_answers(library, FULL, rows, STOP, got)


@thoroughly
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drafts=any_schedule(),
    counts=st.lists(st.integers(0, MOST_DRAFTS), min_size=1, max_size=5),
    seed=st.integers(0, 10**6),
)
def test_any_drafts_equal_the_oracle(
    decoder: Decoder, library: Decoder, drafts: Schedule, counts: list[int], seed: int
) -> None:
    rows = requests(4, seed=seed, sampled=True, most_new=10, longest=12)
    for row, got in zip(rows, answer(exact(decoder, drafts, counts), rows), strict=True):
        assert list(got.token_ids) == oracle(library, FULL, row, STOP, got.token_ids)


def alike(got: Completion, want: Completion) -> None:
    """All fields equal, log-probabilities up to rounding."""
    assert got.logprobs is not None and want.logprobs is not None
    assert replace(got, cumulative_logprob=0, logprobs=(), choice_probability=0) == replace(
        want, cumulative_logprob=0, logprobs=(), choice_probability=0
    )
    assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
    assert [one.token for one in got.logprobs] == [one.token for one in want.logprobs]
    for one, other in zip(got.logprobs, want.logprobs, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    if want.choice_probability is not None:
        assert got.choice_probability == pytest.approx(want.choice_probability, abs=1e-4)


class Endings:
    """A row ends behind a token of a given remainder: what a stop string may do."""

    def ended(self, tokens: Sequence[int]) -> bool:
        return len(tokens) > 4 and tokens[-1] % 7 == 3

    def cut(self, tokens: Sequence[int]) -> str:
        return ""


@thoroughly
def test_log_probabilities_stop_strings_choices_and_samples_are_full_depths(decoder: Decoder) -> None:
    sampling = SamplingParams(max_new_tokens=12, logprobs=4)
    labels: Constraint = ChoiceTrie([[7, 8, 9], [7, 8, 12], [20], [21, 22, 23, 24]], 2)
    rows = [
        Request([5, 6, 7], sampling),
        Request([5, 6, 7], replace(sampling, temperature=1.0), key=1),  # samples of one prompt
        Request([5, 6, 7], replace(sampling, temperature=1.0), key=2),
        Request([9, 60], sampling, ending=Endings()),
        Request([11, 3, 70], sampling, constraint=labels),
        Request([11, 3, 70], replace(sampling, temperature=1.0), key=3, constraint=labels),
    ]
    for got, want in zip(
        answer(exact(decoder, counts=(4,)), rows), answer(Engine(decoder, FULL, STOP), rows), strict=True
    ):
        alike(got, want)


@thoroughly
def test_rows_end_at_the_context(decoder: Decoder, library: Decoder) -> None:
    """Drafts may lie behind it, also behind the model's last position."""
    rows = [Request([7] * (CONTEXT - left), SamplingParams(max_new_tokens=50)) for left in (1, 3, 8)]
    got = answer(exact(decoder, counts=(MOST_DRAFTS,), stop=set()), rows)
    for left, row, one in zip((1, 3, 8), rows, got, strict=True):
        assert len(one.token_ids) == left and one.finish_reason == FinishReason.LENGTH
        assert list(one.token_ids) == oracle(library, FULL, row, set(), one.token_ids)


@thoroughly
def test_a_drafter_with_other_weights_changes_no_answer(decoder: Decoder, family: str) -> None:
    """As a speed adapter has them."""
    other = Decoder(tiny_model(family))
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    other.prepare_for_cpu()
    rows = requests(6, seed=5, sampled=True)
    got = answer(exact(decoder, counts=(3,), drafter=other), rows)
    assert [one.token_ids for one in got] == [one.token_ids for one in answer(Engine(decoder, FULL, STOP), rows)]


def test_perfect_drafts_are_all_accepted(decoder: Decoder) -> None:
    """Drafts of all layers are full depth's tokens: a round of 3 drafts yields 4 tokens of every row."""
    rows = [Request([4 + row, 9], SamplingParams(max_new_tokens=13, temperature=row % 2), key=row) for row in range(4)]
    engine = exact(decoder, FULL, (3,), stop=set())
    answer(engine, rows)
    stats = engine.take_stats()
    assert stats.accepted_tokens == stats.drafted_tokens == 4 * 9 and stats.verified_tokens == 4 * 12


def test_bfloat16_answers_are_those_of_full_depth_on_the_same_kernels() -> None:
    """One kernel computes a token alone and several tokens of a row: the same numbers in the same order. Families that
    have no such kernel verify token by token.
    """
    for family in ("llama", "opt", "qwen3", "gpt2", "gemma"):
        decoder = Decoder(tiny_model(family).bfloat16())
        decoder.prepare_for_cpu()
        if library.multiplies(torch.bfloat16, decoder.device):
            assert (decoder.stack is not None) == (family not in ("gpt2", "gemma"))
        rows = requests(12, seed=8, most_new=30) + requests(12, seed=8, sampled=True, most_new=30)
        want = answer(Engine(decoder, FULL, STOP), rows)
        for max_rows in (1, 7, 24):
            got = answer(exact(decoder, counts=(4, 2)), rows, max_rows=max_rows)
            assert [one.token_ids for one in got] == [one.token_ids for one in want]


@thoroughly
def test_memory_that_runs_out_within_a_round_changes_no_answer_and_no_count(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=1.0)
    rows, calls = [Request([5 + row, 9], sampling, key=row) for row in range(6)], itertools.count()

    def sampled(*given: Any, **options: Any) -> None:
        if next(calls) == 1:
            raise MemoryError
        sample_rows(*given, **options)

    monkeypatch.setattr("actors.engine.exact.sample_rows", sampled)
    engine = exact(decoder, counts=(4,))
    got = answer(engine, rows)
    assert [one.token_ids for one in got] == [one.token_ids for one in answer(Engine(decoder, FULL, STOP), rows)]
    stats = engine.take_stats()
    assert stats.out_of_memory == 1 and stats.decode_steps == sum(len(one.token_ids) - 1 for one in got)


def test_draft_layers_are_those_of_the_mean_depth() -> None:
    schedule = Schedule(LAYERS, (5, 3, 1), (3, 0, 5, 1, 4, 2), 0)
    assert draft_layers(schedule) == (0, 3, 5)
    assert draft_layers(FULL) == tuple(range(LAYERS))


def played(
    length: DraftLength, rows: int, plain: float, draft: float, token: float, acceptance: float, rounds: int = 1500
) -> tuple[float, float]:
    """Tokens a row per second of simulated rounds, and of plain steps."""
    seconds, tokens, owed = 0.0, 0, 0.0
    for _ in range(rounds):
        count = length.choose(rows)
        if count == 0:
            length.stepped(rows, plain)
            seconds, tokens = seconds + plain, tokens + 1
            continue
        owed += expected_tokens(count, acceptance)
        made, owed = math.floor(owed), owed - math.floor(owed)
        verify = plain + token * count
        length.drafted(
            rows, count, draft * count, verify, accepted=made - 1, judged=min(made, count), tokens=rows * made
        )
        seconds, tokens = seconds + draft * count + verify, tokens + made
    return tokens / seconds, 1 / plain


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 64),
    draft=st.floats(0.05, 1.0),
    token=st.floats(0.0, 1.0),
    acceptance=st.floats(0.0, 0.99),
)
def test_drafting_never_loses_and_finds_what_pays(rows: int, draft: float, token: float, acceptance: float) -> None:
    rate, plain = played(DraftLength(), rows, 1.0, draft, token, acceptance)
    best = max(expected_tokens(count, acceptance) / (1 + count * (draft + token)) for count in range(MOST_DRAFTS + 1))
    assert rate >= 0.98 * plain
    assert rate >= 0.8 * best


def test_a_length_is_chosen_for_each_number_of_rows() -> None:
    length = DraftLength()
    played(length, 2, 1.0, 0.1, 0.02, 0.9)
    played(length, 60, 1.0, 0.5, 0.9, 0.9)
    assert length.choose(2) > FIRST and length.choose(60) == 0
