"""Which rows are in flight together: lock-step batches, or slots that are refilled as rows end.

    lock step  admit a batch, step until its last row has ended, next batch. Rows of a batch share one depth.
    refill     as rows end, waiting rows take their slots, in groups: continuous batching at ragged depth.

Both are functions of the requests and their answers alone, so that a retry or a resumed job runs the same batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from actors.engine.batching import plan_batches
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.protocol import Ended, EngineProtocol
from actors.engine.shared_prefixes import Prompt, shared_prefixes
from actors.engine.types import SCHEDULERS, Completion, FinishReason, Request

REFILL_SHARE = 8  # rows are admitted once this share of the slots is free: a pass of one row costs as much as of a few
PAGED_REFILL_SHARE = 16  # the same where rows grow: a GPU computes a small pass in little time
SPREAD = 2  # the longest prompt of a run is at most so many times its shortest one: all slots are as long as it
OnBatch = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Run:
    """Rows that share one `open` of the engine.

    Args:
        rows: Indices of requests, in the order of their admission.
        capacity: Most rows in flight.
        retried: Whether it has run out of memory once and runs again unchanged.
    """

    rows: list[int]
    capacity: int
    retried: bool = False


def generate(
    engine: EngineProtocol,
    requests: Sequence[Request],
    *,
    budget_bytes: int,
    max_rows: int,
    prefix: Sequence[int] = (),
    share_prefixes: bool = True,
    scheduler: str = "lock_step",
    on_batch: OnBatch | None = None,
) -> list[Completion]:
    """Answer all requests; returns completions in their order.

    Where memory runs out, the rows that have not ended run again: unchanged if the engine could reduce its own memory,
    then with half as many in flight. A request that runs out of memory alone gets a completion with an error.

    Args:
        engine: Has no rows in flight.
        requests: The rows.
        budget_bytes: Bytes of cache of the rows in flight.
        max_rows: Most rows in flight.
        prefix: Token ids with which most prompts begin; its keys and values are kept until another prefix comes.
        share_prefixes: Whether longer beginnings that some prompts share are computed once too.
        scheduler: One of SCHEDULERS.
        on_batch: Called, before memory is allocated for them, with the indices of all requests that may be in flight
            until its next call.

    Raises:
        UserError: A request that cannot be run.
    """
    assert scheduler in SCHEDULERS
    completions: dict[int, Completion] = {}
    lengths = [len(request.prompt_ids) for request in requests]
    limits = [request.new_tokens_limit(engine.decoder.context_length) for request in requests]
    prefixes = shared_prefixes([request.prompt_ids for request in requests], prefix, nested=share_prefixes)
    too_large = math.inf  # bytes of the smallest cache that ran out of memory: none as large is tried again
    runs = _plan(engine, prefixes, lengths, limits, budget_bytes, max_rows, scheduler)[::-1]
    while runs:
        run = runs.pop()
        longest, most_new = max(lengths[row] for row in run.rows), max(limits[row] for row in run.rows)
        size = run.capacity * engine.row_bytes(longest, most_new)
        if run.capacity > 1 and size >= too_large:
            runs += _smaller(run)[::-1]
            continue
        done = _run(engine, requests, run, longest, most_new, prefixes, on_batch)
        completions |= done
        left = [row for row in run.rows if row not in done]
        if not left:
            continue
        if _free_after_failure(engine) and not run.retried:
            runs.append(replace(run, rows=left, retried=True))
        elif len(run.rows) == 1:
            score = 0.0 if engine.cumulative_logprob else None
            error = alone_error(longest, most_new)
            completions[left[0]] = Completion((), FinishReason.ERROR, score, error=error)
        else:
            too_large = min(too_large, size)
            runs += _smaller(replace(run, rows=left))[::-1]
    return [completions[row] for row in range(len(requests))]


def _plan(
    engine: EngineProtocol,
    prefixes: Sequence[Prompt],
    lengths: Sequence[int],
    limits: Sequence[int],
    budget_bytes: int,
    max_rows: int,
    scheduler: str,
) -> list[Run]:
    """The runs, longest prompts first; rows with the same prefix follow each other."""
    numbers: dict[Prompt, int] = {}
    batches = plan_batches(
        lengths,
        limits,
        row_bytes=engine.row_bytes,
        budget_bytes=budget_bytes,
        max_rows=max_rows,
        groups=[numbers.setdefault(prefix, len(numbers)) for prefix in prefixes],
    )
    runs = [Run(batch, len(batch)) for batch in batches]
    if scheduler == "lock_step":
        return runs
    if engine.grows:  # rows allocate cache as they grow: one run of all
        return [Run([row for run in runs for row in run.rows], max_rows)] if runs else []
    return _merge(runs, lengths, limits, engine.row_bytes, budget_bytes)


def _merge(
    runs: Sequence[Run],
    lengths: Mapping[int, int] | Sequence[int],
    limits: Mapping[int, int] | Sequence[int],
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
) -> list[Run]:
    """Batches of similar prompts, longest first, as fewer and longer runs that are refilled.

    All slots of a run are as large as its longest prompt and its most new tokens require: a batch that would cost
    the others half of their slots stays apart.
    """
    merged: list[Run] = []
    most_new = 0
    for run in runs:
        new = max(limits[row] for row in run.rows)
        if merged:
            longest, most = max(lengths[row] for row in merged[-1].rows), max(new, most_new)
            capacity = max(merged[-1].capacity, run.capacity)
            slot = row_bytes(longest, most)
            fit = budget_bytes // slot if slot else capacity
            if longest <= SPREAD * max(lengths[row] for row in run.rows) and 2 * fit >= capacity:
                merged[-1].rows.extend(run.rows)
                merged[-1] = Run(merged[-1].rows, min(fit, capacity))
                most_new = most
                continue
        merged.append(Run(list(run.rows), run.capacity))
        most_new = new
    return merged


def _smaller(run: Run) -> list[Run]:
    """The same rows with at most half as many in flight; a batch becomes two halves."""
    if run.capacity == 1:
        return [replace(run, rows=[row]) for row in run.rows]
    if run.capacity >= len(run.rows):
        half = (len(run.rows) + 1) // 2
        halves = run.rows[:half], run.rows[half:]
        return [replace(run, rows=rows, capacity=len(rows)) for rows in halves if rows]
    return [replace(run, capacity=run.capacity // 2)]


def _run(
    engine: EngineProtocol,
    requests: Sequence[Request],
    run: Run,
    longest: int,
    most_new: int,
    prefixes: Sequence[Prompt],
    on_batch: OnBatch | None,
) -> dict[int, Completion]:
    """Run to the end, or until memory runs out: index -> completion of the rows that have ended."""
    admission = _Admission(engine, requests, run, prefixes, on_batch)
    done: dict[int, Completion] = {}
    admission.report()  # before memory is allocated, which may kill the process
    try:
        engine.open(run.capacity, longest, most_new)
        while len(done) < len(run.rows):
            rows = admission.next_rows()
            ended = admission.admit(rows) if rows else engine.step(last=not admission.waiting)
            done |= admission.settle(ended)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        engine.close()
    return done


def _free_after_failure(engine: EngineProtocol) -> bool:
    """Free memory after it has run out; whether the same rows may run again. The error must be gone: its traceback
    holds tensors."""
    engine.stats.out_of_memory += 1
    reduced = engine.release_memory()
    free_memory()
    return reduced


class _Admission:
    """The rows of a run that wait for admission, and the tickets of those that have been admitted."""

    def __init__(
        self,
        engine: EngineProtocol,
        requests: Sequence[Request],
        run: Run,
        prefixes: Sequence[Prompt],
        on_batch: OnBatch | None,
    ) -> None:
        self.engine, self.requests, self.prefixes, self.on_batch = engine, requests, prefixes, on_batch
        self.capacity = run.capacity
        self.waiting = deque(run.rows)
        self._tickets: dict[int, int] = {}  # ticket -> row
        self._reported: set[int] = set()
        self._share = PAGED_REFILL_SHARE if engine.grows else REFILL_SHARE
        self._step_first = False  # whether a step must come before the next admission

    def report(self) -> None:
        """Call `on_batch` with the rows in flight and those that may be admitted next."""
        next_rows = islice(self.waiting, self.capacity)
        self._reported = {self._tickets[row.ticket] for row in self.engine.rows} | set(next_rows)
        if self.on_batch is not None:
            self.on_batch(sorted(self._reported))

    def next_rows(self) -> list[int]:
        """The waiting rows that are admitted now: as many as there is space for, once they are worth a pass.

        Where rows grow, those that are in flight make a step in each pass or between two passes.
        """
        engine, busy = self.engine, bool(self.engine.rows)
        if busy and self._step_first:
            self._step_first = False
            return []
        slots = self.capacity - len(engine.rows)
        first = list(islice(self.waiting, slots))
        if not first or (busy and slots < math.ceil(self.capacity / self._share)):
            return []
        estimate = engine.admission_estimate([self.requests[row] for row in first])
        if not busy:
            return first[: max(1, estimate)]
        if estimate < min(len(first), math.ceil(len(engine.rows) / self._share)):
            return []
        if not engine.grows:
            return first[:estimate]
        alike = list(next(groupby(first[:estimate], self.prefixes.__getitem__))[1])
        return alike[: engine.first_pass([self.requests[row] for row in alike], self.prefixes[alike[0]])]

    def admit(self, rows: Sequence[int]) -> Ended:
        """Admit the first waiting rows; returns the rows that have ended with their first token."""
        if not self._reported.issuperset(rows):
            self.report()
        busy = bool(self.engine.rows)
        for prefix, members in groupby(rows, self.prefixes.__getitem__):
            alike = list(members)
            tickets = self.engine.admit([self.requests[row] for row in alike], prefix)
            for _ in alike:
                self.waiting.popleft()
            self._tickets.update(zip(tickets, alike, strict=True))
        self._step_first = busy and self.engine.grows and not self.engine.stepped
        return self.engine.retire()

    def settle(self, ended: Ended) -> dict[int, Completion]:
        """Return preempted rows to the head of the queue; index -> completion of the rows that have ended."""
        self.waiting.extendleft(self._tickets[ticket] for ticket in self.engine.take_preempted())
        return {self._tickets[ticket]: completion for ticket, completion in ended}
