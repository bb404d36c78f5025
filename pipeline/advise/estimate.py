"""Estimates time and cost of a job before it runs (`skipdecode plan`).

Actors answer a sample of the job's rows at each speed. Predicted time: start-up + rows · seconds per row ÷ actors.
"""

from __future__ import annotations

import gc
import heapq
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from actors.settings import EngineSettings
from pipeline import job as jobs
from pipeline import nightly
from pipeline.answer.answer_checks import texts_of, warnings_of
from pipeline.answer.settings import fetched
from pipeline.answer.stage import prompts
from pipeline.commit.claim import check_same_job, stored_job
from pipeline.commit.records import read_records
from pipeline.config.adapt import TOLERANCES
from pipeline.config.evaluate import DEPTH_KEYS
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import InputFile
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard
from pipeline.messages import counted
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
SAMPLE_SHARE = 0.01  # share of the job's rows in the sample; each actor gets at least two batches
LEAST_ROWS = 64  # minimum number of rows to give each actor at each speed
SAMPLED_ACTORS = 8  # maximum number of actors that measure at the same time
WARM_UP_ROWS = 8
BATCH_GAIN = 4  # assumed maximum of: seconds per row of a warm-up ÷ seconds per row of a full batch
PREPARED_ROWS, PLACES = 2048, 16  # maximum number of rows to tokenize; maximum number of shards to read them from
STAGES_SECONDS = 2.5  # from the loaded model to the first shard, plus the time for totals, report and exit
WORKER_SHARE = 1.0  # CPU seconds to start a process that reads and prepares rows ÷ seconds of planning
CROWDED = 1.05  # on one machine: an actor's time for some work in a run ÷ its time for this work in the sample
REPLICATES, LOW, HIGH = 400, 5, 95  # number of bootstrap samples; percentiles that bound the interval
SPREAD, STARTUP_SPREAD = 0.08, 0.1  # relative standard deviations of a run's speed and of its start-up on one machine
OFFERED = (1.5, 2.0, 3.0, 4.0, 5.0)  # speeds to time, if the checkpoint was trained for them
METRICS = tuple(dict.fromkeys(("bleu", "rouge_l", "exact_match", *TOLERANCES)))  # preferred metrics first


class NothingLeft(Exception):
    """The job has no row left to answer."""


@dataclass(frozen=True)
class TimedCall:
    """Measurements of one call of a `Generator`."""

    rows: int
    prompt_tokens: int
    seconds: float
    stats: EngineStats
    texts: list[str]


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
    and leave it), load (until the last actor has its model), and stages (before the first and after the last row).

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
        with announced(f"preparing {sum(place.rows for place in places):,} rows"):
            found = _prepared(backend, places, manifest.files, manifest.schema, job.config.storage, spec)
        good = [prompt for prompt in found if prompt.error is None]
        errors = [prompt.error for prompt in found if prompt.error is not None]
        if not good:
            first = errors[0] if errors else "each sample killed the process that prepared it"
            raise UserError(f"none of {len(found):,} sampled rows can be answered; the first error: {first}")
        speeds, chosen = schedules(job), name_of(job.schedule)
        before = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(backend.ready(job.config.actors))  # prints a line if it starts Ray
            ray = time.monotonic() - before
            announce_no_gain(job)
            asked = time.time()
            samples = _sample(job, good, speeds, backend, seconds, rows_left)
            before = time.monotonic()
        ray += time.monotonic() - before
    load, crowd = max(loaded for loaded, *_ in samples) - asked, 1.0
    if backend.on_this_machine and backend.starts_workers:  # a run also starts a worker per core while models load
        load += WORKER_SHARE * planned * min(process_cpus(), len(left)) / process_cpus()
        crowd = 1.0 if config.actors.gpus else CROWDED
    startup = {"plan": planned, "ray": ray, "load": load, "stages": STAGES_SECONDS}
    startup["seconds"] = sum(startup.values())
    share = len(good) / len(found)
    calls = {name: [call for *_, timed in samples for call in timed[name]] for name in speeds}
    further = max((seconds for _, seconds, _ in samples), key=sum)
    last = share * longest((shard.rows for shard in left), config.actors.most)
    lines = predict(speeds, calls, rows=share * rows_left, longest=last, startup=startup["seconds"], crowd=crowd)
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
        "shards_left": len(left),
        "prompt_tokens": {
            "mean": float(np.mean(lengths)),
            "median": float(np.median(lengths)),
            "most": max(lengths),
            "rows": len(lengths),
        },
        "row_errors": {"sampled": len(found), "errors": len(errors), "first": errors[0] if errors else ""},
        "batching": {
            name: getattr(batching, name) for name in ("scheduler", "max_batch", "shard_rows", "cache_bytes", "threads")
        },
        "actors": config.actors.most,
        "devices": config.devices,
        "price_per_hour": config.price_per_hour,
        "sample": {
            "rows": lines[chosen]["sampled"],
            "actor_seconds": sum(call.seconds for timed in calls.values() for call in timed),
            "further_loads": len(further),
            "further_load_seconds": sum(further),
        },
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


