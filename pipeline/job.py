"""The bulk job: plan, lease, run the stages, finalize.

    read ──> prepare ──> generate
    shards   token ids   answers, and a part: created once, then its record

Everything that can be wrong is checked before a stage runs. Imports no ray: a backend executes the stages.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from actors.engine.schedules.schedule import Schedule
from pipeline.backends.stages import Actors, Backend, Read, Session, Stage, Tasks
from pipeline.checkpoints.resolve import ResolvedCheckpoint, resolve_checkpoint
from pipeline.commit.budget import open_budget
from pipeline.commit.claim import check_same_job, claim, stored_job
from pipeline.commit.duplicates import count_repeated, repeated_error
from pipeline.commit.finalize import finalize, finished_totals, write_success
from pipeline.commit.lease import leased
from pipeline.commit.records import Compaction
from pipeline.commit.results import check_free, has_results, write_results
from pipeline.commit.runs import recorded_run
from pipeline.commit.sink import SUCCESS, check_output, commit_shard, committed_shards
from pipeline.commit.table import check_table, commit_table, has_table
from pipeline.config.job import JobConfig
from pipeline.generate.coordinator import Workload
from pipeline.generate.output import PartSpec, part_table
from pipeline.generate.settings import generator_settings
from pipeline.generate.stage import ShardGenerator
from pipeline.generate.stats import Totals
from pipeline.generate.value_fields import value_fields
from pipeline.plan import manifest as manifests
from pipeline.plan.agreement import announce_no_gain, is_measured, with_agreement
from pipeline.plan.columns import check_columns, kept_columns, optional_columns, parsed_column
from pipeline.plan.inputs import check_output_disjoint, check_same_input
from pipeline.plan.manifest import Manifest
from pipeline.plan.memory import log_memory_estimate
from pipeline.plan.snapshot import pinned_snapshot, with_snapshot
from pipeline.prepare.prompt_spec import check_generation, check_spec, marks_of_thinking, prompt_spec
from pipeline.prepare.stage import prepare
from pipeline.read.files import Files
from pipeline.read.rows import read_shards
from pipeline.read.shards import Shard
from pipeline.report.job_page import write_report
from pipeline.report.summary import JobResult
from pipeline.runtime.announce import announced
from pipeline.runtime.quarantine import STAGE_NAMES, Quarantine, clear_quarantine
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import Folder, open_folder, probe_create
from pipeline.storage.write_check import check_location, make_writable

log = logging.getLogger(__name__)
QUARANTINED_RETRIES = 1000  # of a task whose deaths `Quarantine` counts


@dataclass(frozen=True)
class PlannedJob:
    """A job ready to run: its file, its checkpoint, the schedule of that checkpoint, and what is pinned.

    began: s since 1970, when its run began.
    """

    config: JobConfig
    checkpoint: ResolvedCheckpoint
    schedule: Schedule
    manifest: Manifest
    began: float = 0.0


def run(
    config: JobConfig,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    verbose: bool = False,
    backend: Backend | None = None,
    process_began: float | None = None,
) -> JobResult:
    """Run the job to its end, or to the end of what an earlier run has left.

    Args:
        limit: only so many rows of the input.
        overwrite: replace the job that the output folder holds.
        verbose: show Ray's own messages.
        backend: where the stages run; default Ray Data.
        process_began: s since 1970, for the report's start-up; default now.

    Raises:
        UserError: configuration or input is wrong, or the output belongs to another job.
        LeaseHeld, LeaseLost: another run works on the output.
        Interrupted: SIGTERM or SIGINT, or BudgetSpent.
        RowsMissing: rows are missing at the end.
        RayError: a task failed for good.
    """
    assert config.input.since is None, "incremental.runs runs it"
    began, backend = time.monotonic(), backend or ray_backend(verbose=verbose)
    process_began = process_began or time.time()
    with interruptible():
        folder = output_folder(config)
        stored = stored_job(folder, overwrite=overwrite)
        if stored is None:
            check_free(folder, config)
        job = replace(plan(config, stored, backend, limit=limit), began=process_began)
        check_same_job(folder, stored, job.manifest)
        finished = stored is not None and has_results(folder, config) and has_table(folder, config)
        totals, fresh_rows = finished_totals(folder, job.manifest) if finished else None, 0
        if totals is None:  # else nothing is written: read-only rights suffice
            check_output_table(job)
            log_memory_estimate(config, job.checkpoint, job.manifest.batching, backend)
            make_writable(folder)
            with leased(folder), checked(job, stored, backend) as job:
                claim(folder, stored, job.manifest, overwrite=overwrite)
                totals, fresh_rows = answer(job, folder, backend)
                commit_table(folder, job.manifest, config)
                write_report(folder, job.manifest, config)
                write_success(folder, job.manifest, totals)
    return JobResult(job.manifest, totals, fresh_rows, time.monotonic() - began)


def output_folder(config: JobConfig) -> Folder:
    """The output, after the checks that need neither input nor checkpoint. Raises UserError for a wrong setting."""
    check_columns(config)
    check_output_disjoint(config)
    folder = open_folder(config.output.path, config.storage)
    check_location(folder)
    return folder


def plan(
    config: JobConfig,
    stored: Manifest | None,
    backend: Backend,
    *,
    limit: int | None = None,
    files: Files | None = None,
) -> PlannedJob:
    """Plan a new job, or the continuation of the stored one, which keeps its pinned values.

    Args:
        files: to plan over, in place of everything in `input.path`.

    Raises:
        UserError: checkpoint, prompt settings or input are wrong, or the input is not the stored job's.
        NoRows: there is nothing to answer.
    """
    began = time.time()
    if stored is not None and files is None:
        check_same_input(config, stored.identity["input"]["path"])
    with announced("reading the checkpoint's description"):
        config = with_snapshot(config, pinned_snapshot(config, stored))
        checkpoint = resolve_checkpoint(config.model, config.storage, stored.identity.get("model") if stored else None)
    schedule = planned_schedule(config, checkpoint)
    check_generation(config, checkpoint)
    check_spec(prompt_spec(config, checkpoint, time.time()))
    marks_of_thinking(config, checkpoint)  # refused before a model is loaded
    manifest = manifests.plan_job(config, checkpoint, schedule, limit, stored, files, hardware=backend)
    actors = config.actors.model_copy(update={"threads": manifest.batching.threads})
    config = config.model_copy(update={"actors": actors})
    if stored is None and config.input.duplicate_ids == "error":
        _check_ids(config, manifest)
    return PlannedJob(config, checkpoint, schedule, manifest, began)


def _check_ids(config: JobConfig, manifest: Manifest) -> None:
    """Raise UserError if an id of Parquet files repeats; other formats would be parsed whole for it."""
    column = config.input.id_column
    if column is None or any(file.format != "parquet" for file in manifest.files):
        return

    def read(shards: Sequence[Shard]) -> Iterator[pa.ChunkedArray]:
        schema = pa.schema([manifest.schema.field(column)])
        return (table[column] for _, table in read_shards(manifest.files, shards, schema, config.storage))

    with announced("looking for repeated ids"):
        found, examples = count_repeated(read(manifest.shards), manifest.shards, lambda shard: next(read([shard])))
    if found:
        raise repeated_error(found, examples)


def planned_schedule(config: JobConfig, checkpoint: ResolvedCheckpoint) -> Schedule:
    """Return the job's schedule. Raises UserError as the checkpoint's `schedule` does."""
    changes = config.schedule.changes()
    return checkpoint.schedule(changes, config.model, unadapted=config.schedule.unadapted)


def check_output_table(job: PlannedJob) -> None:
    """UserError if the job's output is a table that cannot hold its parts."""
    check_table(job.config, part_table(job.manifest.schema.empty_table(), [], _part(job), Shard(0, "", 0, 0)).schema)


