"""What each actor did when: its seconds by part, and rows and tokens over the time of the job's runs.

From the shards' statistics alone, so that time and memory grow with shards, not with rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.commit.runs import JobRun

PARTS = ("start-up", "prefill", "decode", "other", "idle")
MEANINGS = {
    "start-up": "until the actor had its model: plan, Ray, processes, loading",
    "prefill": "prompts",
    "decode": "generated tokens",
    "other": "requests, text, Parquet",
    "idle": "no shard at hand: the stages before were slower, other actors still worked, or the run was ending",
}
BINS = 160  # of the time axis


@dataclass(frozen=True)
class Lane:
    """What one actor did in one run.

    Args:
        run: number of the run, from 1.
        number: of the actor in its run, from 1.
        node, device: names.
        shards, rows, tokens: that it answered.
        restarts: of its process.
        seconds: by `PARTS`; together they are the run's wall clock.
    """

    run: int
    number: int
    node: str
    device: str
    shards: int
    rows: int
    tokens: int
    restarts: int
    seconds: dict[str, float]

    @property
    def busy(self) -> float:
        """Seconds with a shard."""
        return sum(self.seconds[part] for part in ("prefill", "decode", "other"))


@dataclass(frozen=True)
class Timeline:
    """The runs of a job, end to end, each from its first shard's start to its last shard's end.

    Args:
        edges: [BINS + 1] s of such time.
        starts: s at which each run begins.
        rows, tokens: [actors, BINS] per second, by the actor's number in its run.
        lanes: by run and number.
        untimed: shards whose times are unknown, because their records were rebuilt.
    """

    edges: np.ndarray
    starts: list[float]
    rows: np.ndarray
    tokens: np.ndarray
    lanes: list[Lane]
    untimed: int


def run_spans(runs: Sequence[JobRun], shards: pa.Table) -> list[tuple[float, float]]:
    """Begin and end of each run, s since 1970; of runs that are not recorded the span of their shards.

    A run that was killed ends with its last shard.
    """
    started, finished = (shards[name].to_numpy() for name in ("started", "finished"))
    timed = started > 0
    started, finished = started[timed], finished[timed]
    begins = [run.began for run in runs]
    if len(started) and (not runs or started.min() < begins[0]):
        begins.insert(0, float(started.min()))
    ends = [*[None] * (len(begins) - len(runs)), *(run.ended for run in runs)]
    places = np.searchsorted(np.array(begins), started, side="right") - 1
    spans = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        last = max(finished[places == number], default=begin)
        # a shard may finish after its run was stopped; clocks of nodes differ
        spans.append((begin, max(float(last), end or begin)))
    return spans


def timeline(runs: Sequence[JobRun], shards: pa.Table) -> Timeline | None:
    """None if no shard has times.

    shards: as in `STATS_SCHEMA`.
    """
    timed = shards.filter(pa.array(shards["started"].to_numpy() > 0))
    if not timed.num_rows:
        return None
    spans = run_spans(runs, shards)
    begins, ends = (np.array(column) for column in zip(*spans, strict=True))
    started, finished = (timed[name].to_numpy() for name in ("started", "finished"))
    run = np.searchsorted(begins, started, side="right") - 1
    actor = _actors(timed)
    order = np.lexsort((started, actor, run))
    run, actor, started, finished = run[order], actor[order], started[order], finished[order]
    column = {name: timed[name].to_numpy()[order] for name in _NUMBERS}
    first = np.append(True, (run[1:] != run[:-1]) | (actor[1:] != actor[:-1]))
    lane = np.cumsum(first) - 1
    before = np.where(first, begins[run], np.append(0.0, finished[:-1]))
    gap = np.maximum(started - before, 0.0)
    starting = np.clip(column["loaded"] - before, 0.0, gap)
    last = np.append(first[1:], True)
    lanes = lane[-1] + 1

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(lane, values, lanes)

    seconds = {
        "start-up": total(starting),
        "prefill": total(column["prefill_seconds"]),
        "decode": total(column["decode_seconds"]),
        "idle": total(gap - starting) + np.maximum(ends[run[last]] - finished[last], 0.0),
    }
    seconds["other"] = np.maximum(total(finished - started) - seconds["prefill"] - seconds["decode"], 0.0)
    sums = {name: total(column[name]) for name in ("rows", "generated_tokens")}
    restarts = total(np.append(0, (column["loaded"][1:] != column["loaded"][:-1]) & ~first[1:]))
    counts = np.bincount(lane, minlength=lanes)
    devices, nodes = (
        timed[name].combine_chunks().take(pa.array(order[first])).to_pylist() for name in ("device", "node")
    )
    found, numbers = [], np.zeros(lanes, dtype=np.int64)
    runs_of = run[first]
    for place, number in enumerate(runs_of):
        numbers[place] = numbers[place - 1] + 1 if place and runs_of[place - 1] == number else 1
        found.append(
            Lane(
                int(number) + 1,
                int(numbers[place]),
                nodes[place],
                devices[place],
                int(counts[place]),
                int(sums["rows"][place]),
                int(sums["generated_tokens"][place]),
                int(restarts[place]),
                {part: float(seconds[part][place]) for part in PARTS},
            )
        )
    at_work, nth = np.unique(run, return_inverse=True)
    opens = np.array([started[run == number].min() for number in at_work])
    lengths = np.array([finished[run == number].max() for number in at_work]) - opens
    offsets = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    edges = np.linspace(0.0, max(float(lengths.sum()), 1e-3), BINS + 1)
    shift = (offsets - opens)[nth]
    by_number = np.argsort(numbers[lane], kind="stable")
    mine = np.split(by_number, np.cumsum(np.bincount(numbers[lane]))[1:-1])

    def rates(name: str) -> np.ndarray:
        amounts = column[name]
        return np.stack([rate((started + shift)[one], (finished + shift)[one], amounts[one], edges) for one in mine])

    untimed = shards.num_rows - timed.num_rows
    return Timeline(edges, offsets.tolist(), rates("rows"), rates("generated_tokens"), found, untimed)


def least_busy(lanes: Sequence[Lane], count: int) -> list[Lane]:
    """All lanes, or of more the `count` ones with the fewest busy seconds, by run and number."""
    return sorted(sorted(lanes, key=lambda lane: lane.busy)[:count], key=lambda lane: (lane.run, lane.number))


def rate(starts: np.ndarray, ends: np.ndarray, amounts: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Amount per second between each two edges, if each amount flows evenly from its start to its end."""
    ends = np.maximum(ends, starts + 1e-6)
    slopes = amounts / (ends - starts)
    through = _ramp(starts, slopes, edges) - _ramp(ends, slopes, edges)
    rates: np.ndarray = np.maximum(np.diff(through) / np.diff(edges), 0.0)
    return rates


def _ramp(starts: np.ndarray, slopes: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The sum of slope · (place - start) over all starts before each place."""
    order = np.argsort(starts)
    sums = [np.concatenate([[0.0], np.cumsum(values[order])]) for values in (slopes, slopes * starts)]
    count = np.searchsorted(starts[order], places)
    through: np.ndarray = sums[0][count] * places - sums[1][count]
    return through


def _actors(shards: pa.Table) -> np.ndarray:
    """A number for the actor of each shard; without an actor's id the node stands for it."""
    ids = pc.if_else(pc.equal(shards["actor"], ""), shards["node"], shards["actor"])
    numbers: np.ndarray = pc.dictionary_encode(ids.combine_chunks()).indices.to_numpy()
    return numbers


_NUMBERS = ("loaded", "rows", "generated_tokens", "prefill_seconds", "decode_seconds")
