"""Estimate time and cost of a job before it runs (`skipdecode plan`).

Actors answer a sample of the job's rows at each speed. The job takes start-up + rows · seconds a row ÷ actors.
"""

from __future__ import annotations

import gc
import heapq
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from pipeline import job as jobs
from pipeline.commit.claim import check_same_job, stored_job
from pipeline.commit.records import read_records
from pipeline.config.adapt import TOLERANCES
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.generate.answer_checks import texts_of, warnings_of
from pipeline.generate.settings import fetched
from pipeline.generate.stage import prompts
from pipeline.incremental import ledger as ledgers
from pipeline.incremental import runs
from pipeline.input.files import InputFile
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard
from pipeline.messages import counted, duration
from pipeline.plan.manifest import Manifest
from pipeline.plan.memory import log_memory_estimate
from pipeline.planned import PlannedJob, generator_arguments, plan
from pipeline.prepare.prompt_spec import PromptSpec, prompt_spec
from pipeline.prepare.prompts import prepare_table
from pipeline.run.stages import Backend
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.signals import interruptible
from pipeline.runtime.wide_console import wide
from pipeline.storage.folder import open_folder

SAMPLE_SECONDS = 120.0  # all speeds together, model loading excluded
SAMPLE_SHARE = 0.01  # share of the job's rows to answer, if that is more than two batches an actor
LEAST_ROWS = 64  # rows that an actor answers at each speed
SAMPLED_ACTORS = 8  # maximum number of actors that measure at the same time
WARM_UP_ROWS = 8
BATCH_GAIN = 4  # seconds a row of a warm-up divided by those of a full batch, at most
PREPARED_ROWS, PLACES = 2048, 16  # rows to tokenize, read from this many places of the input
STAGES_SECONDS = 1.5  # from a loaded model to the first shard; totals, report and the end of the process
WORKER_SHARE = 0.3  # processor seconds to start a worker that reads and prepares, divided by seconds of planning
CROWDED = 1.05  # seconds of an actor in a run divided by seconds in the sample, where all share one machine's cores
REPLICATES, LOW, HIGH = 400, 5, 95  # bootstrap samples, and percentiles of the interval
SPREAD, STARTUP_SPREAD = 0.08, 0.1  # standard deviation of a run's speed and start-up on one machine, as a share
OFFERED = (1.5, 2.0, 3.0, 4.0, 5.0)  # speeds to time where no tune.json lists those of the training
DEPTH_KEYS = ("speedup", "max_depth", "min_depth", "depths")
METRICS = tuple(dict.fromkeys(("bleu", "rouge_l", "exact_match", *TOLERANCES)))  # preferred first


class NothingLeft(Exception):
    """The job has no row left to answer."""


@dataclass(frozen=True)
class TimedCall:
    """Count rows, seconds and answers of one call of a `Generator`."""

    rows: int
    prompt_tokens: int
    seconds: float
    stats: EngineStats
    texts: list[str]


@dataclass(frozen=True)
class ActorSample:
    """Hold an actor's measurements. loaded: s since 1970 when its model was ready. calls: by speed, without warm-up."""

    loaded: float
    calls: dict[str, list[TimedCall]]


@dataclass(frozen=True)
class Prediction:
    """Predict a whole run at one speed.

    Args:
        seconds: Wall clock with start-up.
        low: 5th percentile of `seconds`.
        high: 95th percentile of `seconds`.
        busy_seconds: Seconds of all actors together.
        prompt_tokens: Tokens of all prompts.
        generated_tokens: Tokens of all answers.
        cache_bytes: Key/value cache of the largest sampled batch.
        layer_ratio: Layers of full depth divided by layers run, over decode steps; None without any.
        speedup: Seconds a row at 1x divided by seconds a row at this speed; None if 1x was not timed.
        ideal: The same if prefill and decode took time in proportion to the layers that they run.
        sampled: Rows that were answered for it.
    """

    seconds: float
    low: float
    high: float
    busy_seconds: float
    prompt_tokens: int
    generated_tokens: int
    cache_bytes: int
    layer_ratio: float | None
    speedup: float | None
    ideal: float | None
    sampled: int


