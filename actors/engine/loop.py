"""Answers requests: admits them to the engine's cache slots, and generates one token per step. Read this file first.

    loop = Loop(engine, budget_bytes=2**30, max_rows=64, scheduler="refill")
    call = loop.add(requests)             # any thread may call `add`
    while not call.done.is_set():
        loop.step()                       # open slots, prefill prompts, or run a decode step for all rows in flight
    completions = call.result()           # loop.finish(call) replaces the last three lines

The scheduler decides which rows (requests) are in flight together:

    lock_step  A batch is admitted and runs until its last row has ended. All rows of a batch have the same depth.
    refill     When enough rows have ended, waiting rows take their slots: continuous batching at ragged depth.

The batches depend only on a call's requests and their answers, so a retry or a resumed job runs the same batches.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import update_wrapper
from itertools import groupby, islice

from actors.engine.engine import Ended, Engine
from actors.engine.errors import alone_error, free_memory, is_out_of_memory
from actors.engine.scheduler import Prompt, Run, merge, plan_batches, shared_prefixes, smaller
from actors.engine.types import SCHEDULERS, Completion, EngineStats, FinishReason, Request

REFILL_SHARE = 8  # refill when 1/8 of the slots are free, because prefill of one row takes as long as of a few rows
OnBatch = Callable[[Sequence[int]], None]


@dataclass(eq=False)
class Call:
    """Requests that one call of `Loop.add` has queued, and their answers so far."""

    requests: Sequence[Request]
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

    def shape(self, rows: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest prompt among `rows`, and the largest limit on new tokens among them."""
        return max(self.lengths[row] for row in rows), max(self.limits[row] for row in rows)

    def result(self) -> list[Completion]:
        """Return the completions in the order of the requests. Raise the error that ended the call, if there is one."""
        if self.error is not None:
            raise self.error
        return [self.completions[row] for row in range(len(self.requests))]


@dataclass
class _Flight:
    """The rows of one run between the engine's `open` and `close`: they run, or wait for a slot."""

    call: Call
    run: Run
    waiting: deque[int]  # rows that wait for a slot
    tickets: dict[int, int] = field(default_factory=dict)  # the engine's ticket -> row in flight
    reported: set[int] = field(default_factory=set)  # rows given to the latest call of `on_batch`

    def next_rows(self) -> list[int]:
        """Return the waiting rows to admit now: one per free slot, or none if too few slots are free for a prefill."""
        free = self.run.capacity - len(self.tickets)
        if self.tickets and free < math.ceil(self.run.capacity / REFILL_SHARE):
            return []
        return list(islice(self.waiting, free))

    def report(self) -> None:
        """Call `on_batch` with the rows in flight and the rows that may be admitted next."""
        if self.call.on_batch is not None:
            self.reported = {*self.tickets.values(), *islice(self.waiting, self.run.capacity)}
            self.call.on_batch(sorted(self.reported))


def halving(step: Callable[[Loop], None]) -> Callable[[Loop], None]:
    """Return `step` with this addition: if memory runs out, the run's unfinished rows wait for a run of half the size.

    Any other error ends the call that runs. A run and a call whose rows have all ended are ended too.
    """

    def halved(loop: Loop) -> None:
        has_memory = True
        try:
            step(loop)
        except BaseException as error:
            is_memory = isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)
            if loop._flight is None or not is_memory:
                loop._abandon(error)
                raise
            has_memory = False
        if not has_memory:  # not inside the except clause, where the error's traceback keeps tensors alive
            loop._run_again()
        loop._end()  # not inside the try: an error after the call has ended must not end the next call

    return update_wrapper(halved, step)


