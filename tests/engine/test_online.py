"""Requests of many threads: no answer depends on when its row came, on its neighbours, or on rows that leave."""

from __future__ import annotations

import math
import random
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import SPECS, STOP, any_schedule, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from tiny_models import LAYERS, tiny_model

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.online.loop import OnlineLoop
from actors.engine.online.submissions import Event, QueueFull, Submission
from actors.engine.protocol import EngineProtocol
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec, envelope
from actors.engine.types import Completion, FinishReason, Request, SamplingParams

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
FULL = ScheduleSpec().build(LAYERS)
SPEEDS = [ScheduleSpec(speedup=speed, horizon=horizon).build(LAYERS) for speed, horizon in ((1, 2), (1.5, 5), (3, 9))]


class Client:
    """Keeps what `receive` gets, and checks that it is in order."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[Any]] = defaultdict(list)
        self.done: dict[int, Completion] = {}
        self.events = 0
        self.ended = threading.Event()
        self.wanted = 1

    def __call__(self, event: Event) -> None:
        assert event.index not in self.done
        self.events += 1
        self.tokens[event.index] += event.tokens
        self.logprobs[event.index] += event.logprobs
        if event.completion is not None:
            self.done[event.index] = event.completion
            if event.completion.error is None:
                assert tuple(self.tokens[event.index]) == event.completion.token_ids
            if len(self.done) == self.wanted:
                self.ended.set()


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return Decoder(tiny_model("llama"))


def loop_of(
    engine: EngineProtocol,
    budget: int = 2**40,
    max_rows: int = 4,
    max_waiting: int = 10_000,
    events_per_second: float = math.inf,
) -> OnlineLoop:
    how = {"cache_bytes": budget, "max_rows": max_rows, "max_waiting": max_waiting}
    return OnlineLoop(engine, **how, events_per_second=events_per_second)


def run(loop: OnlineLoop) -> None:
    while loop.turn():
        pass


def expected(decoder: Decoder, schedule: Schedule, rows: Sequence[Request]) -> list[tuple[int, ...]]:
    """By the bulk path."""
    done = generate(Engine(decoder, schedule, STOP), rows, budget_bytes=2**40, max_rows=len(rows))
    return [one.token_ids for one in done]


@settings(max_examples=15)
@given(
    schedule=any_schedule(),
    seed=st.integers(0, 99),
    max_rows=st.integers(1, 6),
    budget_rows=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 5), min_size=10, max_size=10),
    cancelled=st.sets(st.integers(0, 9), max_size=6),
    events_per_second=st.sampled_from([math.inf, 1e4, 100, 1e-3]),
)
def test_tokens_are_those_of_the_bulk_path_whenever_rows_come_and_go(
    llama: Decoder,
    schedule: Schedule,
    seed: int,
    max_rows: int,
    budget_rows: int,
    arrivals: list[int],
    cancelled: set[int],
    events_per_second: float,
) -> None:
    rows = requests(10, seed, sampled=True)
    want = expected(llama, schedule, rows)
    engine = Engine(llama, schedule, STOP)
    budget = budget_rows * engine.row_bytes(20, 14) or 1
    loop = loop_of(engine, budget, max_rows, events_per_second=events_per_second)
    clients = [Client() for _ in rows]
    submissions: list[Submission] = []
    rng = random.Random(seed)
    leave: dict[int, list[int]] = defaultdict(list)  # turns after which rows are cancelled
    turn = 0
    for row, wait in enumerate(arrivals):
        submissions.append(loop.submit([rows[row]], clients[row], streams=rng.random() < 0.7))
        if row in cancelled:
            leave[turn + rng.randint(0, 8)].append(row)
        for _ in range(wait):
            for gone in leave.pop(turn, ()):
                loop.cancel(submissions[gone])
            loop.turn()
            turn += 1
        if engine.cache is not None:
            assert engine.cache.bytes <= budget
    for number in sorted(leave):
        for gone in leave[number]:
            loop.cancel(submissions[gone])
    run(loop)
    for row, client in enumerate(clients):
        if row in cancelled:
            assert want[row][: len(client.tokens[0])] == tuple(client.tokens[0])
        else:
            assert client.done[0].token_ids == want[row]
    assert not engine.rows and not loop.in_flight and not loop.waiting
    assert loop.totals.ended + loop.totals.cancelled == 10


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99),
    speeds=st.lists(st.sampled_from([None, *SPEEDS]), min_size=9, max_size=9),
    arrivals=st.lists(st.integers(0, 4), min_size=9, max_size=9),
    max_rows=st.integers(1, 6),
    prepared=st.booleans(),
)
def test_rows_of_different_speeds_share_steps(
    llama: Decoder, seed: int, speeds: list[Schedule | None], arrivals: list[int], max_rows: int, prepared: bool
) -> None:
    decoder = Decoder(tiny_model("llama"))
    if prepared:
        decoder.prepare_for_cpu()
    rows = [
        Request(row.prompt_ids, row.sampling, row.key, schedule=speed)
        for row, speed in zip(requests(9, seed, sampled=True), speeds, strict=True)
    ]
    engine = Engine(decoder, SCHEDULE, STOP)
    loop = loop_of(engine, 3 * engine.row_bytes(20, 14, FULL), max_rows)
    clients = [Client() for _ in rows]
    for row, wait in enumerate(arrivals):
        loop.submit([rows[row]], clients[row], streams=True)
        for _ in range(wait):
            loop.turn()
    run(loop)
    for row, client in enumerate(clients):
        got = client.done[0].token_ids
        assert list(got) == oracle(llama, speeds[row] or SCHEDULE, rows[row], STOP, got)


def test_a_step_counts_the_layers_of_each_rows_own_speed(llama: Decoder) -> None:
    """At 1x six layers a step, at the engine's speed fewer: work is saved row by row, not by the slowest."""
    rows = [Request([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True), schedule=one) for one in (FULL, None)]
    engine = Engine(llama, SCHEDULE, ())
    loop = loop_of(engine)
    for row in rows:
        loop.submit([row], Client(), streams=False)
    run(loop)
    assert engine.stats.layer_steps == FULL.layer_steps(7) + SCHEDULE.layer_steps(7) == loop.totals.layer_steps


