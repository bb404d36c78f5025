"""The bulk job: source -> prepare -> generate -> sink, what comes before it and what after.

    inputs ──> shards ──> prepare (CPU) ──> generate (actor pool) ──> part, then commit record
               pinned in _job/              batches of one depth      one conditional put

Everything that can be wrong is looked at before Ray Data starts and before a model is loaded; a Ray of our own may
be up by then.
"""

from __future__ import annotations

import logging
import time
import uuid
import warnings
from contextlib import nullcontext
from typing import Any, cast

import ray
from ray.data import ActorPoolStrategy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.engine.errors import UserError
from actors.engine.schedule import Schedule
from pipeline.checkpoints.resolve import ResolvedCheckpoint, resolve_checkpoint
from pipeline.commit.finalize import finalize, finished_totals, write_success
from pipeline.commit.lease import leased
from pipeline.commit.records import Compaction
from pipeline.commit.sink import PART, SUCCESS, clear, clear_temporaries, commit_shards, committed_shards
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.generate.coordinator import Coordinator
from pipeline.generate.stage import PartSpec, ShardGenerator
from pipeline.generate.stats import Totals
from pipeline.incremental.ledger import holds_ledger
from pipeline.incremental.runs import Job, Scheduled, run_scheduled
from pipeline.plan import manifest as manifests
from pipeline.plan.columns import check_columns, optional_columns
from pipeline.plan.manifest import Manifest
from pipeline.plan.memory import log_memory_estimate
from pipeline.prepare.prompts import check_spec, prompt_spec
from pipeline.prepare.stage import prepare
from pipeline.read.files import Files, list_files
from pipeline.read.shards import Shard
from pipeline.read.source import ShardSource
from pipeline.report.progress import Progress
from pipeline.report.summary import JobResult
from pipeline.runtime.quarantine import STAGES, Quarantine, clear_quarantine
from pipeline.runtime.ray_session import actor_cpus, early_ray, ray_session
from pipeline.runtime.signals import Interrupted, graceful, interruptible
from pipeline.storage.folder import Folder, open_folder, probe_create

log = logging.getLogger(__name__)
STAGE_CPUS = 0.5  # a slot of the read, prepare and write tasks beside the actors; each new worker costs imports
TASK_RETRIES = 20  # of a task whose process died, or whose result was lost with its node
QUARANTINED_RETRIES = 1000  # of one that `Quarantine` keeps count of
READ_TASK_ROWS, READ_TASK_BYTES = 50_000, 512 * 2**20  # a read task at most, or one row group


def run(config: JobConfig, *, limit: int | None = None, overwrite: bool = False, verbose: bool = False) -> JobResult:
    """Run the job to its end, or to the end of what an earlier run has left.

    Raises ValueError (configuration or input is wrong, or the output belongs to another job), LeaseHeld,
    LeaseLost, Interrupted, RowsMissing, or Ray's error of a task that failed for good.
    """
    assert config.input.since is None, "run_since runs it"
    with interruptible():
        return _run(config, limit, overwrite, verbose)


def run_since(
    config: JobConfig, *, limit: int | None = None, overwrite: bool = False, verbose: bool = False
) -> Scheduled:
    """Run the job over the input files that no successful run has seen, after the rest of an unfinished run.

    overwrite: give an unfinished run up. Raises what `run` raises, and ConcurrentRun.
    """
    assert config.input.since == "last_success"
    if limit is not None:
        raise UserError("--limit: rows that it leaves out would never be answered; leave out --limit or input.since")
    with interruptible():
        return _run_since(config, overwrite, verbose)


def _run(config: JobConfig, limit: int | None, overwrite: bool, verbose: bool) -> JobResult:
    began = time.monotonic()
    check_columns(config)
    folder = open_folder(config.output.path, config.storage)
    if holds_ledger(folder):
        raise UserError(f"{folder.url}: holds scheduled runs; set input.since: last_success, or choose another folder")
    stored = None if overwrite else _load_stored(folder)
    left = stored is None or not folder.exists(SUCCESS)  # as far as can be told before the job is planned
    with early_ray(verbose) if left else nullcontext():
        manifest, totals, fresh_rows = _plan_and_answer(config, folder, stored, limit, overwrite, verbose)
    return JobResult(manifest, totals, fresh_rows, time.monotonic() - began)