@dataclass(eq=False)
class Loop:
    """Answers calls (lists of requests) one after the other.

    If memory runs out, the unfinished rows start again with half as many rows in flight. If memory runs out for a
    single request, its completion has an error.
    """

    engine: Engine  # engine without rows in flight; only this loop may use it
    _: KW_ONLY
    budget_bytes: int  # maximum cache bytes of all rows in flight
    max_rows: int  # maximum number of rows in flight
    share_prefixes: bool = True  # whether to compute a prefix that prompts of a call share only once
    scheduler: str = "lock_step"  # one of SCHEDULERS
    _queue: deque[Call] = field(default_factory=deque, init=False)  # calls that have not ended; the first one runs
    _flight: _Flight | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.scheduler in SCHEDULERS

    def add(
        self,
        requests: Sequence[Request],
        # called before memory is allocated, with the indices of all requests that may be in flight until the next call
        # of `on_batch`
        on_batch: OnBatch | None = None,
        on_drain: Callable[[], None] | None = None,  # see `Call`
        among: Sequence[Sequence[int]] = (),  # see `shared_prefixes`
    ) -> Call:
        """Queue requests, each of which must fit the budget. Return the call that holds their answers.

        Any thread may call this. Raises UserError if a prompt is empty or too long.
        """
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [request.new_tokens_limit(self.engine.decoder.context_length) for request in requests]
        asked = [request.prompt_ids for request in requests]
        prefixes = shared_prefixes(asked, among) if self.share_prefixes else [()] * len(asked)
        numbers: dict[Prompt, int] = {}
        batches = plan_batches(
            lengths,
            limits,
            row_bytes=self.engine.row_bytes,
            budget_bytes=self.budget_bytes,
            max_rows=self.max_rows,
            groups=[numbers.setdefault(one, len(numbers)) for one in prefixes],
        )
        runs = [Run(batch, len(batch)) for batch in batches]
        if self.scheduler == "refill":
            runs = merge(runs, lengths, limits, self.engine.row_bytes, self.budget_bytes)
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

    @halving
    def step(self) -> None:
        """Prefill waiting rows or run a decode step. Call this only while a call has not ended."""
        flight = self._flight or self._open()
        rows = flight.next_rows()
        ended = self._admit(flight, rows) if rows else self._decode(flight)
        for ticket, completion in ended:
            flight.call.completions[flight.tickets.pop(ticket)] = completion

    def _open(self) -> _Flight:
        """Open the engine's slots for the next run."""
        call = self._queue[0]
        while True:
            run = call.runs.pop()
            shape = call.shape(run.rows)
            if run.capacity == 1 or run.capacity * self.engine.row_bytes(*shape) < call.too_large:
                break  # else memory has run out with a cache of this size
            call.runs += smaller(run)[::-1]
        flight = self._flight = _Flight(call, run, deque(run.rows))
        flight.report()  # report first, because allocating memory may kill the process
        self.engine.open(run.capacity, *shape)
        call.stats.batches += 1
        return flight

    def _end(self) -> None:
        """Close the engine's slots if no row runs or waits. End the call if all its rows have ended."""
        if self._flight is not None and not (self._flight.waiting or self._flight.tickets):
            self.engine.close()
            self._flight = None
        call = self._queue[0]
        if len(call.completions) == len(call.requests):
            self._queue.popleft()
            self._count(call)
            call.done.set()

    def _admit(self, flight: _Flight, rows: Sequence[int]) -> Ended:
        """Prefill `rows`, which are next in `waiting`; return the rows that ended with their first token."""
        engine, call = self.engine, flight.call
        if call.on_batch is not None and not flight.reported.issuperset(rows):
            flight.report()
        for prefix, members in groupby(rows, call.prefixes.__getitem__):
            alike = list(members)  # rows with the same prefix; one prefill computes them all
            before = replace(engine.stats)
            tickets = engine.admit([call.requests[row] for row in alike], prefix)
            call.stats.add_prompts(engine.stats, before)
            for _ in alike:
                flight.waiting.popleft()
            flight.tickets.update(zip(tickets, alike, strict=True))
        return engine.retire()

    def _decode(self, flight: _Flight) -> Ended:
        before = self.engine.stats.decode_seconds
        ended = self.engine.step()
        flight.call.stats.decode_seconds += self.engine.stats.decode_seconds - before
        return ended

    def _run_again(self) -> None:
        """Requeue unfinished rows after memory has run out. If only one row ran, its completion gets an error."""
        flight, self._flight = self._flight, None
        assert flight is not None
        call, run = flight.call, flight.run
        self.engine.close()
        free_memory()
        self.engine.stats.out_of_memory += 1
        call.stats.out_of_memory += 1
        left = [row for row in run.rows if row not in call.completions]
        shape = call.shape(run.rows)
        if len(run.rows) == 1:
            score = 0.0 if self.engine.cumulative_logprob else None
            call.completions[left[0]] = Completion((), FinishReason.ERROR, score, error=alone_error(*shape))
        else:
            call.too_large = min(call.too_large, run.capacity * self.engine.row_bytes(*shape))
            call.runs += smaller(replace(run, rows=left))[::-1]

    def _abandon(self, error: BaseException) -> None:
        """Set `error` on the call that runs, and end it."""
        self._flight = None
        self.engine.close()
        call = self._queue.popleft()
        call.error = error
        call.done.set()

    def _count(self, call: Call) -> None:
        """Add the tokens and decode steps of an ended call to the call's statistics."""
        call.stats.cache_bytes = self.engine.stats.cache_bytes
        for completion in call.completions.values():
            count = len(completion.token_ids)
            call.stats.generated_tokens += count
            call.stats.add_steps(self.engine.schedule, max(count - 1, 0))
