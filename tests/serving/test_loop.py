"""Requests of many threads: no answer depends on when its row came, on its neighbours, or on rows that leave."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_cases import SPECS, STOP, any_schedule, generate, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from tiny_models import LAYERS, tiny_model

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule, ScheduleSpec, envelope
from actors.engine.types import Completion, FinishReason, Request, SamplingParams
from actors.serving.loop import OnlineLoop, QueueFull, ServedRow, Submission, wake

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
FULL = ScheduleSpec().build(LAYERS)
SPEEDS = [ScheduleSpec(speedup=speed, horizon=horizon).build(LAYERS) for speed, horizon in ((1, 2), (1.5, 5), (3, 9))]


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return Decoder(tiny_model("llama"))


class Reader:
    """Takes what a loop has for its readers, once a turn, and checks that it comes in order."""

    def __init__(self, loop: OnlineLoop) -> None:
        loop._wake = self.read
        self.tokens: dict[tuple[Submission, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[Submission, int], list[Any]] = defaultdict(list)
        self.done: dict[tuple[Submission, int], Completion] = {}
        self.events = 0

    def read(self, submissions: Iterable[Submission]) -> None:
        for submission in submissions:
            for event in filter(None, (row.take() for row in submission.rows)):
                row = submission, event.index
                assert row not in self.done
                self.events += 1
                self.tokens[row] += event.tokens
                self.logprobs[row] += event.logprobs
                if event.completion is not None:
                    self.done[row] = event.completion
                    assert event.completion.error or tuple(self.tokens[row]) == event.completion.token_ids


def loop_of(
    engine: Engine, budget: int = 2**40, max_rows: int = 4, max_waiting: int = 10_000
) -> tuple[OnlineLoop, Reader]:
    loop = OnlineLoop(engine, cache_bytes=budget, max_rows=max_rows, max_waiting=max_waiting)
    return loop, Reader(loop)


def run(loop: OnlineLoop) -> None:
    while loop.turn():
        pass


def expected(decoder: Decoder, schedule: Schedule, rows: Sequence[Request]) -> list[tuple[int, ...]]:
    """The tokens of the bulk path."""
    done = generate(Engine(decoder, schedule, STOP), rows, budget_bytes=2**40, max_rows=len(rows))
    return [one.token_ids for one in done]


def row_of(prompt: Sequence[int] = (5,), new: int = 3, key: int = 0, **sampling: Any) -> Request:
    return Request(list(prompt), SamplingParams(max_new_tokens=new, **sampling), key)


@settings(max_examples=20, derandomize=True)  # else a tie of two logits is drawn now and then
@given(
    seed=st.integers(0, 99),
    speeds=st.lists(st.sampled_from([None, *SPEEDS]), min_size=10, max_size=10),
    max_rows=st.integers(1, 6),
    budget_rows=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 5), min_size=10, max_size=10),
    cancelled=st.sets(st.integers(0, 9), max_size=6),
    prepared=st.booleans(),
)
def test_tokens_are_those_of_the_definition_whenever_rows_come_and_go(
    llama: Decoder,
    seed: int,
    speeds: list[Schedule | None],
    max_rows: int,
    budget_rows: int,
    arrivals: list[int],
    cancelled: set[int],
    prepared: bool,
) -> None:
    """Rows of different speeds share steps."""
    decoder = Decoder(tiny_model("llama"))
    if prepared:
        decoder = fastest_decoder(decoder.model)
    rows = [replace(row, schedule=speed) for row, speed in zip(requests(10, seed, sampled=True), speeds, strict=True)]
    engine = Engine(decoder, SCHEDULE, STOP)
    budget = budget_rows * engine.row_bytes(20, 14, FULL)
    loop, reader = loop_of(engine, budget, max_rows)
    rng = random.Random(seed)
    submissions: list[Submission] = []
    leave: dict[int, list[int]] = defaultdict(list)  # turns after which rows are cancelled
    turn = 0
    for row, wait in enumerate(arrivals):
        submissions.append(loop.submit([rows[row]], streams=rng.random() < 0.7))
        if row in cancelled:
            leave[turn + rng.randint(0, 8)].append(row)
        for _ in range(wait):
            for gone in leave.pop(turn, ()):
                loop.cancel(submissions[gone])
            loop.turn()
            turn += 1
        assert engine.executor.used_bytes() <= budget
    for gone in (row for number in sorted(leave) for row in leave[number]):
        loop.cancel(submissions[gone])
    run(loop)
    for number, submission in enumerate(submissions):
        got = reader.tokens[submission, 0]
        want = oracle(llama, rows[number].schedule or SCHEDULE, rows[number], STOP, got)
        assert got == want[: len(got)]
        assert number in cancelled or len(got) == len(want)
    assert not engine.rows and not loop.waiting
    assert loop.ended + loop.cancelled == 10


def test_a_step_counts_the_layers_of_each_rows_own_speed(llama: Decoder) -> None:
    """At 1x six layers a step, at the engine's speed fewer: work is saved row by row, not by the slowest."""
    loop, _ = loop_of(Engine(llama, SCHEDULE, ()))
    for schedule in (FULL, None):
        sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
        loop.submit([Request([5, 6], sampling, schedule=schedule)], streams=False)
    run(loop)
    assert loop.engine.stats.layer_steps == FULL.layer_steps(7) + SCHEDULE.layer_steps(7)