@given(st.lists(any_schedule(), min_size=1, max_size=4))
def test_an_envelope_covers_and_no_more(schedules: list[Schedule]) -> None:
    alike = [Schedule(LAYERS, one.depths, tuple(range(LAYERS)), 0) for one in schedules]
    whole = envelope(alike)
    for position in range(15):
        assert whole.depth(position) == max(one.depth(position) for one in alike)
    assert all(whole.covers(one) for one in alike)


def test_samples_of_a_request_are_told_apart_and_logprobs_stream(llama: Decoder) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=1.0, n=3, logprobs=2)
    rows = [Request([7, 8, 9], params, key) for key in range(3)]
    loop, client = loop_of(Engine(llama, SCHEDULE, STOP)), Client()
    loop.submit(rows, client, streams=True)
    run(loop)
    done = generate(Engine(llama, SCHEDULE, STOP), rows, budget_bytes=2**40, max_rows=3)
    assert [client.done[index] for index in range(3)] == done
    assert [tuple(client.logprobs[index]) for index in range(3)] == [one.logprobs for one in done]
    assert client.events > 6


@pytest.mark.parametrize(("events_per_second", "events"), [(math.inf, 12), (1e-3, 2)])
def test_the_first_token_and_the_last_are_sent_at_once_the_others_together(
    llama: Decoder, events_per_second: float, events: int
) -> None:
    loop = loop_of(Engine(llama, SCHEDULE, ()), events_per_second=events_per_second)
    clients = [Client() for _ in range(3)]
    for number, client in enumerate(clients):
        loop.submit([Request([number + 3], SamplingParams(max_new_tokens=12), number)], client, streams=True)
    loop.turn()
    assert [len(client.tokens[0]) for client in clients] == [1, 1, 1]
    run(loop)
    assert [client.events for client in clients] == [events] * 3
    assert [len(client.done[0].token_ids) for client in clients] == [12] * 3


def test_a_cancelled_row_leaves_within_a_turn(llama: Decoder) -> None:
    engine = Engine(llama, SCHEDULE, ())
    loop, client = loop_of(engine), Client()
    rows = [Request([row + 3], SamplingParams(max_new_tokens=50, ignore_eos=True), row) for row in range(4)]
    submissions = [loop.submit([row], client, streams=True) for row in rows]
    for _ in range(3):
        loop.turn()
    assert len(engine.rows) == 4
    loop.cancel(submissions[1])
    loop.cancel(submissions[3])
    loop.turn()
    assert sorted(row.request.key for row in engine.rows) == [0, 2]


def test_the_queue_is_bounded_and_says_when_to_come_again(llama: Decoder) -> None:
    loop = loop_of(Engine(llama, SCHEDULE, ()), max_rows=1, max_waiting=3)
    row = Request([5], SamplingParams(max_new_tokens=3))
    loop.submit([row, row], Client(), streams=False)
    loop.submit([row], Client(), streams=False)
    with pytest.raises(QueueFull) as full:
        loop.submit([row], Client(), streams=False)
    assert full.value.retry_after >= 1
    with pytest.raises(UserError, match="queues at most 3"):
        loop.submit([row] * 4, Client(), streams=False)
    run(loop)
    loop.submit([row], Client(), streams=False)


def test_a_request_that_can_never_fit_is_refused_at_once(llama: Decoder) -> None:
    engine = Engine(llama, SCHEDULE, ())
    loop = loop_of(engine, budget=engine.row_bytes(5, 5))
    with pytest.raises(UserError, match="lower max_tokens"):
        loop.submit([Request([5] * 20, SamplingParams(max_new_tokens=20))], Client(), streams=False)
    with pytest.raises(UserError, match="context of 64"):
        loop.submit([Request([5] * 64, SamplingParams(max_new_tokens=1))], Client(), streams=False)
    loop.submit([Request([5] * 5, SamplingParams(max_new_tokens=5))], Client(), streams=False)