@dataclass(frozen=True)
class Loss:
    """Loss of a speed against full depth, in the metric's unit; a gain is negative. low: None if not recorded."""

    metric: str
    loss: float
    low: float | None
    high: float
    source: str

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:.2g}, "
        return f"loses {self.loss:.2g} [{low}{self.high:.2g}] {self.metric.replace('_', ' ')}"


@dataclass(frozen=True)
class Estimate:
    """Hold the result of `skipdecode plan`.

    Args:
        left: Shards that are not committed.
        prompt_tokens: Prompt lengths of the tokenized rows without an error.
        bad: Number of tokenized rows with an error, and the first error.
        startup: Seconds in which no actor answers: plan (from the start of the process), ray (to start or find it and
            to leave it), load (until the last actor has its model), stages (before the first and after the last row).
        chosen: Name of the job's own speed.
        predictions: By speed, slowest first.
        warnings: About the sampled answers at the job's speed.
        sampled_rows: Rows that were answered at the job's speed.
        sample_seconds: Seconds that actors were busy for the sample.
    """

    job: PlannedJob
    left: list[Shard]
    prompt_tokens: list[int]
    bad: tuple[int, str]
    startup: dict[str, float]
    chosen: str
    predictions: dict[str, Prediction]
    losses: dict[str, Loss]
    warnings: list[str]
    sampled_rows: int
    sample_seconds: float


def estimate(
    config: JobConfig,
    *,
    limit: int | None = None,
    backend: Backend | None = None,
    process_began: float | None = None,
    seconds: float = SAMPLE_SECONDS,
) -> Estimate:
    """Plan a job and time a sample of its rows. Write no output.

    Args:
        limit: Plan only the first rows of the input.
        backend: Where the job would run; Ray Data by default.
        process_began: s since 1970, for the start-up; now by default.
        seconds: Time for the sampled rows, all speeds together.

    Raises:
        UserError: `job.run` would refuse the job, or no sampled row can be answered.
        NothingLeft: Every row is answered.
    """
    began = process_began or time.time()
    backend = backend or jobs.ray_backend(verbose=False)
    with interruptible():
        job, stored, left = _planned(config, limit, backend)
        planned = time.time() - began
        log_memory_estimate(config, job.checkpoint, job.manifest.batching, backend)
        if not left:
            raise NothingLeft(f"{config.output.path}: nothing left to do: every row is answered")
        places = sample_places(left)
        spec = prompt_spec(job.config, job.checkpoint, job.manifest.batching.planned)
        with announced(f"preparing {sum(place.rows for place in places):,} rows"):
            found = backend.call_isolated(
                read_prompts, places, job.manifest.files, job.manifest.schema, job.config.storage, spec
            )
        good = [prompt for prompt in found if prompt.error is None]
        bad = [prompt.error for prompt in found if prompt.error is not None]
        if not good:
            raise UserError(f"none of {len(found):,} sampled rows can be answered; the first: {bad[0]}")
        speeds, chosen = schedules(job), name_of(job.schedule)
        before = time.monotonic()
        with ExitStack() as stack:
            with announced("starting Ray"):
                stack.enter_context(backend.ready(job.config.actors))
            ray = time.monotonic() - before
            job = stack.enter_context(jobs.checked(job, stored, backend))
            asked = time.time()
            samples = _sample(job, good, speeds, backend, seconds, sum(shard.rows for shard in left))
            before = time.monotonic()
        ray += time.monotonic() - before
    load, crowd = max(one.loaded for one in samples) - asked, 1.0
    if backend.on_this_machine and backend.starts_workers:  # a run starts a worker per core while the models load
        load += WORKER_SHARE * planned * min(process_cpus(), len(left)) / process_cpus()
        crowd = 1.0 if config.actors.gpus else CROWDED
    startup = {"plan": planned, "ray": ray, "load": load, "stages": STAGES_SECONDS}
    share = len(good) / len(found)
    predictions = predict(
        speeds,
        calls := {name: [call for one in samples for call in one.calls[name]] for name in speeds},
        rows=share * sum(shard.rows for shard in left),
        longest=share * longest((shard.rows for shard in left), config.actors.most),
        startup=sum(startup.values()),
        crowd=crowd,
    )
    if chosen not in predictions:
        raise UserError("no sampled row has an answer: `skipdecode try` shows why")
    return Estimate(
        job=job,
        left=left,
        prompt_tokens=[len(prompt.ids) for prompt in good],
        bad=(len(bad), bad[0] if bad else ""),
        startup=startup,
        chosen=chosen,
        predictions=predictions,
        losses=losses(config, job.schedule.prompt),
        warnings=warnings_of([text for call in calls[chosen] for text in call.texts]),
        sampled_rows=sum(call.rows for call in calls[chosen]),
        sample_seconds=sum(call.seconds for timed in calls.values() for call in timed),
    )


