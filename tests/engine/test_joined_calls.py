"""Calls whose rows follow each other without a gap: no answer changes, nothing is counted twice, few slots are idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import PREFIX, STOP, requests, with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, tiny_model

from actors.engine.cpu import library
from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import Call, Loop, generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Completion, Request, SamplingParams

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
HOW: dict[str, Any] = {"budget_bytes": 2**24, "max_rows": 6, "scheduler": "refill"}
needs_kernels = pytest.mark.skipif(
    not library.multiplies(torch.bfloat16, torch.device("cpu")), reason="needs AVX512-BF16 without AMX"
)


class Counting(Engine):
    """Counts steps, and the slots in them that held no row."""

    steps = idle = 0

    def step(self) -> list[tuple[int, Completion]]:
        self.steps, self.idle = self.steps + 1, self.idle + self._shape.rows - len(self.rows)
        return super().step()


@pytest.fixture(scope="module")
def plain() -> Decoder:
    return Decoder(tiny_model("llama"))


@pytest.fixture(scope="module")
def kernels() -> Decoder:
    return fastest_decoder(tiny_model("llama"))


@pytest.fixture(scope="module")
def half() -> Decoder:
    return fastest_decoder(tiny_model("llama").bfloat16())


def answer(
    engine: Engine, calls: Sequence[Sequence[Request]], prefix: Sequence[int] = (), **how: Any
) -> tuple[list[list[Completion]], list[Call]]:
    """Each call is submitted when the one before drains, as a second thread does."""
    scheduler = Loop(engine, **{**HOW, "joins_calls": True, **how})
    done: list[Call] = []

    def submit() -> None:
        number = len(done)
        if number < len(calls):
            done.append(scheduler.add(calls[number], prefix, on_drain=submit))

    submit()
    got = []
    for number in range(len(calls)):
        if number == len(done):
            submit()  # the one before had no time to drain
        got.append(scheduler.finish(done[number]))
    assert not engine.rows
    return got, done


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    budget_rows=st.integers(1, 12),
    seed=st.integers(0, 5),
    native=st.booleans(),
)
def test_joined_calls_have_the_answers_that_each_has_alone(
    plain: Decoder, kernels: Decoder, sizes: list[int], budget_rows: int, seed: int, native: bool
) -> None:
    calls = [requests(size, seed + number, sampled=True) for number, size in enumerate(sizes)]
    engine = Engine(kernels if native else plain, SCHEDULE, STOP)
    budget = budget_rows * engine.row_bytes(20, 14)
    got, done = answer(engine, calls, budget_bytes=budget)
    assert engine.stats.cache_bytes <= budget
    for rows, answers, call in zip(calls, got, done, strict=True):
        alone = Engine(plain, SCHEDULE, STOP)
        want = generate(alone, rows, **HOW)
        assert [one.token_ids for one in answers] == [one.token_ids for one in want]
        counted = call.stats
        assert counted.generated_tokens == sum(len(one.token_ids) for one in answers)
        assert counted.decode_steps == sum(len(one.token_ids) - 1 for one in answers)
        assert counted.layer_steps == alone.stats.layer_steps
        assert counted.full_layer_steps == alone.stats.full_layer_steps
        assert counted.prompt_tokens == alone.stats.prompt_tokens
    for name in ("batches", "padded_prompt_tokens", "decode_steps", "generated_tokens"):
        assert sum(getattr(call.stats, name) for call in done) == getattr(engine.stats, name)
    assert sum(call.stats.decode_seconds for call in done) == pytest.approx(engine.stats.decode_seconds)
    assert sum(call.stats.prefill_seconds for call in done) == pytest.approx(engine.stats.prefill_seconds)


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 25), min_size=2, max_size=4), seed=st.integers(0, 5), shared=st.booleans())
def test_where_calls_join_in_16_bits_no_bit_of_an_answer_changes(
    half: Decoder, sizes: list[int], seed: int, shared: bool
) -> None:
    """Log-probabilities included; so a resumed job, whose first shard has no predecessor, writes the same bytes."""
    assert half.rows_independent
    calls = [
        with_prefix(size, seed + number) if shared else requests(size, seed + number, sampled=True)
        for number, size in enumerate(sizes)
    ]
    prefix = PREFIX if shared else ()
    got, _ = answer(Engine(half, SCHEDULE, STOP), calls, prefix)
    for rows, answers in zip(calls, got, strict=True):
        assert answers == generate(Engine(half, SCHEDULE, STOP), rows, prefix=prefix, **HOW)


def test_few_slots_are_idle_where_calls_join(kernels: Decoder) -> None:
    """Long-tailed answers: of 8 calls of 48 rows in 6 slots, the tails of seven are filled by the next call's rows."""
    calls = []
    for call in range(8):
        limits = [3 + (row * 7 + call) % 9 + (25 if row % 8 == 0 else 0) for row in range(48)]
        calls.append(
            [
                Request([5 + (row + call) % 9] * (4 + (row + call) % 5), SamplingParams(max_new_tokens=limit), row)
                for row, limit in enumerate(limits)
            ]
        )
    idle = {}
    for joins in (False, True):
        engine = Counting(kernels, SCHEDULE, ())
        _, done = answer(engine, calls, joins_calls=joins)
        assert sum(call.stats.decode_steps for call in done) == engine.stats.decode_steps
        idle[joins] = engine.idle / (6 * engine.steps)
    assert idle[True] < 0.5 * idle[False], idle