def _plan_and_answer(
    config: JobConfig, folder: Folder, stored: Manifest | None, limit: int | None, overwrite: bool, verbose: bool
) -> tuple[Manifest, Totals, int]:
    located, schedule = _locate(config, stored)
    manifest = manifests.plan_job(config, located, schedule, limit, stored)
    if stored is not None and stored.fingerprint != manifest.fingerprint:
        names = ", ".join(manifests.difference(stored.identity, manifest.identity))
        raise UserError(f"{folder.url}: holds another job, which differs in {names}; --overwrite replaces it")
    finished = finished_totals(folder, manifest) if stored is not None else None
    if finished is not None:  # nothing is written, so that read-only rights suffice
        return manifest, finished, 0
    if stored is None or not folder.exists(SUCCESS):
        log_memory_estimate(config, located, manifest.batching)
    with leased(folder):
        clear_temporaries(folder)
        _check_unchanged(folder, stored, overwrite)
        if overwrite:
            clear(folder)
        if stored is None:
            manifests.save(folder, manifest)
        totals, fresh_rows = _answer(config, located, schedule, manifest, verbose)
        write_success(folder, manifest, totals)
    return manifest, totals, fresh_rows


def _run_since(config: JobConfig, overwrite: bool, verbose: bool) -> Scheduled:
    check_columns(config)
    root = open_folder(config.output.path, config.storage)
    if any(name.endswith(".parquet") for name in root.names()) or manifests.load(root) is not None:
        raise UserError(f"{root.url}: holds what no scheduled run has written; choose another folder for input.since")

    def inputs(may_be_empty: bool) -> Files:
        return list_files(config.input.path, config.storage, may_be_empty=may_be_empty)

    checkpoints: dict[str, tuple[ResolvedCheckpoint, Schedule]] = {}  # of the manifests planned here, by fingerprint

    def plan(files: Files, stored: Manifest | None) -> Manifest:
        located, schedule = _locate(config, stored)  # the rest of a run keeps the commit that it has pinned
        manifest = manifests.plan_job(config, located, schedule, None, stored, files)
        if stored is None:  # before the run is claimed: what does not fit must not be pinned
            log_memory_estimate(config, located, manifest.batching)
        checkpoints[manifest.fingerprint] = located, schedule
        return manifest

    def answer(folder: Folder, manifest: Manifest) -> tuple[Totals, int]:
        output = config.output.model_copy(update={"path": folder.url})
        clear_temporaries(folder)
        located, schedule = checkpoints[manifest.fingerprint]
        return _answer(config.model_copy(update={"output": output}), located, schedule, manifest, verbose)

    def open_run(name: str) -> Folder:
        return open_folder(f"{root.url.rstrip('/')}/{name}", config.storage)

    with leased(root):
        clear_temporaries(root)
        return run_scheduled(root, Job(inputs, open_run, plan, answer), config.input.changed, overwrite)


def _answer(
    config: JobConfig, located: ResolvedCheckpoint, schedule: Schedule, manifest: Manifest, verbose: bool
) -> tuple[Totals, int]:
    """Answer the shards that are left and check that every row is there: totals, and the rows that were left."""
    folder = open_folder(config.output.path, config.storage)
    done = committed_shards(folder, manifest.shards, manifest.fingerprint)
    left = [shard for shard in manifest.shards if shard.index not in done]
    clear_quarantine(folder, but={shard.index for shard in left})
    if done and left:
        log.warning("resuming: %d of %d shards are committed already", len(done), len(manifest.shards))
    if left:
        folder.remove(SUCCESS)  # of a finished job that has lost parts since
        folder = probe_create(folder)
        with ray_session(config.actors, verbose), Compaction(folder, manifest.fingerprint):
            _flow(config, located, schedule, manifest, folder, left)
    return finalize(folder, manifest), sum(shard.rows for shard in left)


def _locate(config: JobConfig, stored: Manifest | None) -> tuple[ResolvedCheckpoint, Schedule]:
    """The checkpoint, and what the job file asks of it; ValueError of one line."""
    located = resolve_checkpoint(config.model, config.storage, stored.identity.get("model") if stored else None)
    schedule = located.checkpoint.schedule(config.schedule.changes())
    check_spec(prompt_spec(config, located, time.time()))
    return located, schedule


def _load_stored(folder: Folder) -> Manifest | None:
    stored = manifests.load(folder)
    if stored is None and any(name.endswith(".parquet") for name in folder.first_names()):
        raise UserError(
            f"{folder.url}: holds Parquet files of no job known here; choose another folder, or --overwrite"
        )
    return stored


def _check_unchanged(folder: Folder, stored: Manifest | None, overwrite: bool) -> None:
    """Planning takes time: nobody may have begun a job here before the lease was ours."""
    now = None if overwrite else _load_stored(folder)
    if (now and now.fingerprint) != (stored and stored.fingerprint):
        raise UserError(f"{folder.url}: another run began a job here meanwhile; look at it, then run again")
    if overwrite:
        foreign = [name for name in folder.names() if name.endswith(".parquet") and not PART.fullmatch(name)]
        if foreign:
            raise UserError(f"{folder.url}: {foreign[0]} is no part of a job; --overwrite leaves it, so move it away")


