"""Answers requests: admits them to the engine's cache slots, and generates one token per step. Read this file first.

    loop = Loop(engine, budget_bytes=2**30, max_rows=64, scheduler="refill")
    call = loop.add(requests)             # any thread may call `add`
    while not call.done.is_set():
        loop.step()                       # open slots, prefill prompts, or run a decode step for all rows in flight
    completions = call.result()           # loop.finish(call) replaces the last three lines

The scheduler decides which rows (requests) are in flight together:

    lock_step  A batch is admitted and runs until its last row has ended. All rows of a batch have the same depth.
    refill     When enough rows have ended, waiting rows take their slots: continuous batching with mixed depths.

In a job, the batches depend only on a call's requests and their answers, so a retry or a resumed job runs the same
batches. In a server, rows of the next call may take free slots before all rows of the current call have ended.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import groupby, islice

from actors.engine.engine import Ended, Engine
from actors.engine.errors import alone_error, free_memory, is_out_of_memory
from actors.engine.row import Row
from actors.engine.schedule.schedule import Schedule, envelope
from actors.engine.scheduler import Prompt, Run, merge, plan_batches, shared_prefixes, smaller
from actors.engine.types import SCHEDULERS, Completion, EngineStats, FinishReason, Request

REFILL_SHARE = 8  # refill when 1/8 of the slots are free, because prefill of one row takes as long as of a few rows
OnBatch = Callable[[Sequence[int]], None]


@dataclass(eq=False)
class Call:
    """Requests that one call of `Loop.add` has queued, and their answers so far."""

    requests: Sequence[Request]  # the requests, all with the same `schedule`
    # for each request, the prefix that its prompt shares with other prompts; a shared prefix is computed only once
    prefixes: Sequence[Prompt]
    lengths: Sequence[int]  # number of prompt tokens of each request
    limits: Sequence[int]  # maximum number of new tokens of each request
    runs: list[Run]  # runs that have not begun; the last one in the list begins next
    on_batch: OnBatch | None = None  # see `Loop.add`
    # called once, when the engine wants rows of another call; only vLLM's engine calls it
    on_drain: Callable[[], None] | None = None
    completions: dict[int, Completion] = field(default_factory=dict)  # index of a request -> its completion
    stats: EngineStats = field(default_factory=EngineStats)  # counts of this call, complete once `done` is set
    error: BaseException | None = None  # error that ended the call early
    done: threading.Event = field(default_factory=threading.Event)
    too_large: float = math.inf  # bytes of the smallest cache for which memory ran out; retries allocate less

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that all requests set; None: they use the engine's schedule."""
        return self.requests[0].schedule

    def shape(self, rows: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest prompt among `rows`, and the largest limit on new tokens among them."""
        return max(self.lengths[row] for row in rows), max(self.limits[row] for row in rows)

    def left(self, run: Run) -> list[int]:
        """Return the rows of `run` that have no completion yet."""
        return [row for row in run.rows if row not in self.completions]

    def result(self) -> list[Completion]:
        """Return the completions in the order of the requests. Raise the error that ended the call, if there is one."""
        if self.error is not None:
            raise self.error
        return [self.completions[row] for row in range(len(self.requests))]


@dataclass
class _Flight:
    """All rows that run or wait for a slot between the engine's `open` and `close`."""

    capacity: int  # number of slots
    online: bool = False  # see `Loop`
    # runs with rows in flight or waiting; rows of the last run in the list are being admitted
    members: list[tuple[Call, Run]] = field(default_factory=list)
    waiting: deque[tuple[Call, int]] = field(default_factory=deque)  # rows that wait for a slot
    tickets: dict[int, tuple[Call, int]] = field(default_factory=dict)  # the engine's ticket -> row in flight
    reported: set[int] = field(default_factory=set)  # rows given to the latest call of `on_batch`
    joined: bool = False  # whether rows of several runs have shared the slots

    @property
    def call(self) -> Call:
        """The call whose rows are being admitted."""
        return self.members[-1][0]

    @property
    def has_free_slots(self) -> bool:
        """Whether enough slots are free to make a prefill worth its time."""
        wanted = 1 if self.online else math.ceil(self.capacity / REFILL_SHARE)
        return self.capacity - len(self.tickets) >= wanted

    def add(self, call: Call, run: Run) -> None:
        """Append the rows of `run` to the rows that wait for slots."""
        self.joined = bool(self.members)
        self.members = [(one, other) for one, other in self.members if one.left(other)] + [(call, run)]
        self.waiting.extend((call, row) for row in run.rows)

    def next_rows(self) -> list[tuple[Call, int]]:
        """Return the waiting rows to admit now: one per free slot, or none if too few slots are free for a prefill."""
        if self.tickets and not self.has_free_slots:
            return []
        return list(islice(self.waiting, self.capacity - len(self.tickets)))

    def report(self) -> None:
        """Call `on_batch` with the rows in flight and the rows that may be admitted next."""
        if self.call.on_batch is not None:
            self.reported = {row for _, row in (*self.tickets.values(), *islice(self.waiting, self.capacity))}
            self.call.on_batch(sorted(self.reported))


@dataclass(eq=False)
class Loop:
    """Answers calls (lists of requests) one after the other. If `online`, rows of successive calls run together.

    If memory runs out, the unfinished rows start again: first without rows of other runs, then with half as
    many rows in flight. If memory runs out for a single request, its completion has an error.
    """

    engine: Engine  # engine without rows in flight; only this loop may use it
    _: KW_ONLY
    budget_bytes: int  # maximum cache bytes of all rows in flight
    max_rows: int  # maximum number of rows in flight
    share_prefixes: bool = True  # whether to compute a prefix once even if only some of the prompts share it
    scheduler: str = "lock_step"  # one of SCHEDULERS
    # whether rows of successive calls may share decode steps, with mixed depths, as in a server. Slots are then
    # allocated for up to `max_rows` rows, with lengths rounded up, so that later calls seldom need larger slots
    online: bool = False
    _queue: deque[Call] = field(default_factory=deque, init=False)  # calls that have not begun
    _begun: list[Call] = field(default_factory=list, init=False)  # calls that have begun but not ended, oldest first
    _flight: _Flight | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.scheduler in SCHEDULERS

    def add(
        self,
        requests: Sequence[Request],
        # token ids with which most prompts begin; their keys and values are kept until `prefix` changes
        prefix: Sequence[int] = (),
        # called before memory is allocated, with the indices of all requests that may be in flight until the next call
        # of `on_batch`
        on_batch: OnBatch | None = None,
        on_drain: Callable[[], None] | None = None,  # see `Call`
    ) -> Call:
        """Queue requests, each of which must fit the budget. Return the call that holds their answers.

        Any thread may call this. Raises UserError if a prompt is empty or too long.
        """
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [request.new_tokens_limit(self.engine.decoder.context_length) for request in requests]
        prefixes = shared_prefixes([request.prompt_ids for request in requests], prefix, nested=self.share_prefixes)
        numbers: dict[Prompt, int] = {}
        schedule = requests[0].schedule if requests else None
        assert all(request.schedule is schedule for request in requests), "requests of different schedules"
        row_bytes = partial(self.engine.row_bytes, schedule=schedule)
        batches = plan_batches(
            lengths,
            limits,
            row_bytes=row_bytes,
            budget_bytes=self.budget_bytes,
            max_rows=self.max_rows,
            groups=[numbers.setdefault(one, len(numbers)) for one in prefixes],
        )
        runs = [Run(batch, len(batch)) for batch in batches]
        if self.scheduler == "refill":
            runs = merge(runs, lengths, limits, row_bytes, self.budget_bytes)
        call = Call(requests, prefixes, lengths, limits, runs[::-1], on_batch, on_drain)
        if requests:
            self._queue.append(call)
        else:
            call.done.set()
        return call

    def finish(self, call: Call) -> list[Completion]:
        """Call `step` until `call` has ended; return its completions. Only one thread at a time may call this."""
        while not call.done.is_set():
            self.step()
        return call.result()

    def step(self) -> list[tuple[Call, int, Completion]]:
        """Prefill waiting rows (opening slots if needed) or run a decode step. Return the rows that have ended.

        Call this only while a call has not ended.
        """
        ended: list[tuple[Call, int, Completion]] = []
        failed = False
        try:
            flight = self._flight or self._open()
            if self.online:
                self._join(flight)
            rows = flight.next_rows()
            found = self._admit(flight, rows) if rows else self._decode(flight)
            ended = [(*flight.tickets.pop(ticket), completion) for ticket, completion in found]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                self._abandon(error)
                raise
            failed = True
        except BaseException as error:
            self._abandon(error)
            raise
        for call, row, completion in ended:
            call.completions[row] = completion
        if failed:  # not inside the except clause, where the error's traceback keeps tensors alive
            ended = self._run_again()
        self._end()
        return ended

    def _open(self) -> _Flight:
        """Open the engine's slots for the next run."""
        while True:
            call = self._next_call()
            assert call is not None, "no call has rows left"
            self._begin(call)
            run = call.runs.pop()
            shape = call.shape(run.rows)
            if run.capacity == 1 or run.capacity * self.engine.row_bytes(*shape, call.schedule) < call.too_large:
                break  # else memory has run out with a cache of this size
            call.runs += smaller(run)[::-1]
        capacity = run.capacity
        if self.online and not run.apart and call.too_large == math.inf:
            capacity, shape = self._slots(shape, call.schedule, run.capacity)
        flight = self._flight = _Flight(capacity, self.online)
        flight.add(call, run)
        flight.report()  # report first, because allocating memory may kill the process
        self.engine.open(capacity, *shape, call.schedule)
        call.stats.batches += 1
        return flight

    def _next_call(self) -> Call | None:
        """Return the oldest call that has rows to admit."""
        return next((call for call in self._begun if call.runs), self._queue[0] if self._queue else None)

    def _begin(self, call: Call) -> None:
        if call not in self._begun:
            self._begun.append(call)
            self._queue.popleft()

    def _join(self, flight: _Flight) -> None:
        """Let the next run use free slots: queue its rows if all rows of earlier runs have been admitted."""
        if flight.waiting or not flight.has_free_slots or flight.members[-1][1].apart:
            return
        call = self._next_call()
        if call is None or call.runs[-1].apart:
            return
        run = call.runs[-1]
        shapes = [call.shape(run.rows), *(one.shape([row]) for one, row in flight.tickets.values())]
        shape = max(prompt for prompt, _ in shapes), max(new for _, new in shapes)
        schedules = {id(one): one for one in (call.schedule, *(one.schedule for one, _ in flight.tickets.values()))}
        deepest = call.schedule
        if len(schedules) > 1:
            deepest = envelope([one or self.engine.schedule for one in schedules.values()])
        most, shape = self._slots(shape, deepest, len(flight.tickets) + len(run.rows))
        if most * self.engine.row_bytes(*shape, deepest) >= call.too_large or most <= len(flight.tickets):
            return  # the next run must wait until rows in flight that need long slots have ended
        self.engine.open(most, *shape, deepest)
        self._begin(call)
        call.runs.pop()
        flight.add(call, run)
        flight.capacity = most
        call.stats.batches += 1

    def _slots(self, shape: tuple[int, int], schedule: Schedule | None, wanted: int) -> tuple[int, tuple[int, int]]:
        """Return how many slots fit the budget, and their lengths: `shape`, rounded up if `wanted` slots still fit."""

        def most(lengths: tuple[int, int]) -> int:
            size = self.engine.row_bytes(*lengths, schedule)
            return min(self.max_rows, self.budget_bytes // size) if size else self.max_rows

        context = self.engine.decoder.context_length
        prompt, new = (max(one, min(max(64, 1 << (one - 1).bit_length()), context)) for one in shape)
        if most((prompt, new)) >= min(wanted, self.max_rows):
            shape = prompt, new
        return most(shape), shape

    @property
    def has_waiting(self) -> bool:
        """Whether rows wait for slots."""
        flight = self._flight
        return bool(self._queue) or any(call.runs for call in self._begun) or bool(flight and flight.waiting)

    def running(self) -> list[tuple[Call, int, Row]]:
        """Return the rows in flight, each with its call and the index of its request in the call."""
        return [(*self._flight.tickets[row.ticket], row) for row in self.engine.rows] if self._flight else []

    def cancel(self, rows: Collection[tuple[Call, int]]) -> None:
        """Cancel the `rows` that have not ended: each gets a completion without tokens. Call this between steps."""
        for call, row in rows:
            call.completions.setdefault(row, Completion((), FinishReason.ERROR, None, error="cancelled"))
            call.runs = [replace(run, rows=left) for run in call.runs if (left := call.left(run))]
        flight = self._flight
        if flight is not None:
            flight.waiting = deque(one for one in flight.waiting if one not in rows)
            gone = [ticket for ticket, one in flight.tickets.items() if one in rows]
            self.engine.cancel(gone)
            for ticket in gone:
                del flight.tickets[ticket]
        for call in [call for call in self._queue if len(call.completions) == len(call.requests)]:
            self._queue.remove(call)
            self._begun.append(call)
        self._end()

    def _end(self) -> None:
        """Close the engine's slots if no row runs or waits, and set `done` for calls whose rows have all ended."""
        if self._flight is not None and not (self._flight.waiting or self._flight.tickets):
            self.engine.close()
            self._flight = None
        for call in [call for call in self._begun if len(call.completions) == len(call.requests)]:
            self._begun.remove(call)
            self._count(call)
            call.done.set()

    def _admit(self, flight: _Flight, rows: Sequence[tuple[Call, int]]) -> Ended:
        """Prefill `rows`, which are next in `waiting`; return the rows that ended with their first token."""
        engine = self.engine
        if flight.call.on_batch is not None and not flight.reported.issuperset(row for _, row in rows):
            flight.report()
        for (_, prefix), members in groupby(rows, lambda one: (id(one[0]), one[0].prefixes[one[1]])):
            alike = list(members)  # rows of one call with the same prefix; one prefill computes them all
            call, before = alike[0][0], replace(engine.stats)
            tickets = engine.admit([call.requests[row] for _, row in alike], prefix)
            call.stats.add_prompts(engine.stats, before)
            for _ in alike:
                flight.waiting.popleft()
            flight.tickets.update(zip(tickets, alike, strict=True))
        return engine.retire()

    def _decode(self, flight: _Flight) -> Ended:
        before = self.engine.stats.decode_seconds
        ended = self.engine.step()
        self._begun[0].stats.decode_seconds += self.engine.stats.decode_seconds - before  # only for the oldest call
        return ended

    def _run_again(self) -> list[tuple[Call, int, Completion]]:
        """Requeue unfinished rows after memory has run out. If only one row ran, return it with an error."""
        flight, self._flight = self._flight, None
        self.engine.close()
        free_memory()
        self.engine.stats.out_of_memory += 1
        ended: list[tuple[Call, int, Completion]] = []
        if flight is None:
            return ended
        self._begun[0].stats.out_of_memory += 1
        for call, run in reversed(flight.members):
            left = call.left(run)
            if not left:
                continue
            shape = call.shape(run.rows)
            if flight.joined or flight.capacity > run.capacity:
                call.runs.append(replace(run, rows=left, apart=True))
            elif len(run.rows) == 1:
                score = 0.0 if self.engine.cumulative_logprob else None
                completion = Completion((), FinishReason.ERROR, score, error=alone_error(*shape))
                call.completions[left[0]] = completion
                ended.append((call, left[0], completion))
            else:
                call.too_large = min(call.too_large, run.capacity * self.engine.row_bytes(*shape, call.schedule))
                call.runs += smaller(replace(run, rows=left))[::-1]
        return ended

    def _abandon(self, error: BaseException) -> None:
        """Set `error` on all calls that have begun, and end them."""
        self._flight = None
        self.engine.close()
        for call in self._begun:
            call.error = error
            call.done.set()
        self._begun = []

    def _count(self, call: Call) -> None:
        """Add the tokens and decode steps of an ended call to the call's statistics."""
        call.stats.cache_bytes = self.engine.stats.cache_bytes
        for row, completion in call.completions.items():
            count = len(completion.token_ids)
            schedule = call.requests[row].schedule or self.engine.schedule
            call.stats.generated_tokens += count
            call.stats.add_steps(schedule, max(count - 1, 0))
