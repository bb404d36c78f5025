"""Estimates time and cost of a job before it runs (`skipdecode plan`).

Actors answer a sample of the job's rows: at the job's speed, at 1x, and at the other trained speeds if the time allows.
Predicted time: start-up + rows · seconds per row ÷ actors.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pyarrow as pa

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from pipeline import job as jobs
from pipeline import nightly
from pipeline.advise.timing import Sample, TimedCall, by_model, time_speeds
from pipeline.answer.answer_checks import warnings_of
from pipeline.answer.stage import prompts
from pipeline.commit.claim import check_same_job, stored_job
from pipeline.commit.records import read_records
from pipeline.config.adapt import TOLERANCES
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard
from pipeline.messages import counted, too_many_errors
from pipeline.plan.batching import warn_of_engine
from pipeline.plan.job import PlannedJob, announce_no_gain, plan
from pipeline.plan.memory import log_memory_estimate
from pipeline.prepare.prompt_spec import PromptSpec, prompt_spec
from pipeline.prepare.prompts import prepare_table
from pipeline.run.stages import Backend
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.isolated import Died
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import open_folder

log = logging.getLogger(__name__)
SAMPLE_SECONDS = 120.0  # time limit for the sample at all speeds together; starts when the first model is loaded
SAMPLED_ACTORS = 8  # maximum number of actors that measure at the same time
PREPARED_ROWS, PLACES = 2048, 16  # maximum number of rows to tokenize; maximum number of shards to read them from
STAGES_SHARE = 0.8  # seconds to start the stages, and for totals, report and exit ÷ seconds of planning
CROWDED = 1.05  # on one machine: an actor's time for some work in a run ÷ its time for this work in the sample
SPREAD, STARTUP_SPREAD = 0.08, 0.1  # relative standard deviations of a run's speed and of its start-up on one machine
Z = 1.645  # half the width of a 90% interval, in standard deviations
OFFERED = (1.5, 2.0, 3.0, 4.0, 5.0)  # speeds to time, if the checkpoint was trained for them
METRICS = tuple(dict.fromkeys(("bleu", "rouge_l", "exact_match", *TOLERANCES)))  # preferred metrics first


class NothingLeft(Exception):
    """The job has no row left to answer."""


def estimate(
    config: JobConfig,
    *,
    limit: int | None = None,
    backend: Backend | None = None,
    process_began: float | None = None,
    seconds: float = SAMPLE_SECONDS,
) -> dict[str, Any]:
    """Plan a job, time a sample of its rows at each speed, and predict time and cost of the job. Write no output.

    seconds: time limit for the sample at all speeds together. For the other arguments see `job.run`.

    Return a dict that JSON can hold. `chosen`: the entry of `speeds` for the job's own speed. `startup`: seconds in
    which no row is answered. They are the sum of plan (from the start of the process), ray (connect to Ray or start it,
    and leave it), load (until the last actor has its model), workers (start processes that prepare rows), and stages
    (start the stages; totals, report and exit).

    Raises:
        UserError: `job.run` would refuse the job, or none of the sampled rows can be answered.
        NothingLeft: Every row is answered already.
    """
    began = process_began or time.time()
    backend = backend or jobs.ray_backend(verbose=False)
    with interruptible():
        job, left = _planned(config, limit, backend)
        planned = time.time() - began
        manifest, batching, rows_left = job.manifest, job.manifest.batching, sum(shard.rows for shard in left)
        log_memory_estimate(config, job.checkpoint, batching, backend)
        if not left:
            raise NothingLeft(f"{config.output.path}: nothing left to do: the output has every row")
        places = sample_places(left)
        spec = prompt_spec(job.config, job.checkpoint, batching.planned)
        before = time.monotonic()
        with announced(f"preparing {sum(place.rows for place in places):,} rows"):
            found = _prepared(backend, places, manifest.files, manifest.schema, job.config.storage, spec)
        prepared = time.monotonic() - before
        good = [prompt for prompt in found if prompt.error is None]
        errors = [prompt.error for prompt in found if prompt.error is not None]
        if not good:
            first = errors[0] if errors else "each sample killed the process that prepared it"
            raise UserError(f"none of {len(found):,} sampled rows can be answered; the first error: {first}")
        share = len(good) / len(found)
        last = share * longest((shard.rows for shard in left), config.actors.most)
        speeds, chosen = schedules(job), job.schedule.name
        before = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(backend.ready(job.config.actors))  # prints a line if it starts Ray
            ray = time.monotonic() - before
            warn_of_engine(config)
            announce_no_gain(job)
            asked = time.time()
            samples = _sample(job, good, speeds, backend, seconds, last)
            before = time.monotonic()
        ray += time.monotonic() - before
    startup = {"plan": planned, "ray": ray, "load": max(sample.loaded for sample in samples) - asked}
    crowd = 1.0
    if backend.starts_workers:  # a run also starts processes that read and prepare rows, and its coordinator
        cpus = process_cpus() if backend.on_this_machine else 1
        startup["workers"] = prepared * (1 + min(config.actors.most, len(left))) / cpus
        crowd = CROWDED if backend.on_this_machine and not config.actors.gpus else 1.0
    startup["stages"] = STAGES_SHARE * planned
    startup["seconds"] = sum(startup.values())
    calls = {name: [call for sample in samples for call in sample.calls[name]] for name in speeds}
    lines = predict(
        speeds,
        calls,
        rows=share * rows_left,
        longest=last,
        startup=startup["seconds"],
        factor=crowd * sum(sample.gain for sample in samples) / len(samples),
    )
    if chosen not in lines:
        raise UserError("no sampled row has an answer: `skipdecode try` shows why")
    known = losses(config, job.schedule.prompt)
    for name, line in lines.items():
        hours = line["seconds"] * config.devices / 3600
        money = None if config.price_per_hour is None else config.price_per_hour * hours
        line |= {"device_hours": hours, "money": money, "loss": known.get(name)}
    saved = ("seconds", "device_hours", "money") if chosen != "1x" and "1x" in lines else ()
    lengths = [len(prompt.ids) for prompt in good]
    return {
        "output": config.output.path,
        "rows": manifest.rows,
        "rows_left": rows_left,
        "files": len(manifest.files),
        "shards": len(manifest.shards),
        "prompt_tokens": {"mean": sum(lengths) / len(lengths), "most": max(lengths), "rows": len(lengths)},
        "row_errors": {
            "sampled": len(found),
            "errors": len(errors),
            "first": errors[0] if errors else "",
            "too_many": too_many_errors(len(errors), len(found), config.max_error_rate),
        },
        "batching": {name: getattr(batching, name) for name in ("scheduler", "max_batch", "cache_bytes")},
        "actors": config.actors.most,
        "price_per_hour": config.price_per_hour,
        "warnings": warnings_of([text for call in calls[chosen] for text in call.texts]),
        "startup": startup,
        "speeds": list(lines.values()),
        "chosen": lines[chosen],
        "saves": {key: lines["1x"][key] - lines[chosen][key] for key in saved if lines["1x"][key] is not None} or None,
    }


def _planned(config: JobConfig, limit: int | None, backend: Backend) -> tuple[PlannedJob, list[Shard]]:
    """Return the planned job, and the shards to answer."""
    if config.input.since is not None:
        if limit is not None:
            raise UserError("--limit: an incremental run cannot have a limit; leave out --limit or input.since")
        root = open_folder(config.output.path, config.storage)
        new = nightly.new_input(config, nightly.read(root))
        if not new:
            raise NothingLeft(f"{config.output.path}: nothing left to plan: no file is new")
        job = plan(config, None, backend, files=new)
        return job, job.manifest.shards
    folder = jobs.output_folder(config)
    stored = stored_job(folder, overwrite=False)
    job = plan(config, stored, backend, limit=limit)
    check_same_job(folder, stored, job.manifest)
    done = set() if stored is None else set(read_records(folder, stored.fingerprint)["shard"].to_pylist())
    return job, [shard for shard in job.manifest.shards if shard.index not in done]


def read_prompts(
    shards: Sequence[Shard], files: Sequence[InputFile], schema: pa.Schema, storage: StorageConfig, spec: PromptSpec
) -> list[Prompt]:
    """Read the rows of shards, and return their prompts."""
    return [
        prompt
        for shard, table in read_shards(files, shards, schema, storage)
        for prompt in prompts(prepare_table(table, spec), shard)
    ]


def _prepared(backend: Backend, places: Sequence[Shard], *inputs: Any) -> list[Prompt]:
    """Return the prompts of the sampled rows. Leave out places with a row that kills the process that prepares it."""
    try:
        return backend.call_isolated(read_prompts, places, *inputs)
    except Died as error:
        if len(places) == 1:
            log.warning("%d sampled rows are left out: the process that prepared them died (%s)", places[0].rows, error)
            return []
    middle = len(places) // 2
    return _prepared(backend, places[:middle], *inputs) + _prepared(backend, places[middle:], *inputs)


def sample_places(shards: Sequence[Shard], rows: int = PREPARED_ROWS) -> list[Shard]:
    """Return shards with the rows to sample: the first rows of evenly spread shards, at most `rows` in total."""
    if sum(shard.rows for shard in shards) <= rows:
        return list(shards)
    count = min(PLACES, len(shards))
    chosen = [shards[place * len(shards) // count] for place in range(count)]
    return [replace(shard, rows=min(shard.rows, rows // count)) for shard in chosen]


def schedules(job: PlannedJob) -> dict[str, Schedule]:
    """Return speed -> schedule: the job's own speed, those of `OFFERED` that the training covers, then 1x."""
    checkpoint = job.checkpoint.checkpoint
    kept = job.config.schedule.without_depths()
    found = {job.schedule.name: job.schedule}
    for speed in OFFERED:
        try:
            schedule = checkpoint.schedule({**kept, "speedup": speed})
        except UserError:  # skip a speed without a schedule, e.g. because the checkpoint has no horizon
            continue
        if checkpoint.trained is not None and checkpoint.trained.covers(schedule):
            found.setdefault(schedule.name, schedule)
    found.pop("1x", None)
    return {**found, "1x": job.schedule if job.schedule.is_full_depth else checkpoint.schedule({"speedup": 1.0})}