def name_of(schedule: Schedule) -> str:
    """Return the name under which users see a schedule's speed, such as `2x`."""
    if schedule.is_full_depth:
        return "1x"
    return f"{schedule.speedup:g}x" if schedule.speedup is not None else "the configured depths"


def schedules(job: PlannedJob) -> dict[str, Schedule]:
    """Return speed -> schedule: the job's own speed, those of `OFFERED` that the training covers, then 1x."""
    checkpoint = job.checkpoint.checkpoint
    kept = {key: value for key, value in job.config.schedule.changes().items() if key not in DEPTH_KEYS}
    found = {name_of(job.schedule): job.schedule}
    for speed in OFFERED:
        try:
            schedule = checkpoint.schedule({**kept, "speedup": speed})
        except UserError:  # skip a speed without a schedule, e.g. because the checkpoint has no horizon
            continue
        if checkpoint.trained is not None and checkpoint.trained.covers(schedule):
            found.setdefault(name_of(schedule), schedule)
    found.pop("1x", None)
    return {**found, "1x": job.schedule if job.schedule.is_full_depth else checkpoint.schedule({"speedup": 1.0})}


def _sample(
    job: PlannedJob, good: Sequence[Prompt], speeds: dict[str, Schedule], backend: Backend, seconds: float, rows: int
) -> list[tuple[float, list[float], dict[str, list[TimedCall]]]]:
    """Call `time_speeds` in parallel actors, each with a part of `good`. rows: rows to answer in the job."""
    actors, batching = job.config.actors, job.manifest.batching
    count = min(len(good), max(math.ceil(SAMPLE_SHARE * rows), max(2 * batching.max_batch, LEAST_ROWS) * actors.most))
    workers = min(actors.most, SAMPLED_ACTORS, count)
    spread = [good[place * len(good) // count] for place in range(count)]
    settings = replace(job.settings, speed_adapter=job.checkpoint.pinned_adapter())
    models = len(by_model(settings, speeds))
    announce(
        f"answering up to {counted(count, 'row')} at {', '.join(speeds)} on {counted(workers, 'actor')}, "
        f"for at most about {seconds:g} s"
        + (f", and the time to load {models} models one after the other" if models > 1 else "")
    )
    size = min(batching.shard_rows, batching.max_batch * (4 if batching.scheduler == "refill" else 2))
    common = (settings, speeds, name_of(job.schedule), size, seconds)
    return backend.call_as_actors(actors, time_speeds, [(spread[first::workers], *common) for first in range(workers)])


def by_model(settings: EngineSettings, speeds: Mapping[str, Schedule]) -> list[dict[str, Schedule]]:
    """Return the speeds in groups, one for each model that is loaded.

    1x needs a model without the merged speed adapter. A vLLM engine in which every token runs the same layers holds no
    others (see `actors.vllm.engine`).
    """
    groups: dict[Any, dict[str, Schedule]] = {}
    for name, schedule in speeds.items():
        one_depth = settings.vllm is not None and schedule.is_uniform
        without = settings.speed_adapter is not None and schedule.is_full_depth
        groups.setdefault(schedule.prompt_layers if one_depth else without, {})[name] = schedule
    return list(groups.values())


def time_speeds(
    given: Sequence[Prompt],
    settings: EngineSettings,
    speeds: Mapping[str, Schedule],
    chosen: str,
    size: int,
    seconds: float,
) -> tuple[float, list[float], dict[str, list[TimedCall]]]:
    """Answer rows at each speed in an actor's process, and time the calls.

    Args:
        given: Prompts of the rows. If time runs out, some of them are not answered.
        settings: Settings of the engine, in which checkpoint and speed adapter are sources for `fetch`.
        chosen: The job's own speed. This speed and 1x are always timed, other speeds only if time is left.
        size: Maximum number of rows in a call.
        seconds: Time limit for all speeds, without the time to load models. The first calls may exceed it.

    Return the time at which the first model was ready (s since 1970), the seconds that each further model took to load,
    and speed -> timed calls, without warm-ups.
    """
    from actors.generator import Generator

    settings, needed = fetched(settings), (chosen, "1x")
    groups = by_model(settings, speeds)
    calls: dict[str, list[TimedCall]] = {name: [] for name in speeds}
    load_seconds = list[float]()
    loaded = began = 0.0
    for number, group in enumerate(groups, 1):
        before, first = time.monotonic(), next(iter(group.values()))
        adapter = None if first.is_full_depth else settings.speed_adapter
        one = Generator(replace(settings, speed_adapter=adapter, schedule=first))
        load_seconds.append(time.monotonic() - before)
        loaded, began = loaded or time.time(), began + load_seconds[-1] if began else time.monotonic()
        ordered = sorted(group, key=lambda name: name not in needed)
        generators = {name: one.at(group[name]) for name in ordered}
        calls |= _in_turn(generators, given, needed, size, began + seconds * number / len(groups))
        if number < len(groups):  # free this model, because two may not fit into memory
            one.engine.close()
            del one, generators
            gc.collect()
    return loaded, load_seconds[1:], calls


def _in_turn(
    generators: Mapping[str, Any],
    given: Sequence[Prompt],
    needed: Sequence[str],
    size: int,
    until: float,
) -> dict[str, list[TimedCall]]:
    """Time calls at all speeds in rotation, so that changes of the machine's speed affect all of them equally."""
    calls: dict[str, list[TimedCall]] = {name: [] for name in generators}
    parts = math.ceil(len(given) / size)
    for part in range(parts):
        rows = given[part::parts]  # spread over the whole input
        for name, generator in generators.items():
            left = until - time.monotonic()
            if part == 0 and left <= 0 and name not in needed:
                continue
            if part == 0:
                warm_up = _timed(generator, given[:WARM_UP_ROWS])
                fits = int(left * BATCH_GAIN * warm_up.rows / warm_up.seconds)
                fits //= max(1, sum(name in needed and not timed for name, timed in calls.items()))
            elif calls[name]:
                fits = int(left * calls[name][-1].rows / calls[name][-1].seconds)
            else:
                continue
            if fits >= len(rows) or (part == 0 and name in needed):
                calls[name].append(_timed(generator, rows[: max(fits, WARM_UP_ROWS)]))
    return calls


def _timed(generator: Any, rows: Sequence[Prompt]) -> TimedCall:
    generator.take_stats()
    began = time.perf_counter()
    answers = generator.answer(rows)
    tokens = sum(len(prompt.ids) for prompt in rows)
    return TimedCall(len(rows), tokens, time.perf_counter() - began, generator.take_stats(), texts_of(answers))


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
    crowd: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Predict time and tokens of a whole run at each speed, slowest first. Leave out speeds that gave no answer.

    Args:
        rows: Number of rows to answer, without the rows that are expected to have an error.
        longest: How many of these rows the busiest actor answers.
        startup: Seconds of the run in which no actor answers rows.
        crowd: An actor's seconds for some work in the run ÷ its seconds for this work in the sample.

    Return speed -> values. seconds, low, high: wall time with start-up, and its 5th and 95th percentiles. busy_seconds:
    working time, summed over actors. layer_ratio: layers of full depth ÷ layers run, in decode steps. speedup: seconds
    per row at 1x ÷ at this speed; speedup_low and speedup_high are its percentiles. ideal: value of `speedup` if time
    were proportional to the layers run. timed_seconds: actors' time in the sample, summed.
    """
    random = np.random.default_rng(0)
    measured = {
        name: np.array([[call.rows, crowd * call.seconds] for call in timed])
        for name, timed in calls.items()
        if any(call.texts for call in timed)
    }
    second = {name: float(timed[:, 1].sum() / timed[:, 0].sum()) for name, timed in measured.items()}
    totals = {name: reduce(EngineStats.plus, (call.stats for call in calls[name])) for name in measured}
    found, rates = dict[str, dict[str, Any]](), dict[str, Any]()
    for name in sorted(second, key=lambda name: -second[name]):
        timed, stats, seconds = measured[name], totals[name], startup + second[name] * longest
        drawn = timed[random.integers(len(timed), size=(REPLICATES, len(timed)))].sum(axis=1)
        spread = np.maximum(0.5, random.normal(1.0, [[SPREAD], [STARTUP_SPREAD]], size=(2, REPLICATES)))
        rates[name] = drawn[:, 1] / drawn[:, 0] * spread[0]
        low, high = np.percentile(startup * spread[1] + rates[name] * longest, [LOW, HIGH]).tolist()
        sampled = int(timed[:, 0].sum())
        ratio = stats.full_layer_steps / stats.layer_steps if stats.layer_steps else None
        found[name] = {
            "speed": name,
            "seconds": seconds,
            "low": min(low, seconds),
            "high": max(high, seconds),
            "busy_seconds": second[name] * rows,
            "prompt_tokens": round(sum(call.prompt_tokens for call in calls[name]) / sampled * rows),
            "generated_tokens": round(stats.generated_tokens / sampled * rows),
            "tokens_per_second": stats.generated_tokens / sampled * rows / seconds,
            "cache_bytes": stats.cache_bytes,
            "layer_ratio": ratio,
            "speedup": second["1x"] / second[name] if "1x" in second else None,
            "ideal": _ideal(totals["1x"], speeds[name], ratio or 1.0) if "1x" in second else None,
            "sampled": sampled,
            "timed_seconds": sum(call.seconds for call in calls[name]),
        }
    for name, line in found.items():
        ends = np.percentile(rates["1x"] / rates[name], [LOW, HIGH]).tolist() if "1x" in rates else [None, None]
        line["speedup_low"], line["speedup_high"] = ends
    return found


def _ideal(full: EngineStats, schedule: Schedule, layer_ratio: float) -> float | None:
    """Return the speed-up if prefill and decode times were proportional to the layers run."""
    seconds = full.prefill_seconds + full.decode_seconds
    prefill = full.prefill_seconds * len(schedule.prompt_layers) / schedule.num_layers
    return seconds / (prefill + full.decode_seconds / layer_ratio) if seconds else None


def losses(config: JobConfig, prompt: str) -> dict[str, dict[str, Any]]:
    """Return speed -> recorded loss against full depth: metric, loss (negative for a gain), low, high and source.

    Return {} if there is no record of `evaluate` or `adapt` beside checkpoint or adapter. prompt: the prompt policy.
    """
    folder = Path(config.model.speed_adapter or config.model.path)
    for place in (folder, folder / "evaluate", folder.parent) if folder.is_dir() else ():
        for path in (place / "table.json", place / "adapt.json"):
            found: dict[str, dict[str, Any]] = {}
            try:
                for nominal, policy, scores in _recorded(json.loads(path.read_text())):
                    metric = next((name for name in METRICS if name in scores), None)
                    if metric is not None and nominal is not None and policy == prompt:
                        loss, low, high = scores[metric]
                        line = {"metric": metric, "loss": loss, "low": low, "high": high, "source": str(path)}
                        found.setdefault(f"{nominal:g}x", line)
            except (OSError, AttributeError, LookupError, TypeError, ValueError):  # no valid record
                continue
            if found:
                return found
    return {}


def _recorded(record: Any) -> Iterator[tuple[float | None, str, dict[str, tuple[Any, ...]]]]:
    """Yield (nominal speed, prompt policy, metric -> (loss, low, high)) for each line of a record."""
    if isinstance(record, list):  # table.json, written by `evaluate`
        for line in record:
            known = [name for name in METRICS if line.get(f"{name}_loss") is not None]
            ends = ("loss", "loss_low", "loss_high")
            yield line["nominal"], line["prompt"], {n: tuple(line[f"{n}_{end}"] for end in ends) for n in known}
    else:
        for line in record["done"]["after"]["result"]["lines"]:
            scores = {name: (score["loss"], None, score["loss_high"]) for name, score in line["scores"].items()}
            yield line["nominal"], line["prompt"], scores