@contextmanager
def checked(job: PlannedJob, stored: Manifest | None, backend: Backend) -> Iterator[PlannedJob]:
    """The job, if it is new with its agreement measured; in the block all that was started for this runs on.

    UserError if the schedule ruins the answers.
    """
    config, spec = job.config, prompt_spec(job.config, job.checkpoint, job.manifest.batching.planned)
    if stored is not None or not is_measured(config, job.schedule, spec):
        announce_no_gain(job.schedule, spec)
        yield job
        return
    with backend.ready(config.actors):
        arguments = generator_arguments(job)
        yield replace(job, manifest=with_agreement(config, job.schedule, job.manifest, spec, arguments, backend))


def answer(job: PlannedJob, folder: Folder, backend: Backend) -> tuple[Totals, int]:
    """Answer the shards that are not committed and check that every row is there; under the lease.

    Returns totals of the job, and the number of rows that this call answered.
    """
    manifest = job.manifest
    done = committed_shards(folder, manifest.shards, manifest.fingerprint)
    left = [shard for shard in manifest.shards if shard.index not in done]
    left_rows = sum(shard.rows for shard in left)
    clear_quarantine(folder, but={shard.index for shard in left})
    if done and left:
        log.warning("resuming: %d of %d shards are committed already", len(done), len(manifest.shards))
    if left:
        folder.remove(SUCCESS)  # of a finished job that has lost parts since
        storage = job.config.storage.after_planning()
        job = replace(job, config=job.config.model_copy(update={"storage": storage}))
        folder = probe_create(open_folder(folder.url, storage))
        workload = Workload(
            shards=len(manifest.shards),
            rows=manifest.rows,
            done_shards=len(done),
            done_rows=manifest.rows - left_rows,
            began=job.began,
        )
        budget = open_budget(job.config, folder, manifest.fingerprint)
        with (
            recorded_run(folder, job.config, job.began, left_rows),
            backend.session(job.config.actors, folder.url) as session,
            Compaction(folder, manifest.fingerprint),
            budget.spending(session.coordinator, len(left)),
        ):
            session.run(stages(job, folder, left, session), workload, job.config.grace_seconds)
    section = job.config.input
    totals = finalize(folder, manifest, None if section.id_column is None else section.duplicate_ids)
    write_results(folder, manifest, job.config)
    return totals, left_rows


