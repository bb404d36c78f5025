"""Exact mode: whatever is drafted, the answers are full depth's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
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

from actors.engine.constraints.constraint import Constraint
from actors.engine.constraints.label_trie import ChoiceTrie
from actors.engine.cpu import library
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.exact.draft_length import MOST_DRAFTS, DraftLength, Plan, Round
from actors.engine.exact.engine import Drafter, ExactEngine, draft_layers
from actors.engine.row import sample_rows
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import SCHEDULERS, Completion, FinishReason, Request, SamplingParams

FULL = ScheduleSpec().build(LAYERS)
HALF = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


class Lengths(DraftLength):
    """Drafts of each round as given, again and again."""

    def __init__(self, counts: Sequence[int], looked_up: Sequence[int]) -> None:
        super().__init__()
        self.counts, self.looked_up_counts, self.round = counts, looked_up, 0

    def choose(self, rows: int) -> Plan:
        self.round += 1
        count, most = (many[self.round % len(many)] for many in (self.counts, self.looked_up_counts))
        return Plan(count, most)

    def looked(self, *_: object) -> None:
        pass

    def stepped(self, *_: object) -> None:
        pass

    def drafted(self, done: Round) -> None:
        assert done.accepted <= done.judged <= done.drafted


def exact(
    decoder: Decoder,
    drafts: Schedule | None = HALF,
    counts: Sequence[int] = (3,),
    looked_up: Sequence[int] = (0,),
    *,
    stop: Collection[int] = STOP,
    drafter: Decoder | None = None,
    **options: Any,
) -> ExactEngine:
    """counts, looked_up: of drafts by layers, and by lookup, in each round."""
    own = None if drafts is None else Drafter(drafter or decoder, drafts)
    counts = (0,) if drafts is None else counts
    return ExactEngine(decoder, FULL, stop, drafter=own, length=Lengths(counts, looked_up), **options)


def copying(count: int, seed: int) -> list[Request]:
    """Random rows over few tokens, which come again in prompts and answers."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        prompt = [rng.choice((11, 12, 13)) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, 16),
            min_new_tokens=0,
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_k=3,
            repetition_penalty=rng.choice([1.0, 1.2, 0.1, 0.1]),  # below 1: the row repeats itself
        )
        rows.append(Request(prompt, sampling, key=rng.getrandbits(62)))
    return rows


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


def test_what_is_looked_up_changes_no_answer(decoder: Decoder, library: Decoder) -> None:
    """Of every family, without layers that draft and with them."""
    rows = copying(6, seed=3)
    for drafts in (None, HALF):
        engine = exact(decoder, drafts, counts=(0, 2), looked_up=(MOST_DRAFTS, 1, 0, 3))
        answers = answer(engine, rows)
        for row, got in zip(rows, answers, strict=True):
            assert list(got.token_ids) == oracle(library, FULL, row, STOP, got.token_ids)
        stats = engine.take_stats()
        assert 0 < stats.accepted_lookup_tokens <= stats.looked_up_tokens < stats.verified_lookup_tokens
        assert (stats.drafted_tokens > 0) == (drafts is not None)
        assert stats.decode_steps == sum(len(got.token_ids) - 1 for got in answers)


@thoroughly
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drafts=st.none() | any_schedule(),
    counts=st.lists(st.integers(0, MOST_DRAFTS), min_size=1, max_size=5),
    looked_up=st.lists(st.integers(0, MOST_DRAFTS), min_size=1, max_size=4),
    copies=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_drafts_equal_the_oracle(
    decoder: Decoder,
    library: Decoder,
    drafts: Schedule | None,
    counts: list[int],
    looked_up: list[int],
    copies: bool,
    seed: int,
) -> None:
    rows = copying(4, seed) if copies else requests(4, seed=seed, sampled=True, most_new=10, longest=12)
    engine = exact(decoder, drafts, counts, looked_up)
    for row, got in zip(rows, answer(engine, rows, max_rows=1 + seed % 4), strict=True):
        assert list(got.token_ids) == oracle(library, FULL, row, STOP, got.token_ids)


@thoroughly
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), scheduler=st.sampled_from(SCHEDULERS), max_rows=st.integers(1, 7))
def test_measured_lengths_equal_the_oracle(
    decoder: Decoder, library: Decoder, seed: int, scheduler: str, max_rows: int
) -> None:
    """Lengths that this machine's seconds choose, under both schedulers."""
    rows = copying(5, seed) + requests(4, seed=seed, sampled=True)
    engine = ExactEngine(decoder, FULL, STOP, drafter=Drafter(decoder, HALF))
    answers = generate(engine, rows, budget_bytes=2**40, max_rows=max_rows, scheduler=scheduler)
    for row, got in zip(rows, answers, strict=True):
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
    wanted = answer(Engine(decoder, FULL, STOP), rows)
    for engine in (exact(decoder, counts=(4,)), exact(decoder, None, looked_up=(5,)), exact(decoder, looked_up=(3,))):
        for got, want in zip(answer(engine, rows), wanted, strict=True):
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
        rows = requests(12, seed=8, most_new=30) + requests(6, seed=8, sampled=True, most_new=30) + copying(6, seed=8)
        want = answer(Engine(decoder, FULL, STOP), rows)
        for max_rows, drafts, looked_up in ((1, HALF, (0,)), (7, HALF, (3, 0)), (24, None, (MOST_DRAFTS,))):
            for logprobs in (True, False):  # without, greedy rows draft and verify in one native call each
                engine = exact(decoder, drafts, (4, 2), looked_up, cumulative_logprob=logprobs)
                got = answer(engine, rows, max_rows=max_rows)
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

    monkeypatch.setattr("actors.engine.exact.engine.sample_rows", sampled)
    engine = exact(decoder, counts=(4,))
    got = answer(engine, rows)
    assert [one.token_ids for one in got] == [one.token_ids for one in answer(Engine(decoder, FULL, STOP), rows)]
    stats = engine.take_stats()
    assert stats.out_of_memory == 1 and stats.decode_steps == sum(len(one.token_ids) - 1 for one in got)


def test_draft_layers_are_those_of_the_mean_depth() -> None:
    schedule = Schedule(LAYERS, (5, 3, 1), (3, 0, 5, 1, 4, 2), 0)
    assert draft_layers(schedule) == (0, 3, 5)
    assert draft_layers(FULL) == tuple(range(LAYERS))
