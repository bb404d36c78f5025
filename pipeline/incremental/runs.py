"""Runs incremental jobs: finishes an unfinished run, then answers the input files that no run has answered.

A run has these steps, in the ledger and in the run's dated folder. It may be killed after any step:

    claim the files ─> save the plan in the folder ─> answer, shard by shard ─> check every row ─> end ─> _SUCCESS

If a run is killed, the next command resumes the run after its last step, or abandons the run and
claims its files again. Two commands may work on one folder at the same time. This wastes time but does no harm: `end`
decides once whether a run counts. A run with more row errors than `max_error_rate` allows is not ended. If the user
has raised this limit enough, the next command ends the run. Otherwise it abandons the run and answers the files again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.commit.finalize import RowsMissing, check_rows, finished_totals, totals_of, write_success
from pipeline.commit.lease import leased
from pipeline.commit.sink import SUCCESS, Check, clear_temporaries, committed_shards, load_records
from pipeline.config.job import JobConfig
from pipeline.incremental import ledger as ledgers
from pipeline.incremental.ledger import ConcurrentRun, Ledger, LedgerRun
from pipeline.input.files import Files, list_files
from pipeline.plan import manifest as manifests
from pipeline.plan import plan_files
from pipeline.plan.inputs import unchanged_files
from pipeline.plan.manifest import NoRows
from pipeline.plan.memory import log_memory_estimate
from pipeline.planned import PlannedJob, plan
from pipeline.report.job_page import write_report
from pipeline.report.summary import JobResult
from pipeline.run.stages import Backend
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import Folder, make_writable, open_folder, probe_create

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedRun:
    """A run whose rows are all answered. resumed: whether an earlier command began the run."""

    run: LedgerRun
    folder: Folder
    result: JobResult
    resumed: bool


@dataclass(frozen=True)
class IncrementalResult:
    """The result of one command. finished: the runs that it finished: a resumed run, a new run.

    last: the last successful run. left: URLs of new files that are left for a later run.
    """

    finished: list[FinishedRun]
    last: LedgerRun | None
    left: Sequence[str] = ()


def run(
    config: JobConfig,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    check: Check = "quick",
    verbose: bool = False,
    backend: Backend | None = None,
) -> IncrementalResult:
    """Finish an unfinished run, then answer the input files that no successful run has answered.

    overwrite: abandon an unfinished run. limit: raises UserError if it is set. For the other arguments see `job.run`.
    Raises the errors of `job.run`, and ConcurrentRun.
    """
    assert config.input.since == "last_success"
    if limit is not None:
        raise UserError("--limit: rows beyond the limit would never be answered; leave out --limit or input.since")
    backend = backend or jobs.ray_backend(verbose=verbose)
    with interruptible():
        root = jobs.output_folder(config)
        if any(name.endswith(".parquet") for name in root.names()) or plan_files.load(root) is not None:
            raise UserError(f"{root.url}: holds files that no incremental run wrote; choose another output.path")
        if not overwrite and check == "quick" and (idle := _nothing_new(root, config)) is not None:
            return idle
        make_writable(root)
        with leased(root):
            clear_temporaries(root)
            return run_in(root, config, backend, overwrite, check)


def run_in(
    root: Folder, config: JobConfig, backend: Backend, overwrite: bool, check: Check = "quick"
) -> IncrementalResult:
    """Do the work of `run` in the folder `root`. No lease is needed: the ledger lets only one command begin a run."""
    finished: list[FinishedRun] = []
    ledger = ledgers.read(root)
    if not ledger.runs:
        root = probe_create(root)
    last = ledger.last
    if last is not None and last.state == "unfinished":
        resumed = _resume(root, last, config, backend, overwrite, check)
        if resumed is not None:
            finished.append(resumed)
            if resumed.run.state == "unfinished":
                return IncrementalResult(finished, ledger.last_success)
        ledger = ledgers.read(root)
    elif last is not None and last.state == "success":
        _write_missing_success(_folder(root, last, config))
    if check != "quick":
        finished += _checked(root, ledger, config, backend, check)
    ledgers.compact(root, ledger)
    new = new_input(config, ledger)
    left = list[str]()
    try:
        job = plan(config, None, backend, files=new) if new else None
    except NoRows:
        job, left = None, sorted(new)
        log.warning("%d new files hold no readable rows, and are left for a later run", len(new))
    if job is not None:
        left = sorted(new.keys() - {file.url for file in job.manifest.files})
        if ledger.last is not None:  # in all runs, the file names in generated ids are relative to one folder
            batching = replace(job.manifest.batching, root=ledger.last.root)
            job = replace(job, manifest=replace(job.manifest, batching=batching))
        log_memory_estimate(config, job.checkpoint, job.manifest.batching, backend)
        with backend.ready(config.actors), jobs.checked(job, None, backend) as checked:
            run = ledgers.claim(root, ledger, checked.manifest, left)
            plan_files.save(_folder(root, run, config), checked.manifest)
            finished.append(_answer(root, run, checked, backend))
    return IncrementalResult(finished, ledgers.read(root).last_success, left)


def _nothing_new(root: Folder, config: JobConfig) -> IncrementalResult | None:
    """Return a result without runs if all runs have ended and all input is answered, else None."""
    ledger = ledgers.read(root)
    last = ledger.last
    if last is None or last.state == "unfinished":
        return None
    if last.state == "success" and not _folder(root, last, config).exists(SUCCESS):
        return None
    if new_input(config, ledger):
        return None
    return IncrementalResult([], ledger.last_success)


def _checked(root: Folder, ledger: Ledger, config: JobConfig, backend: Backend, check: Check) -> list[FinishedRun]:
    """Check the output files (parts) of all successful runs. If a part is gone or set aside, answer its shard again.

    Raises UserError if a part is damaged and `check` is not "repair".
    """
    found = []
    for run in ledger.succeeded:
        folder = _folder(root, run, config)
        manifest = plan_files.load(folder)
        if manifest is not None and finished_totals(folder, manifest, check) is None:
            if check != "repair":  # name a damaged part, even if the job has changed since
                committed_shards(folder, manifest.shards, manifest.fingerprint, check)
            if (again := _resume(root, run, config, backend, False, check)) is not None:
                found.append(again)
    return found


def new_input(config: JobConfig, ledger: Ledger) -> Files:
    """Return the files that the next run must answer."""
    listed = list_files(config.input.path, config.storage, config.input.format, may_be_empty=bool(ledger.runs))
    return ledgers.new_files(listed, ledger, config.input.changed)


def _folder(root: Folder, run: LedgerRun, config: JobConfig) -> Folder:
    return open_folder(f"{root.url.rstrip('/')}/{run.folder}", config.storage)


def print_runs(console: Console, result: IncrementalResult) -> None:
    """Print which runs finished (or that nothing is new), and which files are left for a later run."""
    lines = [f"left for a later run: {ledgers.some(result.left)}"] if result.left else []
    good = [done for done in result.finished if done.run.state == "success"]
    if good:
        runs = " and ".join(f"run {done.run.number}{' (resumed)' if done.resumed else ''}" for done in good)
        lines.append(f"{runs} finished, input files: {sum(len(done.run.files) for done in good):,}")
    if len(good) < len(result.finished):
        lines.append(
            f"run {result.finished[-1].run.number} has too many row errors and does not count: the next command "
            "answers its files again or, if max_error_rate is raised, accepts the run"
        )
    if not result.finished and (last := result.last) is not None:
        lines.append(f"nothing new since run {last.number} of {last.began} ({last.folder})")
    elif not result.finished:
        lines.append("nothing new: there was no run yet, and no file has rows")
    console.print("\n".join(lines))


def runs_summary(root: str, result: IncrementalResult, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the object that `--json` prints. runs: summaries of the finished runs."""
    listed = [
        {"run": one.run.number, "state": one.run.state, "resumed": one.resumed, "files": len(one.run.files), **values}
        for one, values in zip(result.finished, runs, strict=True)
    ]
    return {
        "output": root,
        "last_success": result.last.number if result.last else None,
        "fresh_rows": sum(values["fresh_rows"] for values in runs),
        "left": list(result.left),
        "runs": listed,
    }


