"""The bulk job: plan, lease, run the stages, finalize.

    prepare ────────────────> generate
    shards read, token ids    answers; a shard's output file (part), then its commit record

Mistakes in the job are found before any stage runs. This module does not import Ray: a backend runs the stages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from pipeline.answer.coordinator import Workload
from pipeline.answer.stats import Totals
from pipeline.commit.claim import check_same_job, claim, stored_job
from pipeline.commit.finalize import finalize, finished_totals, write_success
from pipeline.commit.lease import leased
from pipeline.commit.records import compacting
from pipeline.commit.results import check_free, has_results, write_results
from pipeline.commit.runs import recorded_run
from pipeline.commit.sink import SUCCESS, Check, committed_shards
from pipeline.config.job import JobConfig
from pipeline.input.files import Files
from pipeline.plan.batching import warn_of_engine
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.job import PlannedJob, announce_no_gain, plan
from pipeline.plan.manifest import Manifest
from pipeline.plan.memory import log_memory_estimate
from pipeline.report.job_page import write_report
from pipeline.report.summary import JobResult
from pipeline.run.stages import Backend, job_stages
from pipeline.runtime.quarantine import clear_quarantine
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import Folder, check_location, make_writable, open_folder
from pipeline.storage.working_dir import check_outlives_job

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Night:
    """What a run of `nightly`, which holds the lease of the root folder, sets for its job.

    files, root: see `plan_job`. begin: called when the job is planned, before its plan is saved. accept: called when
    all rows are answered; if it returns False, the job gets no `_SUCCESS`.
    """

    files: Files
    root: str | None
    begin: Callable[[], None]
    accept: Callable[[Manifest, Totals], bool]


def run(
    config: JobConfig,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    check: Check = "quick",
    verbose: bool = False,
    backend: Backend | None = None,
    process_began: float | None = None,
    night: Night | None = None,
) -> JobResult:
    """Run the job. If an earlier run was interrupted, answer only the shards that it left.

    Args:
        limit: maximum number of input rows to answer.
        overwrite: replace the job in the output folder.
        check: how to check the parts (output files of shards) of earlier runs.
        verbose: show Ray Data's messages.
        backend: where the stages run; default: Ray Data.
        process_began: start of the process, s since 1970; default: now.
        night: the run of `nightly` whose job this is.

    Raises:
        UserError: configuration or input is wrong, or the output belongs to another job.
        LeaseHeld, LeaseLost: another run works on the output.
        Interrupted: a signal stopped the run. RayError: a task failed.
        RowsMissing: the committed rows differ from the planned rows.
    """
    assert (config.input.since is None) == (night is None), "nightly runs such jobs"
    began, backend = time.monotonic(), backend or ray_backend(verbose=verbose)
    process_began = process_began or time.time()
    with interruptible():
        folder = output_folder(config)
        stored = stored_job(folder, overwrite=overwrite)
        if stored is None:
            check_free(folder, config)
        files, root = (night.files, night.root) if night is not None else (None, None)
        job = replace(plan(config, stored, backend, limit=limit, files=files, root=root), began=process_began)
        check_same_job(folder, stored, job.manifest)
        finished = stored is not None and has_results(folder, config)
        totals, fresh_rows = finished_totals(folder, job.manifest, check) if finished else None, 0
        if totals is None:  # a finished job skips these steps, because it may have no write access
            log_memory_estimate(config, job.checkpoint, job.manifest.batching, backend)
            make_writable(folder)
            lease = leased(folder) if night is None else nullcontext()
            announce_no_gain(job)
            with lease, backend.ready(config.actors):
                if stored is None:
                    warn_of_engine(config)
                if night is not None:
                    night.begin()
                claim(folder, stored, job.manifest, overwrite=overwrite)
                totals, fresh_rows = answer(job, folder, backend, check)
                write_report(folder, job.manifest)
                if night is None or night.accept(job.manifest, totals):
                    write_success(folder, job.manifest, totals)
    return JobResult(job.manifest, totals, fresh_rows, time.monotonic() - began)


def output_folder(config: JobConfig) -> Folder:
    """Make all checks that need neither input nor checkpoint; return the output folder."""
    check_outlives_job("output.path", config.output.path)
    check_columns(config)
    check_output_disjoint(config)
    folder = open_folder(config.output.path, config.storage)
    check_location(folder)
    return folder


def answer(job: PlannedJob, folder: Folder, backend: Backend, check: Check = "quick") -> tuple[Totals, int]:
    """Answer the shards that are not committed. Return the job's totals, and the number of newly answered rows."""
    manifest = job.manifest
    done = committed_shards(folder, manifest.shards, manifest.fingerprint, check)
    left = [shard for shard in manifest.shards if shard.index not in done]
    left_rows = sum(shard.rows for shard in left)
    clear_quarantine(folder, but={shard.index for shard in left})
    if done and left:
        log.warning("resuming: %d of %d shards are committed already", len(done), len(manifest.shards))
    if left:
        folder.remove(SUCCESS)  # the file exists if a finished job has lost parts
        job = replace(job, config=job.config.model_copy(update={"storage": job.config.storage.after_planning()}))
        folder = open_folder(folder.url, job.config.storage)
        workload = Workload(len(manifest.shards), manifest.rows, len(done), manifest.rows - left_rows, job.began)
        with (
            recorded_run(folder, job.config.devices, job.began),
            backend.session(job.config.actors, folder.url) as session,
            compacting(folder, manifest.fingerprint),
        ):
            session.run(job_stages(job, folder, left, session), workload, job.config.grace_seconds)
    totals = finalize(folder, manifest)
    write_results(folder, manifest, job.config)
    return totals, left_rows


def ray_backend(*, verbose: bool, metrics_port: int | None = None) -> Backend:
    """Return a `RayData` backend. Imports Ray, which this module does not import."""
    from pipeline.run.ray_data import RayData

    return RayData(verbose=verbose, metrics_port=metrics_port)
