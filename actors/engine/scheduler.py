"""Which rows are in flight together: lock-step batches, or places that are refilled as rows end.

    lock step  admit a batch, step until its last row has ended, next batch. Rows of a batch share one depth.
    refill     as rows end, the next ones take their places, in groups: continuous batching at ragged depth.

Both are functions of the requests and their answers alone, so that a retry or a resumed job runs the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from actors.engine.batching import plan_batches
from actors.engine.engine import Engine
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.types import Completion, FinishReason, Request

SCHEDULERS = ("lock_step", "refill")
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
    requests that may be in flight before they are. What runs out of memory is run again with half as many rows; a
    request that does alone ends with an error. Raises ValueError for a request that cannot be run.
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
        if scheduler == "refill":
            runs = _merge(runs, lengths, limits, engine.row_bytes, budget_bytes)
        left = runs[::-1]
        while left:
            run = left.pop()
            longest, most_new = max(lengths[row] for row in run.rows), max(limits[row] for row in run.rows)
            size = run.capacity * engine.row_bytes(longest, most_new)
            if run.capacity == 1 or size < too_large:
                ended = _run(engine, requests, run, longest, most_new, start, on_batch)
                if ended is not None:
                    completions |= ended
                    continue
                too_large = min(too_large, size)
            left += _smaller(run)[::-1]
            if len(run.rows) == 1:
                error = alone_error(longest, most_new)
                completions[run.rows[0]] = Completion((), FinishReason.ERROR, 0.0, error=error)
    return [completions[row] for row in range(len(requests))]


def _merge(
    runs: Sequence[Run],
    lengths: dict[int, int],
    limits: dict[int, int],
    row_bytes: Callable[[int, int], int],
    budget_bytes: int,
) -> list[Run]:
    """Batches of similar prompts, longest first, as fewer and longer runs that are refilled."""
    merged: list[Run] = []
    for run in runs:
        before = merged[-1] if merged else run
        rows = run.rows if before is run else before.rows + run.rows
        row = row_bytes(lengths[rows[0]], max(limits[row] for row in rows))  # places are alike: longest, most
        if before is run or row > budget_bytes or lengths[rows[0]] > SPREAD * lengths[run.rows[0]]:
            merged.append(run)
        else:
            fit = budget_bytes // row if row else len(rows)
            merged[-1] = Run(rows, min(fit, max(before.capacity, run.capacity)))
    return merged


def _smaller(run: Run) -> list[Run]:
    """The same rows with half as many in flight; a batch in two halves, a single row not at all."""
    if run.capacity == len(run.rows):
        half = len(run.rows) // 2
        return [Run(rows, len(rows)) for rows in (run.rows[:half], run.rows[half:])] if half else []
    if run.capacity == 1:
        return [Run([row], 1) for row in run.rows]
    return [replace(run, capacity=run.capacity // 2)]


def _run(
    engine: Engine,
    requests: Sequence[Request],
    run: Run,
    longest: int,
    most_new: int,
    prefix: Sequence[int],
    on_batch: Callable[[Sequence[int]], None] | None,
) -> dict[int, Completion] | None:
    """One run to its end: place -> completion; None, and no row in flight, if memory ran out.

    What a run that ran out had counted is taken back, but for its seconds.
    """
    before = replace(engine.stats)
    tickets: dict[int, int] = {}
    done: dict[int, Completion] = {}
    told = next_row = 0
    try:
        engine.open(run.capacity, longest, most_new)
        while len(done) < len(run.rows):
            room = run.capacity - len(engine.rows)
            if next_row < len(run.rows) and (not engine.rows or room >= math.ceil(run.capacity / REFILL_SHARE)):
                newcomers = run.rows[next_row : next_row + room]
                next_row += len(newcomers)
                if on_batch is not None and next_row > told:
                    flying = {tickets[row.ticket] for row in engine.rows}
                    told = min(len(run.rows), next_row - len(newcomers) + run.capacity)
                    on_batch(sorted({*flying, *run.rows[next_row - len(newcomers) : told]}))
                admitted = engine.admit([requests[row] for row in newcomers], prefix)
                tickets.update(zip(admitted, newcomers, strict=True))
                ended = engine.retire()
            else:
                ended = engine.step(last=next_row == len(run.rows))
            done.update((tickets[ticket], completion) for ticket, completion in ended)
        return done
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    finally:
        engine.close()
    free_memory()  # here the error is gone, and with its traceback the last of its tensors
    engine.stats = replace(
        before,
        prefill_seconds=engine.stats.prefill_seconds,
        decode_seconds=engine.stats.decode_seconds,
        out_of_memory=before.out_of_memory + 1,
    )
    return None


def _begins_with(prompt: Sequence[int], prefix: Sequence[int]) -> bool:
    """Whether a prompt begins with a prefix and has tokens of its own behind it."""
    return 0 < len(prefix) < len(prompt) and list(prompt[: len(prefix)]) == list(prefix)