def _sample(
    job: PlannedJob, good: Sequence[Prompt], speeds: dict[str, Schedule], backend: Backend, seconds: float, rows: float
) -> list[Sample]:
    """Call `time_speeds` in parallel actors, each with a part of `good`. rows: see `time_speeds`."""
    actors, batching = job.config.actors, job.manifest.batching
    settings = replace(job.settings, speed_adapter=job.checkpoint.pinned_adapter())
    models, workers = len(by_model(settings, speeds)), min(actors.most, SAMPLED_ACTORS, len(good))
    loads = f", and the time to load {models} models one after the other" if models > 1 else ""
    announce(
        f"answering rows at {', '.join(speeds)} on {counted(workers, 'actor')}, for at most about {seconds:g} s or "
        f"a tenth of the job's time{loads}"
    )
    size = min(batching.shard_rows, batching.max_batch * (4 if batching.scheduler == "refill" else 2))
    common = (settings, speeds, size, seconds, rows)
    return backend.call_as_actors(actors, time_speeds, [(good[first::workers], *common) for first in range(workers)])


def longest(shards: Iterable[int], actors: int) -> int:
    """Return the number of rows that the busiest actor answers. Each shard goes to the first actor that is free."""
    ends = [0] * actors
    for rows in shards:
        heapq.heapreplace(ends, ends[0] + rows)
    return max(ends)


