"""Which rows are in flight together, and that it changes no answer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import SPECS, STOP, every_case, generate, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from tiny_models import LAYERS, tiny_model

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import SCHEDULERS
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.scheduler import SPREAD, Run, merge, plan_batches, smaller
from actors.engine.types import Completion, Request, SamplingParams

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


@every_case
def test_refilled_places_equal_the_oracle(decoder: Decoder, library: Decoder, spec: int) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(5, seed=3) + requests(10, seed=3, sampled=True)
    engine = Engine(decoder, schedule, STOP)
    answers = generate(engine, rows, budget_bytes=2**40, max_rows=5, scheduler="refill")
    for row, got in zip(rows, answers, strict=True):
        assert list(got.token_ids) == oracle(library, schedule, row, STOP, got.token_ids)


class Watched(Engine):
    """Looks, before every pass, whether all rows in flight had been told of."""

    told: Sequence[int] = ()
    most = passes = 0
    admitted: list[list[int]]

    def open(self, *shape: Any) -> None:
        assert self.told  # memory that is taken may kill the process
        super().open(*shape)

    def look(self, newcomers: Sequence[Request] = ()) -> None:
        flying = [*(row.request.key for row in self.rows), *(one.key for one in newcomers)]
        assert set(flying) <= set(self.told)
        self.most = max(self.most, len(flying))
        self.passes += 1

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        self.look(requests)
        self.admitted.append([one.key for one in requests])
        return super().admit(requests, prefix)

    def step(self) -> list[tuple[int, Completion]]:
        self.look()
        return super().step()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=30),
    max_rows=st.integers(1, 12),
    budget_rows=st.integers(1, 12),
    scheduler=st.sampled_from(SCHEDULERS),
)
def test_rows_in_flight_were_told_of_and_fit(
    llama: Decoder, rows: list[tuple[int, int]], max_rows: int, budget_rows: int, scheduler: str
) -> None:
    engine = Watched(llama, SCHEDULE, ())
    engine.admitted = []
    wanted = [
        Request([5] * prompt, SamplingParams(max_new_tokens=new), key=row) for row, (prompt, new) in enumerate(rows)
    ]
    budget = budget_rows * engine.row_bytes(30, 12)

    def tell(places: Sequence[int]) -> None:
        assert list(places) == sorted(set(places))
        engine.told = places

    got = generate(engine, wanted, budget_bytes=budget, max_rows=max_rows, scheduler=scheduler, on_batch=tell)
    assert [len(one.token_ids) for one in got] == [new for _, new in rows]
    assert engine.most <= max_rows and engine.stats.cache_bytes <= budget


def test_long_answers_that_nobody_foresaw_do_not_hold_up_the_others(llama: Decoder) -> None:
    """All may be 50 tokens long; one of eight is, the rest end at their third."""
    ends = {row: [] if row % 8 == 0 else list(range(llama.vocab_size)) for row in range(48)}
    rows = [
        Request([5, 6], SamplingParams(max_new_tokens=50, min_new_tokens=3, stop_token_ids=tuple(ends[row])), row)
        for row in range(48)
    ]
    passes = {}
    for scheduler in SCHEDULERS:
        engine = Watched(llama, SCHEDULE, ())
        engine.told, engine.admitted = range(48), []
        generate(engine, rows, budget_bytes=2**40, max_rows=8, scheduler=scheduler)
        passes[scheduler] = engine.passes
    assert passes["refill"] < 0.4 * passes["lock_step"], passes


def bytes_of(prompt_tokens: int, max_new_tokens: int) -> int:
    return 3 * prompt_tokens + 2 * max_new_tokens


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.integers(0, 3)), max_size=60),
    st.integers(450, 3000),
    st.integers(1, 20),
)
def test_rows_of_a_group_follow_each_other_in_full_batches(
    rows: list[tuple[int, int, int]], budget: int, most: int
) -> None:
    prompts, news, groups = ([row[part] for row in rows] for part in range(3))
    batches = plan_batches(prompts, news, row_bytes=bytes_of, budget_bytes=budget, max_rows=most, groups=groups)
    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    order = [groups[row] for batch in batches for row in batch]
    assert len(list(itertools.groupby(order))) == len(set(groups))

    def size(batch: list[int]) -> int:
        return len(batch) * bytes_of(max(prompts[row] for row in batch), max(news[row] for row in batch))

    for batch, then in itertools.pairwise([*batches, []]):
        assert 1 <= len(batch) <= most and size(batch) <= budget
        assert not then or len(batch) == most or size([*batch, then[0]]) > budget


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    most_new=st.integers(1, 50),
    budget=st.integers(400, 5000),
    max_rows=st.integers(1, 20),
)
def test_runs_hold_every_row_once_and_fit_the_budget(
    lengths: list[int], most_new: int, budget: int, max_rows: int
) -> None:
    def row_bytes(prompt: int, new: int) -> int:
        return prompt + new

    new_tokens = [1 + row % most_new for row in range(len(lengths))]
    batches = plan_batches(lengths, new_tokens, row_bytes=row_bytes, budget_bytes=budget, max_rows=max_rows)
    limits = dict(enumerate(new_tokens))
    runs = merge([Run(one, len(one)) for one in batches], dict(enumerate(lengths)), limits, row_bytes, budget)
    assert sorted(row for run in runs for row in run.rows) == list(range(len(lengths)))
    for run in runs:
        longest, new = max(lengths[row] for row in run.rows), max(limits[row] for row in run.rows)
        assert 1 <= run.capacity <= max_rows and run.capacity * row_bytes(longest, new) <= budget
    first = [batch[0] for batch in batches]
    for run in runs:  # no place is much longer than the longest of each batch that was merged into it
        assert all(lengths[run.rows[0]] <= SPREAD * lengths[row] for row in run.rows if row in first)


@given(rows=st.integers(1, 40), capacity=st.integers(1, 40))
def test_what_does_not_fit_ends_in_single_rows(rows: int, capacity: int) -> None:
    """No row is lost, and none is tried for ever."""
    left, alone, tries = [Run(list(range(rows)), min(rows, capacity))], [], 0
    while left:
        run = left.pop()
        tries += 1
        if len(run.rows) == 1:
            alone += run.rows
        else:
            left += smaller(run)
    assert sorted(alone) == list(range(rows)) and tries <= 2 * rows + 8


def test_what_has_ended_is_kept_when_memory_runs_out(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows in four places, memory runs out once, in the middle: only rows that had not ended run again."""
    rows = [Request([5, 6], SamplingParams(max_new_tokens=6), key) for key in range(40)]
    engine = Watched(llama, SCHEDULE, ())
    engine.told, engine.admitted = range(40), []
    plain, calls = llama.step, 0

    def failing(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 23:
            raise torch.OutOfMemoryError("once")
        return plain(*given)

    monkeypatch.setattr(llama, "step", failing)
    got = generate(engine, rows, budget_bytes=2**40, max_rows=4, scheduler="refill")
    assert all(len(one.token_ids) == 6 for one in got)
    again = [key for group in engine.admitted for key in group]
    assert 40 < len(again) <= 44
    stats = engine.take_stats()
    assert (stats.decode_steps, stats.generated_tokens, stats.out_of_memory) == (40 * 5, 40 * 6, 1)
    assert stats.layer_steps == 40 * SCHEDULE.layer_steps(5)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_row_that_overflows_leaves_nothing_to_its_successor(prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are no numbers; a row that takes its place must not be changed by them, though they are masked."""
    llama = (fastest_decoder if prepared else Decoder)(tiny_model("llama"))
    sampling = SamplingParams(max_new_tokens=8)
    rows = [Request([5] * 8, sampling, 0), *(Request([9 + row] * 5, sampling, row) for row in range(1, 6))]
    want = [generate(Engine(llama, SCHEDULE, ()), [row], budget_bytes=2**40, max_rows=1)[0] for row in rows]
    engine = Engine(llama, SCHEDULE, ())
    plain = engine.executor.decode

    def overflowing(*given: Any, **more: Any) -> torch.Tensor:
        found, cache = plain(*given, **more), engine.executor._cache
        if engine.rows[0].request.key == 0:
            for both in filter(lambda one: one is not None, cache.layers if prepared else cache.buffers):
                both[0][0] = both[1][0] = torch.nan
        return found

    monkeypatch.setattr(engine.executor, "decode", overflowing)
    got = generate(engine, rows, budget_bytes=2**40, max_rows=1, scheduler="refill")
    assert engine.stats.batches == 1
    assert [one.token_ids for one in got[1:]] == [one.token_ids for one in want[1:]]