def test_runs_of_one_call_follow_each_other_without_a_gap(kernels: Decoder) -> None:
    """Prompts of 40 and of 6 tokens make two runs; the second one's slots fit the memory of the first."""
    rows = [Request([7] * 40, SamplingParams(max_new_tokens=3 + row), row) for row in range(6)]
    rows += [Request([9] * 6, SamplingParams(max_new_tokens=4), 10 + row) for row in range(12)]
    engine = Counting(kernels, SCHEDULE, ())
    got = generate(engine, rows, **HOW)
    alone = [generate(Engine(kernels, SCHEDULE, ()), [row], **HOW)[0] for row in rows]
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
    assert engine.stats.batches == 2 and engine.steps < 7 + 2 * 3  # one after the other


def test_a_call_that_reports_its_batches_joins_no_other(kernels: Decoder) -> None:
    scheduler = Loop(Engine(kernels, SCHEDULE, ()), **HOW, joins_calls=True)
    seen: list[Sequence[int]] = []
    drained: list[bool] = []
    first = scheduler.add(requests(9, 1), on_batch=seen.append, on_drain=lambda: drained.append(True))
    second = scheduler.add(requests(3, 2))
    scheduler.finish(first)
    assert not second.completions and not drained and {row for batch in seen for row in batch} == set(range(9))
    scheduler.finish(second)


def test_memory_that_runs_out_in_joined_calls_costs_no_answer(
    kernels: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step that both calls share: both run again apart, each with as many rows in flight as before."""
    calls = [requests(14, 3), requests(14, 4)]
    want = [[one.token_ids for one in generate(Engine(kernels, SCHEDULE, ()), rows, **HOW)] for rows in calls]
    engine, failed = Engine(kernels, SCHEDULE, ()), []
    step = Engine.step
    keys = {row.key: number for number, rows in enumerate(calls) for row in rows}

    def failing(self: Engine) -> list[tuple[int, Completion]]:
        calls_in_flight = {keys[row.request.key] for row in self.rows}
        if len(calls_in_flight) == 2:
            failed.append(calls_in_flight)
            raise torch.OutOfMemoryError("both")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    got, done = answer(engine, calls)
    assert len(failed) == 1
    assert [[one.token_ids for one in answers] for answers in got] == want
    assert sum(call.stats.decode_steps for call in done) == sum(len(ids) - 1 for answers in want for ids in answers)


def test_an_error_ends_the_calls_in_flight_and_no_other(kernels: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(kernels, SCHEDULE, ())
    scheduler = Loop(engine, **HOW, joins_calls=True)
    first, second = scheduler.add(requests(3, 1)), scheduler.add(requests(3, 2))
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "admit", lambda *given: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            scheduler.finish(first)
    with pytest.raises(RuntimeError, match="broken"):
        scheduler.finish(first)
    assert len(scheduler.finish(second)) == 3
