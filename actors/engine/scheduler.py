"""Which rows are in flight together: lock-step batches, or places that are refilled as rows end.

    lock step  admit a batch, step until its last row has ended, next batch. Rows of a batch share one depth.
    refill     as rows end, the next ones take their places, in groups: continuous batching at ragged depth.

Both are functions of the requests and their answers alone, so that a retry or a resumed job runs the same batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from actors.engine.batching import plan_batches
from actors.engine.engine import Engine
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.types import SCHEDULERS, Completion, FinishReason, Request

REFILL_SHARE = 8  # newcomers wait until one in so many places is free: one row's pass costs as much time as a few rows'
SPREAD = 2  # the longest prompt of a run is at most so many times its shortest one: all places are as long as it


@dataclass(frozen=True)
class Run:
    """rows: places of requests, in the order in which they are admitted. capacity: rows in flight at once."""

    rows: list[int]
    capacity: int


def generate(
    engine: Engine,
    requests: Sequence[Request],
    *,
    budget_bytes: int,
    max_rows: int,
    prefix: Sequence[int] = (),
    scheduler: str = "lock_step",
    on_batch: Callable[[Sequence[int]], None] | None = None,
) -> list[Completion]:
    """Answer all requests; completions in their order.

    budget_bytes: cache of the rows in flight. max_rows: of them. prefix: token ids with which most prompts begin;
    computed once, and again only for another one. scheduler: one of SCHEDULERS. on_batch: told the places of all
    requests that may be in flight until it is told again, before memory is taken for them. Where memory runs out,
    what has not ended runs again with half as many rows; a request that does so alone ends with an error. Raises
    ValueError for a request that cannot be run.
    """
    assert scheduler in SCHEDULERS
    completions: dict[int, Completion] = {}
    shared = [row for row, request in enumerate(requests) if _begins_with(request.prompt_ids, prefix)]
    others = sorted(set(range(len(requests))) - set(shared))
    too_large = math.inf  # bytes of the smallest cache that ran out of memory: none as large is tried again
    for group, start in ((shared, prefix), (others, ())):
        lengths = {row: len(requests[row].prompt_ids) for row in group}
        limits = {row: engine.new_tokens_limit(requests[row]) for row in group}
        batches = plan_batches(
            list(lengths.values()),
            list(limits.values()),
            row_bytes=engine.row_bytes,
            budget_bytes=budget_bytes,
            max_rows=max_rows,
        )
        runs = [Run([group[place] for place in batch], len(batch)) for batch in batches]
        if scheduler == "refill" and engine.grows:  # rows take what they need: one run of all, as long as rows fit
            runs = [Run([group[place] for batch in batches for place in batch], max_rows)] if batches else []
        elif scheduler == "refill":
            runs = _merge(runs, lengths, limits, engine.row_bytes, budget_bytes)
        left = runs[::-1]
        while left:
            run = left.pop()
            longest, most_new = max(lengths[row] for row in run.rows), max(limits[row] for row in run.rows)
            size = run.capacity * engine.row_bytes(longest, most_new)
            if run.capacity == 1 or size < too_large:
                done = _run(engine, requests, run, longest, most_new, start, on_batch)
                completions |= done
                if len(done) == len(run.rows):
                    continue
                too_large = min(too_large, size)
                if len(run.rows) == 1:
                    error = alone_error(longest, most_new)
                    score = 0.0 if engine.cumulative_logprob else None
                    completions[run.rows[0]] = Completion((), FinishReason.ERROR, score, error=error)
                    continue
                run = Run([row for row in run.rows if row not in done], run.capacity)
            left += _smaller(run)[::-1]
    return [completions[row] for row in range(len(requests))]


def _merge(
    runs: Sequence[Run],
    lengths: dict[int, int],
    limits: dict[int, int],
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
) -> list[Run]:
    """Batches of similar prompts, longest first, as fewer and longer runs that are refilled.

    All places of a run are as large as its longest prompt and its most new tokens ask for: a batch that would cost
    the others half their places stays apart.
    """
    merged: list[Run] = []
    most_new = 0
    for run in runs:
        new = max(limits[row] for row in run.rows)
        if merged:
            longest, most = lengths[merged[-1].rows[0]], max(new, most_new)
            wanted = max(merged[-1].capacity, run.capacity)
            row = row_bytes(longest, most)
            fit = budget_bytes // row if row else wanted
            if longest <= SPREAD * lengths[run.rows[0]] and 2 * fit >= wanted:
                merged[-1].rows.extend(run.rows)
                merged[-1] = Run(merged[-1].rows, min(fit, wanted))
                most_new = most
                continue
        merged.append(Run(list(run.rows), run.capacity))
        most_new = new
    return merged


def _smaller(run: Run) -> list[Run]:
    """The same rows with half as many in flight at most; a batch in two halves."""
    if run.capacity == 1:
        return [Run([row], 1) for row in run.rows]
    if run.capacity >= len(run.rows):
        half = (len(run.rows) + 1) // 2
        return [Run(rows, len(rows)) for rows in (run.rows[:half], run.rows[half:]) if rows]
    return [replace(run, capacity=run.capacity // 2)]


def _run(
    engine: Engine,
    requests: Sequence[Request],
    run: Run,
    longest: int,
    most_new: int,
    prefix: Sequence[int],
    on_batch: Callable[[Sequence[int]], None] | None,
) -> dict[int, Completion]:
    """One run to its end, or until memory runs out: place -> completion of the rows that have ended."""
    tickets: dict[int, int] = {}
    done: dict[int, Completion] = {}
    waiting = deque(run.rows)
    told: set[int] = set()

    def tell() -> None:
        nonlocal told
        told = {tickets[row.ticket] for row in engine.rows} | set(islice(waiting, run.capacity))
        if on_batch is not None:
            on_batch(sorted(told))

    tell()  # before memory is taken: that alone may kill the process
    try:
        engine.open(run.capacity, longest, most_new)
        between = True  # whether newcomers may come: where rows go by pages, a step lies between two passes
        while len(done) < len(run.rows):
            newcomers = (
                _newcomers(engine, requests, waiting, run.capacity, prefix) if between or not engine.rows else []
            )
            between = not newcomers or not engine.rows or not engine.grows
            if newcomers:
                if not told.issuperset(newcomers):
                    tell()
                admitted = engine.admit([requests[row] for row in newcomers], prefix)
                for _ in newcomers:
                    waiting.popleft()
                tickets.update(zip(admitted, newcomers, strict=True))
                ended = engine.retire()
            else:
                ended = engine.step(last=not waiting)
            waiting.extendleft(tickets[ticket] for ticket in engine.take_put_back())
            done.update((tickets[ticket], completion) for ticket, completion in ended)
        return done
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        engine.close()
    engine.release()
    free_memory()  # here the error is gone, and with its traceback the last of its tensors
    engine.stats.out_of_memory += 1
    return done


def _newcomers(
    engine: Engine, requests: Sequence[Request], waiting: deque[int], capacity: int, prefix: Sequence[int]
) -> list[int]:
    """Those of the waiting that are admitted now: as many as there is room for, once it is enough to be worth it."""
    room = capacity - len(engine.rows)
    first = list(islice(waiting, room))
    if not first or (engine.rows and room < math.ceil(capacity / REFILL_SHARE)):
        return []
    if not engine.grows:
        return first
    fit = engine.fitting([requests[row] for row in first])
    if not engine.rows:
        return first[: max(1, fit)]
    enough = min(len(first), math.ceil(len(engine.rows) / REFILL_SHARE))
    if fit < enough:
        return []
    return first[: engine.one_pass([requests[row] for row in first[:fit]], prefix)]  # the others wait for it


def _begins_with(prompt: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether a prompt begins with a prefix and has tokens of its own behind it."""
    return 0 < len(prefix) < len(prompt) and list(prompt[: len(prefix)]) == list(prefix)