def _flow(
    config: JobConfig,
    located: ResolvedCheckpoint,
    schedule: Schedule,
    manifest: Manifest,
    folder: Folder,
    left: list[Shard],
) -> None:
    """source -> prepare -> generate -> commit, for the shards that are left. Interrupted after a signal."""
    actors, batching = config.actors, manifest.batching
    prompt = prompt_spec(config, located, batching.planned)
    part = PartSpec(
        id_column=config.input.id,
        keep=tuple(config.output.keep),
        optional=optional_columns(config),
        fingerprint=manifest.fingerprint,
        num_layers=located.checkpoint.num_layers,
    )
    generator = {
        "checkpoint": located.source,
        "schedule": {key: value for key, value in schedule.to_dict().items() if key != "num_layers"},
        "sampling": config.sampling.model_dump(exclude={"seed"}),
        "seed": config.sampling.seed,
        "choices": config.choices,
        "strip": config.output.strip,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "compile": config.model.compile,
        "engine": config.model.engine,
        "cumulative_logprob": config.output.cumulative_logprob,
        "threads": batching.threads,
        "cache_bytes": batching.cache_bytes,
        "max_batch": batching.max_batch,
        "scheduler": batching.scheduler,
    }
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    coordinator = (
        ray.remote(num_cpus=0)(Coordinator).options(scheduling_strategy=here).remote()
    )  # dies with the driver only
    source = ShardSource(left, manifest.files, manifest.schema, config.storage, READ_TASK_ROWS, READ_TASK_BYTES)
    run = uuid.uuid4().hex
    preparing, generating = (Quarantine(folder, run, config.attempts, stage) for stage in STAGES)
    with warnings.catch_warnings():
        # Ray Data tries what has died again for ever unless told otherwise, and has no other way yet to be told
        warnings.simplefilter("ignore", ray.util.annotations.RayDeprecationWarning)
        shards = ray.data.read_datasource(
            source, num_cpus=STAGE_CPUS, ray_remote_args={"max_retries": TASK_RETRIES}
        ).repartition(target_num_rows_per_block=1)
        prepared = shards.map_batches(
            prepare,
            fn_kwargs={"spec": prompt, "quarantine": preparing},
            batch_size=1,
            batch_format="numpy",
            num_cpus=STAGE_CPUS,
            max_retries=QUARANTINED_RETRIES,
        )
        answered = prepared.map_batches(
            ShardGenerator,
            fn_constructor_kwargs={
                "generator": generator,
                "part": part,
                "prefix": batching.prefix,
                "coordinator": coordinator,
                "quarantine": generating,
            },
            compute=_pool(actors),
            batch_size=1,
            batch_format="numpy",
            num_cpus=actor_cpus(actors),
            num_gpus=actors.gpus or None,
            max_restarts=-1,  # the coordinator counts those that die while they load
            max_task_retries=QUARANTINED_RETRIES,
        )
        # write_datasink would keep a result of every shard, and all that led to it, until the last
        commits = answered.map_batches(
            commit_shards,
            fn_kwargs={"folder": folder, "fingerprint": manifest.fingerprint, "coordinator": coordinator},
            batch_size=1,
            batch_format="pyarrow",
            num_cpus=STAGE_CPUS,
            max_retries=TASK_RETRIES,
        )
    shards_done, rows_done = len(manifest.shards) - len(left), manifest.rows - sum(shard.rows for shard in left)
    with (
        Progress(coordinator, len(manifest.shards), manifest.rows, shards_done, rows_done),
        graceful(config.grace_seconds, lambda: _ask(coordinator.stop), lambda: _ask(coordinator.working)) as grace,
    ):
        try:
            for _ in commits.iter_internal_ref_bundles():
                pass
        except ray.exceptions.RayError:
            if grace.signal is None:
                raise
            raise Interrupted(grace.signal) from None  # whoever stops a whole group of processes stops Ray's too
        finally:
            ray.kill(cast(Any, coordinator))
    if grace.signal is not None:  # shards were passed by
        raise Interrupted(grace.signal)


def _ask(method: Any) -> set[int]:
    """What a coordinator answers; nothing if it does not answer."""
    try:
        answer: set[int] = ray.get(method.remote(), timeout=5)
    except (ray.exceptions.RayError, TimeoutError):
        return set()
    return answer


def _pool(actors: ActorsConfig) -> ActorPoolStrategy:
    if actors.min is not None:
        return ActorPoolStrategy(min_size=actors.min, max_size=actors.max, max_tasks_in_flight_per_actor=2)
    return ActorPoolStrategy(size=actors.most, max_tasks_in_flight_per_actor=2)