class Failing(Engine):
    """Runs out of memory, or fails otherwise, above so many rows in flight."""

    most = 2
    error: type[Exception] = torch.OutOfMemoryError

    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        if len(self.rows) > self.most:
            raise self.error("as asked")
        return super().step(last=last)


def test_rows_run_again_in_smaller_groups_after_memory_has_run_out(llama: Decoder) -> None:
    rows = requests(8, seed=4, sampled=True)
    engine = Failing(llama, SCHEDULE, STOP)
    loop, clients = loop_of(engine, max_rows=6), [Client() for _ in range(8)]
    for row, client in zip(rows, clients, strict=True):
        loop.submit([row], client, streams=True)
    run(loop)
    assert [client.done[0].token_ids for client in clients] == expected(llama, SCHEDULE, rows)
    assert loop.totals.out_of_memory >= 1


def test_a_row_that_fits_no_memory_alone_is_an_error_and_others_are_answered(llama: Decoder) -> None:
    class Refusing(Engine):
        def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
            if any(len(one.prompt_ids) > 15 for one in requests):
                raise MemoryError("as asked")
            return super().admit(requests, prefix)

    loop = loop_of(Refusing(llama, SCHEDULE, STOP))
    clients = [Client() for _ in range(3)]
    for client, length in zip(clients, (3, 18, 4), strict=True):
        loop.submit([Request([5] * length, SamplingParams(max_new_tokens=4))], client, streams=False)
    run(loop)
    assert clients[1].done[0].finish_reason == FinishReason.ERROR
    assert "does not fit alone" in str(clients[1].done[0].error)
    assert clients[0].done[0].error is None and clients[2].done[0].error is None


def test_an_engine_that_fails_fails_its_rows_and_goes_on(llama: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    engine = Failing(llama, SCHEDULE, ())
    engine.error, engine.most = KeyError, 1
    loop, clients = loop_of(engine), [Client() for _ in range(3)]
    row = Request([5], SamplingParams(max_new_tokens=3))
    for client in clients[:2]:
        loop.submit([row], client, streams=False)
    run(loop)
    assert [client.done[0].error for client in clients[:2]] == ["the server failed: KeyError"] * 2
    assert "as asked" in caplog.text and loop.healthy
    loop.submit([row], clients[2], streams=False)
    run(loop)
    assert clients[2].done[0].error is None
    engine.most = 0
    for _ in range(3):
        loop.submit([row], Client(), streams=False)
        run(loop)
    assert not loop.healthy


def test_a_receiver_that_fails_loses_its_own_rows_only(llama: Decoder) -> None:
    loop, client = loop_of(Engine(llama, SCHEDULE, ())), Client()

    def broken(event: Event) -> None:
        raise RuntimeError("its event loop is closed")

    row = Request([5], SamplingParams(max_new_tokens=6))
    loop.submit([row], broken, streams=True)
    loop.submit([row], client, streams=True)
    run(loop)
    assert client.done[0].error is None and loop.totals.cancelled == 1


def test_threads_submit_and_cancel_while_the_loop_runs(llama: Decoder) -> None:
    rows = requests(40, seed=8, sampled=True)
    want = expected(llama, SCHEDULE, rows)
    engine = Engine(llama, SCHEDULE, STOP)
    loop = loop_of(engine, max_rows=5)
    clients = [Client() for _ in rows]
    loop.start()

    def client_thread(first: int) -> None:
        for row in range(first, 40, 4):
            submission = loop.submit([rows[row]], clients[row], streams=row % 2 == 0)
            if row % 5 == 0:
                loop.cancel(submission)
            else:
                assert clients[row].ended.wait(60)

    threads = [threading.Thread(target=client_thread, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [clients[row].done[0].token_ids for row in range(40) if row % 5] == [
        want[row] for row in range(40) if row % 5
    ]
    waiting = Client()
    loop.submit([Request([5], SamplingParams(max_new_tokens=60, ignore_eos=True))], waiting, streams=False)
    loop.close()
    assert waiting.ended.wait(1) and not engine.rows
    with pytest.raises(QueueFull):
        loop.submit([rows[0]], Client(), streams=False)


@pytest.mark.parametrize("spec", range(len(SPECS)))
def test_a_resized_cache_keeps_the_rows_in_flight(llama: Decoder, spec: int) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(3, seed=spec, most_new=14)
    want = expected(llama, schedule, rows)
    engine = Engine(llama, schedule, STOP)
    engine.open(3, 20, 14)
    tickets = engine.admit(rows)
    done = dict(engine.retire())
    for size in ((5, 40, 20), (3, 20, 14), (9, 60, 64)):
        engine.resize(*size)
        done |= dict(engine.step())
    while engine.rows:
        done |= dict(engine.step())
    assert [done[ticket].token_ids for ticket in tickets] == want