@given(st.lists(any_schedule(), min_size=1, max_size=4))
def test_an_envelope_covers_and_no_more(schedules: list[Schedule]) -> None:
    alike = [Schedule(LAYERS, one.depths, tuple(range(LAYERS)), 0) for one in schedules]
    whole = envelope(alike)
    for position in range(15):
        assert whole.depth(position) == max(one.depth(position) for one in alike)
    assert all(whole.covers(one) for one in alike)


def test_samples_and_their_logprobs_stream_token_by_token(llama: Decoder) -> None:
    params = SamplingParams(max_new_tokens=9, temperature=1.0, n=3, logprobs=2)
    rows = [Request([7, 8, 9], params, key) for key in range(3)]
    loop, reader = loop_of(Engine(llama, SCHEDULE, STOP))
    submission = loop.submit(rows, streams=True)
    loop.turn()
    assert [len(reader.tokens[submission, index]) for index in range(3)] == [1, 1, 1]
    run(loop)
    done = generate(Engine(llama, SCHEDULE, STOP), rows, budget_bytes=2**40, max_rows=3)
    assert [reader.done[submission, index] for index in range(3)] == done
    assert [tuple(reader.logprobs[submission, index]) for index in range(3)] == [one.logprobs for one in done]
    assert reader.events == sum(len(one.token_ids) for one in done)


def test_a_row_is_admitted_while_a_slot_is_free_and_a_long_one_waits_for_space(llama: Decoder) -> None:
    engine = Engine(llama, SCHEDULE, ())
    loop, reader = loop_of(engine, 4 * engine.row_bytes(5, 30), max_rows=4)
    first = [loop.submit([row_of([3 + key], 20, key, ignore_eos=True)], streams=True) for key in range(3)]
    for _ in range(4):
        loop.turn()
    fourth = loop.submit([row_of([9], 20, 4, ignore_eos=True)], streams=True)
    for _ in range(6):
        loop.turn()
    long = loop.submit([row_of([7] * 20, 30, 5)], streams=True)
    for _ in range(6):
        loop.turn()
    assert reader.tokens[fourth, 0] and not reader.done and not reader.tokens[long, 0]
    run(loop)
    assert len(reader.done) == 5 and (long, 0) in reader.done and (first[0], 0) in reader.done