def predict(
    speeds: Mapping[str, Schedule],
    calls: Mapping[str, Sequence[TimedCall]],
    *,
    rows: float,
    longest: float,
    startup: float,
    factor: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Predict time and tokens of a whole run at each speed, slowest first. Leave out speeds that gave no answer.

    Args:
        speeds, calls: Schedule and timed calls of each speed, the job's own first.
        rows: Number of rows to answer, without the rows that are expected to have an error.
        longest: How many of these rows the busiest actor answers.
        startup: Seconds of the run in which no actor answers rows.
        factor: An actor's seconds for some work in the run ÷ its seconds for this work in the sample.

    Return speed -> values. seconds, low, high: wall time with start-up, and its 5th and 95th percentiles. busy_seconds:
    working time, summed over actors. layer_ratio: layers of full depth ÷ layers run, in decode steps. speedup: seconds
    per row at 1x ÷ at this speed; speedup_low and speedup_high are its percentiles. ideal: value of `speedup` if time
    were proportional to the layers run. timed_seconds: actors' time in the sample, summed.
    """
    timed = {name: of_speed for name, of_speed in calls.items() if any(call.texts for call in of_speed)}
    totals = {name: reduce(EngineStats.plus, (call.stats for call in calls[name])) for name in timed}
    sampled = {name: sum(call.rows for call in of_speed) for name, of_speed in timed.items()}
    seconds = {name: sum(call.seconds for call in of_speed) for name, of_speed in timed.items()}
    own = next(iter(speeds))
    per_row = factor * seconds[own] / sampled[own] if own in timed else 0.0
    slower = {name: seconds[name] / sum(call.own_seconds for call in of_speed) for name, of_speed in timed.items()}
    second = {name: per_row * slower[name] for name in timed if own in timed}
    errors = {name: math.hypot(SPREAD, _error(of_speed)) for name, of_speed in timed.items()}
    found = dict[str, dict[str, Any]]()
    for name in sorted(second, key=lambda name: -second[name]):
        stats, wall = totals[name], startup + second[name] * longest
        width = Z * math.hypot(STARTUP_SPREAD * startup, errors[name] * second[name] * longest)
        ratio = stats.full_layer_steps / stats.layer_steps if stats.layer_steps else None
        found[name] = {
            "speed": name,
            "seconds": wall,
            "low": max(0.0, wall - width),
            "high": wall + width,
            "busy_seconds": second[name] * rows,
            "generated_tokens": round(stats.generated_tokens / sampled[name] * rows),
            "tokens_per_second": stats.generated_tokens / sampled[name] * rows / wall,
            "layer_ratio": ratio,
            **dict.fromkeys(("speedup", "speedup_low", "speedup_high", "ideal")),
            "sampled": sampled[name],
            "timed_seconds": seconds[name],
        }
        if "1x" in second:
            speedup = second["1x"] / second[name]
            width = 0.0 if name == "1x" else Z * math.hypot(errors["1x"], errors[name]) * speedup
            ends = {"speedup_low": max(0.0, speedup - width), "speedup_high": speedup + width}
            found[name] |= {"speedup": speedup, **ends, "ideal": _ideal(totals["1x"], speeds[name], ratio or 1.0)}
    return found


def _error(timed: Sequence[TimedCall]) -> float:
    """Return the relative standard error of the mean seconds per row; 0 if one call cannot show it."""
    rates = [call.seconds / call.rows for call in timed]
    return stdev(rates) / mean(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0


def _ideal(full: EngineStats, schedule: Schedule, layer_ratio: float) -> float | None:
    """Return the speed-up if prefill and decode times were proportional to the layers run."""
    seconds = full.prefill_seconds + full.decode_seconds
    prefill = full.prefill_seconds * len(schedule.prompt_layers) / schedule.num_layers
    return seconds / (prefill + full.decode_seconds / layer_ratio) if seconds else None


def losses(config: JobConfig, prompt: str) -> dict[str, dict[str, Any]]:
    """Return speed -> recorded loss against full depth: metric, loss (negative for a gain), low, high and source.

    Return {} if there is no record of `adapt` beside the speed adapter or checkpoint. prompt: the prompt policy.
    """
    path = Path(config.model.speed_adapter or config.model.path).parent / "adapt.json"
    found: dict[str, dict[str, Any]] = {}
    with suppress(OSError, AttributeError, LookupError, TypeError, ValueError):  # no valid record
        for line in json.loads(path.read_text())["done"]["after"]["result"]["lines"]:
            metric = next((name for name in METRICS if name in line["scores"]), None)
            if metric is not None and line["nominal"] is not None and line["prompt"] == prompt:
                score = line["scores"][metric]
                loss = {"loss": score["loss"], "low": score.get("loss_low"), "high": score["loss_high"]}
                found.setdefault(f"{line['nominal']:g}x", {"metric": metric, **loss, "source": str(path)})
    return found