def _planned(config: JobConfig, limit: int | None, backend: Backend) -> tuple[PlannedJob, Manifest | None, list[Shard]]:
    """Return the job, the one that its output holds, and the shards that are left. Write nothing."""
    if config.input.since is not None:
        if limit is not None:
            raise UserError("--limit: an incremental run has no limit; leave out --limit or input.since")
        ledger = ledgers.read(open_folder(config.output.path, config.storage))
        new = runs.new_input(config, ledger)
        if not new.files:
            raise NothingLeft(f"{config.output.path}: nothing left to do: no file is new")
        job = plan(new.config, None, backend, files=new.files)
        return job, None, job.manifest.shards
    folder = jobs.output_folder(config)
    stored = stored_job(folder, overwrite=False)
    job = plan(config, stored, backend, limit=limit)
    check_same_job(folder, stored, job.manifest)
    done = set() if stored is None else set(read_records(folder, stored.fingerprint)["shard"].to_pylist())
    return job, stored, [shard for shard in job.manifest.shards if shard.index not in done]


def sample_places(shards: Sequence[Shard], rows: int = PREPARED_ROWS) -> list[Shard]:
    """Return beginnings of shards, evenly spread, that hold at most `rows` rows; all shards if they hold no more."""
    if sum(shard.rows for shard in shards) <= rows:
        return list(shards)
    count = min(PLACES, len(shards))
    chosen = [shards[place * len(shards) // count] for place in range(count)]
    return [replace(shard, rows=min(shard.rows, rows // count)) for shard in chosen]


def read_prompts(
    places: Sequence[Shard], files: Sequence[InputFile], schema: pa.Schema, storage: StorageConfig, spec: PromptSpec
) -> list[Prompt]:
    """Return the prompts of rows."""
    return [
        prompt
        for place, table in read_shards(files, places, schema, storage)
        for prompt in prompts(prepare_table(table, spec), place)
    ]


def name_of(schedule: Schedule) -> str:
    """Return the speed of a schedule as shown to users, such as `2x`."""
    if schedule.is_full_depth:
        return "1x"
    return f"{schedule.speedup:g}x" if schedule.speedup is not None else "the job's schedule"


def schedules(job: PlannedJob) -> dict[str, Schedule]:
    """Return schedules by name: the job's own, other speeds that the checkpoint was trained for, and 1x at the end."""
    checkpoint = job.checkpoint.checkpoint
    kept = {key: value for key, value in job.config.schedule.changes().items() if key not in DEPTH_KEYS}
    found = {name_of(job.schedule): job.schedule}
    for speed in _trained_speeds(job.config):
        try:
            schedule = checkpoint.schedule({**kept, "speedup": speed})
        except UserError:  # for example a horizon is missing
            continue
        if checkpoint.trained is not None and checkpoint.trained.covers(schedule):
            found.setdefault(name_of(schedule), schedule)
    found.pop("1x", None)
    return {**found, "1x": job.schedule if job.schedule.is_full_depth else checkpoint.schedule({"speedup": 1.0})}


def _trained_speeds(config: JobConfig) -> list[float]:
    folder = Path(config.model.speed_adapter or config.model.path)
    try:
        values = _json(folder / "tune.json", dict)["config"]["schedule"]["speedups"]
        return sorted(float(value) for value in values if value > 1) or list(OFFERED)
    except (LookupError, TypeError, ValueError):
        return list(OFFERED)


def _sample(
    job: PlannedJob, good: Sequence[Prompt], speeds: dict[str, Schedule], backend: Backend, seconds: float, rows: int
) -> list[ActorSample]:
    """Let actors answer rows of their own at every speed, all at the same time."""
    actors, batching = job.config.actors, job.manifest.batching
    count = min(len(good), max(math.ceil(SAMPLE_SHARE * rows), max(2 * batching.max_batch, LEAST_ROWS) * actors.most))
    workers = min(actors.most, SAMPLED_ACTORS, count)
    spread = [good[place * len(good) // count] for place in range(count)]
    announce(
        f"answering up to {counted(count, 'row')} at {', '.join(speeds)} on {counted(workers, 'actor')}, "
        f"about {seconds:g} s"
    )
    generator = {**generator_arguments(job), "speed_adapter": job.checkpoint.pinned_adapter()}
    size = min(batching.shard_rows, batching.max_batch * (4 if batching.scheduler == "refill" else 2))
    calls = [
        (spread[worker::workers], generator, batching.prefix, speeds, name_of(job.schedule), size, seconds)
        for worker in range(workers)
    ]
    return backend.call_as_actors(actors, time_speeds, calls)


def time_speeds(
    given: Sequence[Prompt],
    generator: Mapping[str, Any],
    prefix: Sequence[int],
    speeds: Mapping[str, Schedule],
    chosen: str,
    size: int,
    seconds: float,
) -> ActorSample:
    """Answer rows at each speed, as many as the time allows, in a process of an actor.

    Calls of all speeds alternate, so that machine drift affects them equally. The job's own speed and 1x are always
    timed, others where the time allows a call of as many rows.

    Args:
        given: Rows.
        generator: Arguments of `Generator`, checkpoint and speed adapter as `fetch` takes them; the adapter is merged
            for schedules that skip layers.
        prefix: Token ids with which the prompts begin.
        speeds: Schedules by name.
        chosen: Name of the job's own speed.
        size: Rows of a call at most.
        seconds: Time for all speeds after the first model is loaded. The first calls may exceed it.
    """
    from actors.generator import Generator

    settings, began = fetched(generator), 0.0
    adapter, loaded = settings["speed_adapter"], 0.0
    calls: dict[str, list[TimedCall]] = {name: [] for name in speeds}
    # of the speed adapter's weights; and vLLM captures CUDA graphs at full depth alone
    apart = adapter is not None or settings.get("vllm") is not None
    skipping = [name for name, schedule in speeds.items() if apart and not schedule.is_full_depth]
    groups = [names for names in (skipping, [name for name in speeds if name not in skipping]) if names]
    one: Generator | None = None
    at: dict[str, Generator] = {}
    for number, names in enumerate(groups, 1):
        if one is not None:
            one.engine.close()
        one, at = None, {}  # two models do not share the memory
        gc.collect()
        first = {"speed_adapter": adapter if names is skipping else None, "schedule": speeds[names[0]]}
        one = Generator(**{**settings, **first})
        loaded, began = loaded or time.time(), began or time.monotonic()
        until = began + seconds * number / len(groups)
        at = {name: one.at(speeds[name]) for name in names}
        needed = [name for name in names if name in (chosen, "1x")]
        parts = math.ceil(len(given) / size)
        for part in range(parts):
            rows = given[part::parts]  # spread over the input
            for name in sorted(names, key=lambda name: name not in needed):
                left = until - time.monotonic()
                if calls[name]:
                    second = calls[name][-1].seconds / calls[name][-1].rows
                elif part:
                    continue
                else:
                    warm_up = _timed(at[name], given[:WARM_UP_ROWS], prefix)
                    second = warm_up.seconds / warm_up.rows / BATCH_GAIN
                    left /= max(1, sum(not calls[other] for other in needed))
                fits = int(left / second)
                if fits >= len(rows) or (name in needed and not calls[name]):
                    calls[name].append(_timed(at[name], rows[: max(fits, WARM_UP_ROWS)], prefix))
    return ActorSample(loaded, calls)


def _timed(generator: Any, rows: Sequence[Prompt], prefix: Sequence[int]) -> TimedCall:
    generator.take_stats()
    began = time.perf_counter()
    answers = generator.answer(rows, prefix)
    tokens = sum(len(prompt.ids) for prompt in rows)
    return TimedCall(len(rows), tokens, time.perf_counter() - began, generator.take_stats(), texts_of(answers))


def longest(shards: Iterable[int], actors: int) -> int:
    """Return the rows of the actor that ends last, if each shard goes to the actor that is free first."""
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
    crowd: float = 1.0,
) -> dict[str, Prediction]:
    """Return predictions by speed, slowest first, for speeds at which some row has an answer.

    Args:
        speeds: Schedules by name.
        calls: Measurements by name.
        rows: Rows to answer, without those that are expected to fail in preparation.
        longest: Rows of the actor that ends last.
        startup: Seconds of the run in which no actor answers.
        crowd: Seconds of an actor in the run divided by seconds for the same work in the sample.
    """
    random = np.random.default_rng(0)
    totals = {
        name: reduce(EngineStats.plus, (call.stats for call in timed), EngineStats()) for name, timed in calls.items()
    }
    second = {
        name: crowd * sum(call.seconds for call in timed) / sum(call.rows for call in timed)
        for name, timed in calls.items()
        if any(call.texts for call in timed)
    }
    found = {}
    for name in sorted(second, key=lambda name: -second[name]):
        stats, estimate = totals[name], startup + second[name] * longest
        timed = np.array([[call.rows, crowd * call.seconds] for call in calls[name]])
        drawn = timed[random.integers(len(timed), size=(REPLICATES, len(timed)))].sum(axis=1)
        spread = np.maximum(0.5, random.normal(1.0, [[SPREAD], [STARTUP_SPREAD]], size=(2, REPLICATES)))
        runs = startup * spread[1] + drawn[:, 1] / drawn[:, 0] * spread[0] * longest
        sampled = int(timed[:, 0].sum())
        ratio = stats.full_layer_steps / stats.layer_steps if stats.layer_steps else None
        found[name] = Prediction(
            seconds=estimate,
            low=min(float(np.percentile(runs, LOW)), estimate),
            high=max(float(np.percentile(runs, HIGH)), estimate),
            busy_seconds=second[name] * rows,
            prompt_tokens=round(sum(call.prompt_tokens for call in calls[name]) / sampled * rows),
            generated_tokens=round(stats.generated_tokens / sampled * rows),
            cache_bytes=stats.cache_bytes,
            layer_ratio=ratio,
            speedup=second["1x"] / second[name] if "1x" in second else None,
            ideal=_ideal(totals["1x"], speeds[name], ratio or 1.0) if "1x" in second else None,
            sampled=sampled,
        )
    return found


def _ideal(full: EngineStats, schedule: Schedule, layer_ratio: float) -> float | None:
    """Return the speed-up if full depth's prefill and decode shrank with the layers that the schedule runs."""
    seconds = full.prefill_seconds + full.decode_seconds
    prefill = full.prefill_seconds * len(schedule.prompt_layers) / schedule.num_layers
    return seconds / (prefill + full.decode_seconds / layer_ratio) if seconds else None


def losses(config: JobConfig, prompt: str) -> dict[str, Loss]:
    """Return recorded losses by speed; {} without a record of evaluate or adapt beside the checkpoint or adapter.

    Args:
        config: The job's config.
        prompt: The job's prompt policy.
    """
    folder = Path(config.model.speed_adapter or config.model.path)
    for place in (folder, folder / "evaluate", folder.parent) if folder.is_dir() else ():
        found = _table_losses(place / "table.json", prompt) or _adapt_losses(place / "adapt.json", prompt)
        if found:
            return found
    return {}


def _table_losses(path: Path, prompt: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {}
    for line in _json(path, list):
        if not isinstance(line, dict) or line.get("nominal") is None or line.get("prompt") != prompt:
            continue
        metric = next((name for name in METRICS if line.get(f"{name}_loss") is not None), None)
        if metric is not None and line.get("group") in ("speed", "prompt"):
            values = (line[f"{metric}_loss"], line[f"{metric}_loss_low"], line[f"{metric}_loss_high"])
            found.setdefault(f"{line['nominal']:g}x", Loss(metric, *values, str(path)))
    return found


def _adapt_losses(path: Path, prompt: str) -> dict[str, Loss]:
    found = {}
    try:
        for line in _json(path, dict)["done"]["after"]["result"]["lines"]:
            metric = next((name for name in METRICS if name in line["scores"]), None)
            if metric is not None and line["nominal"] is not None and line["prompt"] == prompt:
                score = line["scores"][metric]
                found[f"{line['nominal']:g}x"] = Loss(metric, score["loss"], None, score["loss_high"], str(path))
    except (LookupError, TypeError, ValueError):
        return {}
    return found


def _json(path: Path, kind: type) -> Any:
    """Return the value of a JSON file; an empty one if the file is missing or holds another type."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return kind()
    return value if isinstance(value, kind) else kind()


def to_dict(found: Estimate) -> dict[str, Any]:
    """Return plain values. `chosen` is the line of `speeds` that the job runs."""
    config, manifest, batching = found.job.config, found.job.manifest, found.job.manifest.batching
    speeds = {name: _line(config, name, one, found) for name, one in found.predictions.items()}
    chosen, full = speeds[found.chosen], speeds.get("1x")
    saves = None
    if full is not None and found.chosen != "1x":
        saves = {name: full[name] - chosen[name] for name in ("seconds", "device_hours", "money") if full[name]}
    return {
        "output": config.output.path,
        "rows": manifest.rows,
        "rows_left": sum(shard.rows for shard in found.left),
        "files": len(manifest.files),
        "shards": len(manifest.shards),
        "shards_left": len(found.left),
        "prompt_tokens": {
            "mean": float(np.mean(found.prompt_tokens)),
            "median": float(np.median(found.prompt_tokens)),
            "most": max(found.prompt_tokens),
            "rows": len(found.prompt_tokens),
            "shared_prefix": len(batching.prefix),
        },
        "row_errors": {
            "sampled": len(found.prompt_tokens) + found.bad[0],
            "errors": found.bad[0],
            "first": found.bad[1],
        },
        "batching": {
            name: getattr(batching, name) for name in ("scheduler", "max_batch", "shard_rows", "cache_bytes", "threads")
        },
        "actors": config.actors.most,
        "devices": config.devices,
        "price_per_hour": config.price_per_hour,
        "sample": {"rows": found.sampled_rows, "actor_seconds": found.sample_seconds},
        "warnings": found.warnings,
        "startup": {**found.startup, "seconds": sum(found.startup.values())},
        "speeds": list(speeds.values()),
        "chosen": chosen,
        "saves": saves,
    }


def _line(config: JobConfig, name: str, one: Prediction, found: Estimate) -> dict[str, Any]:
    loss, tokens = found.losses.get(name), max(one.generated_tokens, 1)
    price = None if config.price_per_hour is None else config.devices / 3600 * config.price_per_hour
    return {
        "speed": name,
        **asdict(one),
        "tokens_per_second": one.generated_tokens / one.seconds,
        "device_seconds_per_million_tokens": {
            "at_work": 1e6 * one.busy_seconds * (config.actors.gpus or 1) / tokens,
            "with_start_up_and_idle": 1e6 * one.seconds * config.devices / tokens,
        },
        "device_hours": one.seconds * config.devices / 3600,
        "money": None if price is None else price * one.seconds,
        "money_low": None if price is None else price * one.low,
        "money_high": None if price is None else price * one.high,
        "loss": None if loss is None else asdict(loss),
    }


def print_estimate(console: Console, found: Estimate) -> None:
    """Print rows, prompts, batches, the table of speeds, and the savings and loss of the job's speed."""
    console = wide(console, 150)
    values = to_dict(found)
    config, tokens, batching = found.job.config, values["prompt_tokens"], values["batching"]
    left = "" if values["rows_left"] == values["rows"] else f", {values['rows_left']:,} rows left"
    rows, files, shards = (counted(values[f"{noun}s"], noun) for noun in ("row", "file", "shard"))
    console.print(f"{rows} in {files}, {shards}{left}")
    console.print(
        f"prompts: {tokens['mean']:,.0f} tokens on average, {tokens['most']:,} at most, of {tokens['rows']:,} rows"
        + (f"; all begin with the same {tokens['shared_prefix']:,}" if tokens["shared_prefix"] else ""),
    )
    if found.bad[0]:
        console.print(f"rows with an error in the sample: {found.bad[0]:,}; the first: {found.bad[1]}", markup=False)
    console.print(
        f"batches: {batching['scheduler']}, at most {batching['max_batch']:,} rows in flight and "
        f"{batching['cache_bytes'] / 2**20:,.0f} MiB of cache an actor; {counted(values['actors'], 'actor')}\n"
    )
    console.print(_table(found, values))
    actors = "an actor" if values["actors"] == 1 else "actors"
    console.print(
        f"\nwall clock with {values['startup']['seconds']:.0f} s of start-up, in brackets a 90% interval; from "
        f"{values['sample']['rows']:,} rows that {actors} answered here; ideal: if time shrank with the layers run"
    )
    cost = values["chosen"]["device_seconds_per_million_tokens"]
    console.print(
        f"cost at work: {cost['at_work']:,.0f} device-seconds for a million generated tokens; with start-up and idle: "
        f"{cost['with_start_up_and_idle']:,.0f}"
    )
    if values["saves"] is not None:
        console.print(_saves(found, values["saves"]), markup=False)
    for line in found.warnings:
        console.print(f"warning: in the sample, {line}", markup=False)
    if config.budget is not None:
        chosen = values["chosen"]
        needed = {"hours": chosen["device_hours"], "money": chosen["money"], "tokens": chosen["generated_tokens"]}
        limits = config.budget.model_dump(exclude_none=True).items()
        over = [f"{name} {needed[name]:,.4g} of {limit:,.4g}" for name, limit in limits if needed[name] > limit]
        console.print(f"budget: not enough, the job would stop: {', '.join(over)}" if over else "budget: enough")


def _table(found: Estimate, values: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    priced = found.job.config.price_per_hour is not None
    names = ["speed", "wall clock", "", "tokens/s", "new tokens", "layer ratio", "speed-up", "ideal", "cache MiB"]
    for name in [*names, "device-hours", *(["money"] if priced else []), *(["loss"] if found.losses else [])]:
        table.add_column(name, justify="left" if name == "loss" else "right", no_wrap=True)
    for line in values["speeds"]:
        cells = [
            line["speed"] + (" *" if line["speed"] == found.chosen else ""),
            duration(line["seconds"]),
            f"[{duration(line['low'])}, {duration(line['high'])}]".replace("[", r"\["),
            f"{line['tokens_per_second']:,.0f}",
            f"{line['generated_tokens']:,}",
            *("-" if line[key] is None else f"{line[key]:.2f}x" for key in ("layer_ratio", "speedup", "ideal")),
            f"{line['cache_bytes'] / 2**20:,.1f}",
            f"{line['device_hours']:.3g}",
        ]
        cells += [f"{line['money']:,.2f}"] if priced else []
        cells += [str(found.losses.get(line["speed"], "-")).replace("[", r"\[")] if found.losses else []
        table.add_row(*cells)
    return table


def _saves(found: Estimate, saves: Mapping[str, Any]) -> str:
    """Return a line such as: 2x saves 41.00 and 5.2 h against 1x; loses 0.3 [-0.5, 1.1] bleu (table.json)."""
    parts = [f"{saves['money']:,.2f}"] if saves.get("money") is not None else []
    parts.append(duration(abs(saves["seconds"])))
    verb, loss = "saves" if saves["seconds"] >= 0 else "costs", found.losses.get(found.chosen)
    known = (
        f"{loss} ({loss.source})" if loss else "no evaluate or adapt record beside the checkpoint says what it loses"
    )
    return f"{found.chosen} {verb} {' and '.join(parts)} against 1x; {known}"
