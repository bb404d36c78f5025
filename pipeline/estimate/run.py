"""`skipdecode plan`: plan the job, sample it where its actors would run, predict each speed. Writes no output."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from actors.answers import Prompt
from actors.engine.errors import UserError
from actors.engine.machine import process_cpus
from actors.engine.schedules.schedule import Schedule
from pipeline import job as jobs
from pipeline.backends.stages import Backend
from pipeline.commit.claim import check_same_job, stored_job
from pipeline.commit.records import read_records
from pipeline.config.job import JobConfig
from pipeline.estimate.costs import Costs
from pipeline.estimate.measure import EXACT, LOOKUP, ActorSample, measure_actor
from pipeline.estimate.predict import Prediction, Work, predict
from pipeline.estimate.rows import read_prompts, sample_places
from pipeline.estimate.scores import measure_scores, predict_scores
from pipeline.estimate.simulate import EngineShape
from pipeline.estimate.speeds import Loss, chosen_name, exact_lines, losses, name_of, schedules
from pipeline.generate.answer_checks import warnings_of
from pipeline.incremental import ledger as ledgers
from pipeline.incremental import runs
from pipeline.job import PlannedJob
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest
from pipeline.plan.memory import log_memory_estimate
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.read.shards import Shard
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import open_folder

SAMPLE_SECONDS = 120.0  # of all speeds together, models loaded
SAMPLE_SHARE = 0.01  # of the job's rows, at least two batches and LEAST_ROWS rows an actor
LEAST_ROWS = 64  # that an actor is to answer
SAMPLED_ACTORS = 8  # that measure at the same time, at most
LONG = 1000  # tokens, by which speeds are ordered
STAGES_SECONDS = 1.5  # from a loaded model to the first shard; totals, report and the end of the process
WORKER_SHARE = 0.3  # processor seconds of a worker that reads, prepares and commits, over those of planning
CROWDED = 1.05  # seconds of an actor in a run over those in the sample, where all share the cores of this machine


class NothingLeft(Exception):
    """The job has no row left to answer."""


@dataclass(frozen=True)
class Startup:
    """Seconds of a run in which no actor answers.

    Args:
        plan: From the start of the process to the end of planning.
        ray: To start or find Ray, and to leave it.
        load: Until the last actor has loaded the model, while workers that read and prepare start.
        stages: The constant `STAGES_SECONDS`.
    """

    plan: float
    ray: float
    load: float
    stages: float

    @property
    def seconds(self) -> float:
        return self.plan + self.ray + self.load + self.stages


def load_in_a_run(seconds: float, imports: float, actors: int, shards: int, cores: int) -> float:
    """Seconds until all actors of a run have loaded the model. A run starts a worker per core at the same time.

    Args:
        seconds: The same in the sample, which started no workers.
        imports: Processor seconds to start a worker.
        actors: Number of actors.
        shards: Number of shards to answer.
        cores: Processors of this machine.
    """
    of_actor = seconds * min(1.0, cores / actors)
    return max(seconds, (actors * of_actor + min(cores, shards) * imports) / cores)


@dataclass(frozen=True)
class Estimate:
    """What `skipdecode plan` found.

    left: shards that are not committed. prompt_tokens: of the rows that were tokenized and have no error; bad: those
    that have one, and the first error. predictions: by speed, slowest first. warnings: of the sampled answers at the
    job's speed. sample_seconds: of all actors.
    """

    job: PlannedJob
    left: list[Shard]
    prompt_tokens: list[int]
    bad: tuple[int, str]
    startup: Startup
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
    """Plan and sample a job.

    Args:
        limit: only so many rows of the input.
        backend: where the job would run; default Ray Data.
        process_began: s since 1970, for the start-up; default now.
        seconds: for the sampled rows, at all speeds.

    Raises:
        UserError: what `job.run` would refuse, or no sampled row can be answered.
        NothingLeft: every row is answered.
    """
    began = process_began or time.time()
    backend = backend or jobs.ray_backend(verbose=False)
    with interruptible():
        job, stored, left = _planned(config, limit, backend)
        planned = time.time() - began
        log_memory_estimate(config, job.checkpoint, job.manifest.batching, backend)
        if not left:
            raise NothingLeft(f"{config.output.path}: nothing left to do: every row is answered")
        known, prepare = _prompts(job, left, backend)
        good = [prompt for prompt in known.values() if prompt.error is None]
        bad = [prompt.error for prompt in known.values() if prompt.error is not None]
        if not good:
            raise UserError(f"none of {len(known):,} sampled rows can be answered; the first: {bad[0]}")
        speeds = {name_of(job.schedule): job.schedule} if config.scores else schedules(job) | exact_lines(job)
        before = time.monotonic()
        with ExitStack() as stack:
            with announced("starting Ray"):
                stack.enter_context(backend.ready(job.config.actors))
            ray = time.monotonic() - before
            job = stack.enter_context(jobs.checked(job, stored, backend))
            asked = time.time()
            measured = _measure(job, good, speeds, backend, seconds, sum(shard.rows for shard in left))
            before = time.monotonic()
        ray += time.monotonic() - before
    load, crowd = measured.loaded - asked, 1.0
    if backend.on_this_machine and backend.starts_workers:
        load = load_in_a_run(load, WORKER_SHARE * planned, config.actors.most, len(left), process_cpus())
        crowd = 1.0 if config.actors.gpus else CROWDED
    startup = Startup(planned, ray, load, STAGES_SECONDS)
    rows = sum(shard.rows for shard in left)
    work = Work(left, known, config.actors.most, startup.seconds, prepare * rows, crowd)
    with announced("simulating the job's batches"):
        predictions = measured.predict(work)
    return Estimate(
        job=job,
        left=left,
        prompt_tokens=[len(prompt.ids) for prompt in good],
        bad=(len(bad), bad[0] if bad else ""),
        startup=startup,
        chosen=chosen_name(job),
        predictions=predictions,
        losses=losses(config, job.schedule.prompt),
        warnings=warnings_of(measured.texts),
        sampled_rows=measured.rows,
        sample_seconds=measured.seconds,
    )


@dataclass(frozen=True)
class _Measured:
    """What the sampled actors measured.

    loaded: s since 1970 when the last of them had its model. rows: that they answered at the job's speed, texts: their
    answers. seconds: of all of them. predict: from the job's work to each speed.
    """

    loaded: float
    rows: int
    texts: list[str]
    seconds: float
    predict: Callable[[Work], dict[str, Prediction]]


def _planned(config: JobConfig, limit: int | None, backend: Backend) -> tuple[PlannedJob, Manifest | None, list[Shard]]:
    """The job, the one that its output holds, and the shards that are left. Only reads."""
    if config.input.since is not None:
        if limit is not None:
            raise UserError("--limit: an incremental run has no limit; leave out --limit or input.since")
        ledger = ledgers.read(open_folder(config.output.path, config.storage))
        new = runs.new_input(config, ledger)
        if not new.files:
            raise NothingLeft(f"{config.output.path}: nothing left to do: no file is new")
        job = jobs.plan(new.config, None, backend, files=new.files)
        return job, None, job.manifest.shards
    folder = jobs.output_folder(config)
    stored = stored_job(folder, overwrite=False)
    job = jobs.plan(config, stored, backend, limit=limit)
    check_same_job(folder, stored, job.manifest)
    done = set() if stored is None else set(read_records(folder, stored.fingerprint)["shard"].to_pylist())
    return job, stored, [shard for shard in job.manifest.shards if shard.index not in done]


def _prompts(job: PlannedJob, left: Sequence[Shard], backend: Backend) -> tuple[dict[tuple[str, int], Prompt], float]:
    """Prompts of a sample of rows, by file and row number, and the seconds that a row took."""
    manifest, places = job.manifest, sample_places(left)
    rows = sum(place.rows for place in places)
    spec = prompt_spec(job.config, job.checkpoint, manifest.batching.planned)
    with announced(f"preparing {rows:,} rows"):
        found, seconds = backend.call_isolated(
            read_prompts, places, manifest.files, manifest.schema, job.config.storage, spec
        )
    return {(prompt.source, prompt.row): prompt for prompt in found}, seconds


def _measure(
    job: PlannedJob,
    good: Sequence[Prompt],
    speeds: dict[str, Schedule],
    backend: Backend,
    seconds: float,
    rows: int,
) -> _Measured:
    """Each sampled actor answers or scores rows of its own, all at the same time."""
    actors, batching = job.config.actors, job.manifest.batching
    count = min(len(good), max(math.ceil(SAMPLE_SHARE * rows), max(2 * batching.max_batch, LEAST_ROWS) * actors.most))
    workers = min(actors.most, SAMPLED_ACTORS, count)
    spread = [good[place * len(good) // count] for place in range(count)]
    sizes = counted(count, "row"), counted(workers, "actor")
    verb = "scoring" if job.config.scores else "answering"
    announce(f"{verb} up to {sizes[0]} at {', '.join(speeds)} on {sizes[1]}, about {seconds:g} s")
    generator = {**jobs.generator_arguments(job), "speed_adapter": job.checkpoint.pinned_adapter()}
    parts = [(spread[worker::workers], generator, batching.prefix) for worker in range(workers)]
    name = chosen_name(job)
    if job.config.scores:
        scored = backend.call_as_actors(actors, measure_scores, [(*part, seconds) for part in parts])
        batches = [chunk for one in scored for chunk in one.chunks]
        return _Measured(
            max(one.loaded for one in scored),
            sum(chunk.rows for chunk in batches),
            [],
            sum(chunk.seconds for chunk in batches),
            lambda work: {name: predict_scores(scored, work, len(batching.prefix))},
        )
    samples = backend.call_as_actors(actors, measure_actor, [(*part, speeds, seconds) for part in parts])
    return _Measured(
        max(one.loaded for one in samples),
        sum(len({row for chunk in one.speeds[name].chunks for row in chunk.rows}) for one in samples),
        [text for one in samples for chunk in one.speeds[name].chunks for text in chunk.texts],
        sum(chunk.seconds for one in samples for speed in one.speeds.values() for chunk in speed.chunks),
        lambda work: _predictions(job, speeds, samples, work),
    )


def _predictions(
    job: PlannedJob, speeds: dict[str, Schedule], samples: Sequence[ActorSample], work: Work
) -> dict[str, Prediction]:
    """Every speed that some row was answered at, slowest first."""
    batching, first = job.manifest.batching, samples[0]
    shape = EngineShape(
        first.token_bytes,
        first.context,
        first.grows,
        batching.cache_bytes,
        batching.max_batch,
        batching.scheduler,
        batching.prefix,
        job.config.shared_prefix,
    )
    # seconds of passes and steps at all speeds: depths and rows vary more than at one; steps of exact mode are others
    measured = [one.speeds[name] for one in samples for name in speeds if name not in (EXACT, LOOKUP)]
    costs = Costs.of(
        [line for one in measured for line in one.passes], [line for one in measured for line in one.steps]
    )
    found = {}
    for name in sorted(speeds, key=lambda name: -speeds[name].layer_steps(LONG)):
        answered = [answer for one in samples for chunk in one.speeds[name].chunks for answer in chunk.answered]
        if answered:
            found[name] = predict(name, speeds[name], costs, samples, shape, work)
    if chosen_name(job) not in found:
        raise UserError("no sampled row has an answer: `skipdecode try` shows why")
    return found
