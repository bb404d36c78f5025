"""From measurements to a whole job: its shards simulated, on its actors, with an interval. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.answers import Prompt
from actors.engine.schedules.schedule import Schedule
from pipeline.estimate.costs import Costs
from pipeline.estimate.measure import ActorSample, Chunk
from pipeline.estimate.rows import Rows
from pipeline.estimate.simulate import EngineShape, Simulated, SimulatedRow, simulate
from pipeline.read.shards import Shard

SIMULATED_ROWS = 4096  # of the job, at most; other shards are taken to be like these
REPLICATES = 16  # of the simulation, each over answers and batches drawn again
SPREAD = 0.08  # of a run's speed between two times of the same machine: a standard deviation, as a share
STARTUP_SPREAD = 0.1  # the same of its start-up
LOW, HIGH = 5, 95  # percentiles of the interval


@dataclass(frozen=True)
class Work:
    """The rest of a job.

    Args:
        shards: Shards to answer.
        known: Tokenized prompts, by file and row number.
        actors: Number of actors.
        startup: Seconds of the run in which no actor answers.
        prepare: Seconds to tokenize all rows with all workers.
        crowd: Seconds of an actor in the run ÷ seconds for the same work in the sample.
    """

    shards: Sequence[Shard]
    known: Mapping[tuple[str, int], Prompt]
    actors: int
    startup: float
    prepare: float
    crowd: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """A whole run at one speed.

    seconds, low, high: wall clock with start-up, and its 90% interval. busy_seconds: of all actors together.
    batches: of the whole run. cache_bytes: of the largest batch. layer_ratio: layers of full depth over layers run,
    over decode steps; None without any. sampled: requests that were answered for it.
    """

    seconds: float
    low: float
    high: float
    busy_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    generated_tokens: int
    batches: int
    cache_bytes: int
    layer_ratio: float | None
    sampled: int


def predict(
    name: str, schedule: Schedule, costs: Costs, samples: Sequence[ActorSample], shape: EngineShape, work: Work
) -> Prediction:
    """The run at the speed `name` of the samples, each of one actor."""
    random = np.random.default_rng(0)
    chunks = [(sample_number, chunk) for sample_number, one in enumerate(samples) for chunk in one.speeds[name].chunks]
    answered = [answer for _, chunk in chunks for answer in chunk.answered]
    requests = len({(number, row) for number, chunk in chunks for row in chunk.rows})
    per_row = max(1, round(len(answered) / max(requests, 1)))
    times = [(chunk.seconds, _again(chunk, schedule, costs, shape)) for _, chunk in chunks]
    runs = []
    for replicate in range(REPLICATES + 1):
        drawn, factor, startup = answered, _factor(times), work.startup
        if replicate:  # the first is the estimate itself
            drawn = [answered[index] for index in random.integers(len(answered), size=len(answered))]
            picked = [times[index] for index in random.integers(len(times), size=len(times))]
            factor = _factor(picked) * max(0.5, random.normal(1.0, SPREAD))
            startup = work.startup * max(0.5, random.normal(1.0, STARTUP_SPREAD))
        rows = Rows(work.known, drawn, per_row, random)
        runs.append(_run(rows, schedule, costs, shape, replace(work, startup=startup), factor))
    seconds = [run[0] for run in runs]
    low, high = np.percentile(seconds[1:], [LOW, HIGH])
    (estimate, busy, totals) = runs[0]
    return Prediction(
        seconds=estimate,
        low=min(float(low), estimate),
        high=max(float(high), estimate),
        busy_seconds=busy,
        prefill_seconds=totals.prefill_seconds,
        decode_seconds=totals.decode_seconds,
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=totals.generated_tokens,
        batches=totals.batches,
        cache_bytes=totals.cache_bytes,
        layer_ratio=schedule.num_layers * totals.row_steps / totals.layer_steps if totals.layer_steps else None,
        sampled=len(answered),
    )


def makespan(seconds: Iterable[float], actors: int) -> float:
    """When the last shard ends, if each goes to the actor that is free first."""
    ends = [0.0] * actors
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def _again(chunk: Chunk, schedule: Schedule, costs: Costs, shape: EngineShape) -> float:
    """Simulated seconds of a measured chunk."""
    rows = [
        SimulatedRow(prompt, one.limit, one.tokens, row)
        for row, one, prompt in zip(chunk.rows, chunk.answered, chunk.prompts, strict=True)
    ]
    return simulate(rows, schedule, costs, shape).seconds


def _factor(times: Sequence[tuple[float, float]]) -> float:
    """Measured ÷ simulated seconds: covers costs that are not modelled, such as detokenization."""
    measured, simulated = (sum(column) for column in zip(*times, strict=True))
    return measured / simulated if simulated else 1.0


def _run(
    rows: Rows, schedule: Schedule, costs: Costs, shape: EngineShape, work: Work, factor: float
) -> tuple[float, float, Simulated]:
    """Wall clock, busy seconds of all actors, and totals of a whole run."""
    all_rows = sum(shard.rows for shard in work.shards)
    count = min(len(work.shards), max(1, SIMULATED_ROWS * len(work.shards) // all_rows))
    chosen = [place * len(work.shards) // count for place in range(count)]
    factor *= work.crowd
    done: dict[int, tuple[int, Simulated]] = {}
    for place in chosen:
        shard = work.shards[place]
        some = replace(shard, rows=min(shard.rows, SIMULATED_ROWS))
        done[place] = (some.rows, simulate(rows.of(some), schedule, costs, shape))
    guesses = rows.random.integers(count, size=len(work.shards))
    seconds, totals = [], Simulated()
    for place, shard in enumerate(work.shards):
        simulated_rows, one = done[place] if place in done else done[chosen[guesses[place]]]
        share = shard.rows / simulated_rows
        seconds.append(one.seconds * share * factor)
        totals.prefill_seconds += one.prefill_seconds * share * factor
        totals.decode_seconds += one.decode_seconds * share * factor
        for name in ("batches", "prompt_tokens", "generated_tokens", "row_steps", "layer_steps"):
            setattr(totals, name, getattr(totals, name) + round(getattr(one, name) * share))
        totals.cache_bytes = max(totals.cache_bytes, one.cache_bytes)
    wall = work.startup + max(makespan(seconds, work.actors), work.prepare)
    return wall, sum(seconds), totals