def stages(job: PlannedJob, folder: Folder, shards: list[Shard], session: Session) -> list[Stage]:
    """The three stages of a run over these shards."""
    config, manifest, coordinator = job.config, job.manifest, session.coordinator
    run_id = uuid.uuid4().hex
    preparing, generating = (Quarantine(folder, run_id, config.attempts, stage) for stage in STAGE_NAMES)
    return [
        Read(shards, manifest.files, manifest.schema, config.storage),
        Tasks(
            prepare,
            {
                "spec": prompt_spec(config, job.checkpoint, manifest.batching.planned),
                "quarantine": preparing,
            },
            retries=QUARANTINED_RETRIES,
        ),
        Actors(
            ShardGenerator,
            {
                "generator": generator_arguments(job),
                "part": _part(job),
                "commit": partial(
                    commit_shard, folder=folder, fingerprint=manifest.fingerprint, coordinator=coordinator
                ),
                "check_output": partial(check_output, folder, manifest.fingerprint),
                "prefix": manifest.batching.prefix,
                "coordinator": coordinator,
                "quarantine": generating,
                "worker": session.worker,
                "devices": config.actors.gpus or 1.0,
                "price_per_hour": config.price_per_hour or 0.0,
            },
            config.actors,
            retries=QUARANTINED_RETRIES,
            calls=2 if _shards_may_join(job) else 1,
        ),
    ]


def _shards_may_join(job: PlannedJob) -> bool:
    """Whether a shard's rows may share steps with the last rows of the shard before; the generator decides."""
    return job.manifest.batching.scheduler == "refill" and job.config.model.dtype != "float32"


def generator_arguments(job: PlannedJob) -> dict[str, Any]:
    """Arguments of `Generator`; checkpoint and speed adapter as `fetch` takes them."""
    batching = job.manifest.batching
    return {
        **generator_settings(job.config.model, job.config.sampling, job.config.choices, job.config.output_format),
        "checkpoint": job.checkpoint.pinned(),
        "speed_adapter": None if job.schedule.is_full_depth else job.checkpoint.pinned_adapter(),
        "schedule": _keys(job.schedule),
        "unadapted": True,  # as planned
        "strip": job.config.output.strip,
        "reasoning": marks_of_thinking(job.config, job.checkpoint),
        "row_logprobs": job.config.input.is_batch,
        "share_prefixes": job.config.shared_prefix,
        "cumulative_logprob": job.config.output.cumulative_logprob,
        "threads": batching.threads,
        "cache_bytes": batching.cache_bytes,
        "max_batch": batching.max_batch,
        "scheduler": batching.scheduler,
    }


def _keys(schedule: Schedule) -> dict[str, Any]:
    """Keys of a section `schedule` that determine its layers."""
    return {key: value for key, value in schedule.to_dict().items() if key != "num_layers"}


def _part(job: PlannedJob) -> PartSpec:
    return PartSpec(
        id_column=job.config.input.id_column,
        keep=tuple(kept_columns(job.config)),
        optional=optional_columns(job.config),
        fingerprint=job.manifest.fingerprint,
        num_layers=job.checkpoint.checkpoint.num_layers,
        root=job.manifest.batching.root,
        parsed=parsed_column(job.config),
        value_fields=value_fields(job.manifest.identity.get("output_format")),
    )


def ray_backend(*, verbose: bool, metrics_port: int | None = None) -> Backend:
    """The default backend. It imports ray, which no other backend needs. Arguments of `RayData`."""
    from pipeline.backends.ray_data import RayData

    return RayData(verbose=verbose, metrics_port=metrics_port)
