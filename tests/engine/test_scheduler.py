"""Which rows are in flight together, and that it changes no answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import LAYERS, tiny_model
from oracle import oracle
from test_engine import SPECS, STOP, every_case, requests

from actors.engine.batching import plan_batches
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule import ScheduleSpec
from actors.engine.scheduler import SCHEDULERS, SPREAD, Run, _merge, _smaller, generate
from actors.engine.types import Completion, Request, SamplingParams

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


@every_case
def test_refilled_places_equal_the_oracle(decoder: Decoder, spec: int) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(12, seed=13) + requests(12, seed=14, sampled=True)
    engine = Engine(decoder, schedule, STOP)
    answers = generate(engine, rows, budget_bytes=2**40, max_rows=5, scheduler="refill")
    for row, got in zip(rows, answers, strict=True):
        assert list(got.token_ids) == oracle(decoder, schedule, row, STOP)


class Watched(Engine):
    """Looks, before every pass, whether all rows in flight had been told of."""

    told: Sequence[int] = ()
    most = passes = 0

    def look(self, newcomers: Sequence[Request] = ()) -> None:
        flying = [*(row.request.key for row in self.rows), *(one.key for one in newcomers)]
        assert set(flying) <= set(self.told)
        self.most = max(self.most, len(flying))
        self.passes += 1

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        self.look(requests)
        return super().admit(requests, prefix)

    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        self.look()
        return super().step(last=last)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return Decoder(tiny_model("llama"))


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
        engine.told = range(48)
        generate(engine, rows, budget_bytes=2**40, max_rows=8, scheduler=scheduler)
        passes[scheduler] = engine.passes
    assert passes["refill"] < 0.4 * passes["lock_step"], passes


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
    runs = _merge([Run(one, len(one)) for one in batches], dict(enumerate(lengths)), limits, row_bytes, budget)
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
        smaller = _smaller(run)
        left += smaller
        if not smaller:
            alone += run.rows
    assert sorted(alone) == list(range(rows)) and tries <= 2 * rows + 8


def test_the_order_of_arrival_changes_nothing(llama: Decoder) -> None:
    rows = requests(20, seed=2, sampled=True)
    engine = Engine(llama, SCHEDULE, STOP)
    want = generate(engine, rows, budget_bytes=2**40, max_rows=6, scheduler="refill")
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    got = generate(engine, [rows[row] for row in order], budget_bytes=2**40, max_rows=6, scheduler="refill")
    assert [one.token_ids for one in got] == [want[row].token_ids for row in order]