def _resume(
    root: Folder, run: LedgerRun, config: JobConfig, backend: Backend, overwrite: bool, check: Check
) -> FinishedRun | None:
    """Finish a run with the files in its plan. Return None if the run is abandoned, e.g. because the job changed."""
    folder = _folder(root, run, config)
    if overwrite:
        _abandon(root, run, folder, config, "--overwrite")
        return None
    try:
        stored = plan_files.load(folder)
    except ValueError as error:
        raise UserError(f"{error}; --overwrite abandons run {run.number}, which has not finished") from None
    if stored is None:
        _abandon(root, run, folder, config, "its folder holds no job yet")
        return None
    pinned = {file.url: (file.size, file.version) for file in stored.files}
    job = plan(config, stored, backend, files=pinned)  # with the commit of the checkpoint that `stored` records
    if job.manifest.fingerprint != stored.fingerprint:
        names = ", ".join(manifests.difference(stored.identity, job.manifest.identity))
        if run.state == "success":
            problem = f"some output files of this run are missing or damaged, but the job has changed in {names}"
            raise UserError(f"{folder.url}: {problem}; undo the change to answer the rows of these files again")
        _abandon(root, run, folder, config, f"the job has changed in {names}")
        return None
    try:
        again = list_files(config.input.path, config.storage, config.input.format, may_be_empty=True)
        files = unchanged_files(stored.files, {url: entry for url, entry in again.items() if url in pinned})
    except UserError as error:
        state = "has not finished" if run.state == "unfinished" else "has lost output files"
        raise UserError(f"run {run.number} {state}: {error}") from None
    job = replace(job, manifest=replace(job.manifest, files=files))
    finished = _answer(root, run, job, backend, resumed=True, check=check)
    if finished.run.state == "unfinished":
        if finished.result.fresh_rows:
            return finished
        totals = finished.result.totals
        why = f"{totals.errors:,} of {totals.rows:,} rows have an error, more than max_error_rate allows"
        _abandon(root, run, folder, config, why)
        return None
    state = "left unfinished by an earlier command" if run.state == "unfinished" else "which had lost output files"
    log.warning("run %d, %s, is now finished: %s", run.number, state, folder.url)
    return finished