def test_rows_of_one_prefill_have_a_bounded_number_of_prompt_tokens(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.serving.loop.PASS_TOKENS", 7)
    loop, _ = loop_of(Engine(llama, SCHEDULE, STOP))
    loop.submit([row_of([5] * length) for length in (4, 3, 1)], streams=False)
    loop.turn()
    assert (len(loop.engine.rows), loop.waiting) == (2, 1)


def test_the_queue_is_bounded_and_refuses_what_can_never_run(llama: Decoder) -> None:
    engine = Engine(llama, SCHEDULE, ())
    loop, _ = loop_of(engine, engine.row_bytes(5, 5), max_rows=1, max_waiting=3)
    for too_large, says in (
        ([row_of([5] * 20, 20)], "lower max_tokens"),
        ([row_of([5] * 64, 1)], "context of 64"),
        ([row_of()] * 4, "queues at most 3"),
    ):
        with pytest.raises(UserError, match=says):
            loop.submit(too_large, streams=False)
    loop.submit([row_of(), row_of([5] * 5, 5)], streams=False)
    loop.submit([row_of()], streams=False)
    with pytest.raises(QueueFull):
        loop.submit([row_of()], streams=False)
    run(loop)
    loop.submit([row_of()], streams=False)


class Failing(Engine):
    """Fails above `most` rows in flight, and at prompts of more than 15 tokens."""

    most = 2
    error: type[Exception] = torch.OutOfMemoryError

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        if any(len(one.prompt_ids) > 15 for one in requests):
            raise MemoryError("as asked")
        return super().admit(requests, prefix)

    def step(self) -> list[tuple[int, Completion]]:
        if len(self.rows) > self.most:
            raise self.error("as asked")
        return super().step()


def test_rows_run_again_in_smaller_groups_after_memory_has_run_out(llama: Decoder) -> None:
    rows = [one for one in requests(12, seed=4, sampled=True) if len(one.prompt_ids) <= 15]
    loop, reader = loop_of(Failing(llama, SCHEDULE, STOP), max_rows=6)
    submissions = [loop.submit([row], streams=True) for row in rows]
    never = loop.submit([row_of([5] * 18)], streams=False)
    run(loop)
    assert [reader.done[one, 0].token_ids for one in submissions] == expected(llama, SCHEDULE, rows)
    assert reader.done[never, 0].finish_reason == FinishReason.ERROR
    assert "does not fit alone" in str(reader.done[never, 0].error)
    assert loop.engine.stats.out_of_memory >= 2


def test_an_engine_that_fails_fails_its_rows_and_goes_on(llama: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    engine = Failing(llama, SCHEDULE, ())
    engine.error, engine.most = KeyError, 1
    loop, reader = loop_of(engine)
    both = loop.submit([row_of(), row_of()], streams=False)
    run(loop)
    assert [reader.done[both, index].error for index in (0, 1)] == ["the server failed: KeyError"] * 2
    assert "as asked" in caplog.text and loop.healthy
    alone = loop.submit([row_of()], streams=False)
    run(loop)
    assert reader.done[alone, 0].error is None
    engine.most = 0
    for _ in range(3):
        loop.submit([row_of()], streams=False)
        run(loop)
    assert not loop.healthy


def test_threads_submit_and_cancel_while_the_loop_runs(llama: Decoder) -> None:
    rows = requests(40, seed=8, sampled=True)
    want = expected(llama, SCHEDULE, rows)
    loop, reader = loop_of(Engine(llama, SCHEDULE, STOP), max_rows=5)
    arrived = threading.Condition()

    def read(submissions: set[Submission]) -> None:
        with arrived:
            reader.read(submissions)
            arrived.notify_all()

    loop.start(read)
    submissions: dict[int, Submission] = {}

    def client_thread(first: int) -> None:
        for row in range(first, 40, 4):
            submissions[row] = loop.submit([rows[row]], streams=row % 2 == 0)
            if row % 5 == 0:
                loop.cancel(submissions[row])
                continue
            with arrived:
                assert arrived.wait_for(lambda row=row: (submissions[row], 0) in reader.done, 600)  # type: ignore[misc]

    threads = [threading.Thread(target=client_thread, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in (row for row in range(40) if row % 5):
        assert reader.done[submissions[row], 0].token_ids == want[row]
    last = loop.submit([row_of(new=60, ignore_eos=True)], streams=False)
    loop.close()
    assert (last, 0) in reader.done and not loop.engine.rows


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("spec", range(len(SPECS)))
def test_a_resized_cache_keeps_the_rows_in_flight(llama: Decoder, spec: int, prepared: bool) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(3, seed=spec, most_new=14)
    want = expected(llama, schedule, rows)
    engine = Engine(fastest_decoder(tiny_model("llama")) if prepared else llama, schedule, STOP)
    engine.open(3, 20, 14)
    tickets = engine.admit(rows)
    done = dict(engine.retire())
    for size in ((5, 40, 20), (3, 20, 14), (9, 60, 64)):
        engine.open(*size)
        done |= dict(engine.step())
    while engine.rows:
        done |= dict(engine.step())
    assert [done[ticket].token_ids for ticket in tickets] == want


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3), st.booleans()), max_size=20))
def test_a_slow_reader_gets_every_token_once_and_in_order(steps: list[tuple[int, list[int], bool]]) -> None:
    async def read() -> tuple[list[list[int]], list[list[int]]]:
        submission, sent, got = Submission(streams=True), [[], [], []], [[], [], []]  # type: ignore[var-annotated]
        submission.rows = [ServedRow(row_of(), submission, index) for index in range(3)]

        async def take() -> None:
            wake([submission])
            for event in await submission.take():
                assert event.tokens or event.completion
                got[event.index] += event.tokens

        for index, tokens, is_read in steps:
            sent[index] += tokens
            submission.rows[index].put(sent[index], None)
            if is_read:
                await take()
        submission.rows[0].completion = Completion((1,), FinishReason.STOP, None)
        await take()
        await take()
        assert submission.left == 2
        return sent, got

    sent, got = asyncio.run(read())
    assert got == sent


def test_tokens_taken_while_a_row_starts_again_are_not_lost() -> None:
    row = ServedRow(row_of(), Submission(streams=True), 0)
    row.put([1, 2, 3], None)
    row.tokens = [1]  # memory ran out, and `put` has not set the new count yet
    taken = [row.take()]
    row.put([1, 2, 3, 4], None)
    assert [event and event.tokens for event in (*taken, row.take())] == [(1,), (2, 3, 4)]
