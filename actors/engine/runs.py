"""Which rows of a call share the engine's cache: batches, or longer runs whose slots are refilled.

Pure functions of lengths and budget: the same rows give the same runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

SPREAD = 2  # the longest prompt of a run is at most so many times its shortest one: all slots are as long as it


@dataclass(frozen=True)
class Run:
    """Rows that share one `open` of the engine.

    Args:
        rows: Indices of requests, in the order of their admission.
        capacity: Most rows in flight.
        retried: Whether it has run out of memory once and runs again unchanged.
        apart: Whether it shares the engine with no other run, since memory has run out.
    """

    rows: list[int]
    capacity: int
    retried: bool = False
    apart: bool = False


def merge(
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


def smaller(run: Run) -> list[Run]:
    """The same rows with at most half as many in flight; a batch becomes two halves."""
    if run.capacity == 1:
        return [replace(run, rows=[row]) for row in run.rows]
    if run.capacity >= len(run.rows):
        half = (len(run.rows) + 1) // 2
        halves = run.rows[:half], run.rows[half:]
        return [replace(run, rows=rows, capacity=len(rows)) for rows in halves if rows]
    return [replace(run, capacity=run.capacity // 2)]