def _abandon(root: Folder, run: LedgerRun, folder: Folder, config: JobConfig, why: str) -> None:
    """End a run as abandoned, unless another command has just ended it as a success."""
    ended = ledgers.end(root, run, "abandoned", why)
    if ended.state == "success":
        _write_missing_success(folder)
        return
    log.warning(
        "run %d had not finished and is abandoned (%s): its files count as new again, and %s gets no _SUCCESS",
        run.number,
        ended.why,
        folder.url,
    )


def _answer(
    root: Folder, run: LedgerRun, job: PlannedJob, backend: Backend, *, resumed: bool = False, check: Check = "quick"
) -> FinishedRun:
    """Answer the rows of a run. Then end the run as a success, unless too many rows have an error."""
    folder = _folder(root, run, job.config)
    began = time.monotonic()
    clear_temporaries(folder)
    totals, fresh_rows = jobs.answer(job, folder, backend, check)
    ended = run
    if totals.errors <= job.config.max_error_rate * totals.rows:
        ended = ledgers.end(root, run, "success")
        if ended.state != "success":
            raise ConcurrentRun(f"run {run.number} was abandoned meanwhile ({ended.why}); {folder.url} does not count")
    write_report(folder, job.manifest, job.config.storage)
    if ended.state == "success":
        write_success(folder, job.manifest, totals)
    return FinishedRun(ended, folder, JobResult(job.manifest, totals, fresh_rows, time.monotonic() - began), resumed)


def _write_missing_success(folder: Folder) -> None:
    """Write the `_SUCCESS` of a run killed before this step, unless files in its folder are damaged or gone."""
    if folder.exists(SUCCESS):
        return
    try:
        if (manifest := plan_files.load(folder)) is None:
            return
        records, parts = load_records(folder, manifest.shards, manifest.fingerprint)
        check_rows(records, parts, manifest.shards)
    except (UserError, RowsMissing) as error:
        log.warning("%s gets no _SUCCESS: %s; run --repair answers lost rows again", folder.url, error)
        return
    write_success(folder, manifest, totals_of(records))
