"""One scheduled run: finish what the last one left, then answer the input files that nobody has answered yet.

What a run does to the ledger and to its dated folder, in this order; it may die after any step:

    claim the files ─> pin the job in the folder ─> answer, shard by shard ─> check every row ─> end ─> _SUCCESS

The next run then goes on from there, or gives the run up and takes its files itself. Overlapping runs may both
work on one folder, which costs time and harms nothing; `end` decides once and for all whether a run counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from actors.engine.errors import UserError
from pipeline.commit.finalize import totals_of, write_success
from pipeline.commit.records import read_records
from pipeline.commit.sink import SUCCESS
from pipeline.generate.stats import Totals
from pipeline.incremental import ledger as ledgers
from pipeline.incremental.ledger import ConcurrentRun, Ledger, Run
from pipeline.plan import manifest as manifests
from pipeline.plan.manifest import Manifest, NoRows
from pipeline.read.files import Files
from pipeline.report.summary import JobResult
from pipeline.storage.folder import Folder, probe_create

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What a scheduled run needs of its job.

    inputs: the input files as they lie there now; False: none is an error.
    open: the folder of a run, by its name in the root.
    plan: a manifest over these files, or the continuation of a stored one over its own.
    answer: every row of a manifest in its folder, checked, without `_SUCCESS`; totals, and the rows that were left.
    """

    inputs: Callable[[bool], Files]
    open: Callable[[str], Folder]
    plan: Callable[[Files, Manifest | None], Manifest]
    answer: Callable[[Folder, Manifest], tuple[Totals, int]]


@dataclass(frozen=True)
class FinishedRun:
    """A run of the ledger that this command has brought to its end."""

    run: Run
    folder: Folder
    result: JobResult
    resumed: bool


@dataclass(frozen=True)
class Scheduled:
    """What one command did: at most the rest of an unfinished run, and a new one. last: the last that succeeded."""

    finished: list[FinishedRun]
    last: Run | None


def run_scheduled(root: Folder, job: Job, changed: str, overwrite: bool) -> Scheduled:
    """Finish the unfinished run of a root, then run over what is new. overwrite: give the unfinished run up.

    Raises ValueError (input is wrong, or no longer what an unfinished run has pinned), ConcurrentRun, and whatever
    answering raises.
    """
    finished: list[FinishedRun] = []
    ledger = ledgers.read(root)
    if not ledger.runs:
        root = probe_create(root)
    last = ledger.last
    if last is not None and last.state == "unfinished":
        resumed = _resume(root, last, job, overwrite)
        if resumed is not None:
            finished.append(resumed)
        ledger = _read_again(root, last.number)
    elif last is not None and last.state == "success":
        _write_missing_success(job.open(last.folder))
    ledgers.roll_up(root, ledger)
    listed = job.inputs(bool(ledger.runs))
    new = ledgers.new_files(listed, ledger, changed)
    if new:
        try:
            manifest = job.plan(new, None)
        except NoRows:
            log.warning("%d new files have no rows and are left for a later run", len(new))
        else:
            run = ledgers.claim(root, ledger, manifest)
            folder = job.open(run.folder)
            manifests.save(folder, manifest)
            finished.append(_answer(root, run, folder, manifest, job, resumed=False))
    return Scheduled(finished, finished[-1].run if finished else ledger.last_success)


def print_scheduled(console: Console, scheduled: Scheduled) -> None:
    """One line: which runs were finished, or since when there is nothing new."""
    if scheduled.finished:
        runs = [f"run {one.run.number}{' (resumed)' if one.resumed else ''}" for one in scheduled.finished]
        files = sum(len(one.run.files) for one in scheduled.finished)
        console.print(f"{' and '.join(runs)} finished, input files: {files:,}", highlight=False)
    elif scheduled.last is not None:
        last = scheduled.last
        console.print(f"nothing new since run {last.number} of {last.began} ({last.folder})", highlight=False)
    else:
        console.print("nothing new: no run has been, and no file has rows", highlight=False)


def scheduled_summary(root: str, scheduled: Scheduled, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One object for `--json`; runs: the summaries of the finished ones."""
    finished = zip(scheduled.finished, runs, strict=True)
    return {
        "output": root,
        "last_success": scheduled.last.number if scheduled.last else None,
        "fresh_rows": sum(one["fresh_rows"] for one in runs),
        "runs": [
            {"run": one.run.number, "resumed": one.resumed, "files": len(one.run.files), **values}
            for one, values in finished
        ],
    }


def _read_again(root: Folder, number: int) -> Ledger:
    """The ledger after a run has ended; ConcurrentRun if another one has begun since."""
    ledger = ledgers.read(root)
    if ledger.last is not None and ledger.last.state == "unfinished":
        raise ConcurrentRun(f"run {ledger.last.number} was begun by {ledger.last.by} after run {number}")
    return ledger


def _resume(root: Folder, run: Run, job: Job, overwrite: bool) -> FinishedRun | None:
    """Finish a run with its pinned files; None if it is given up, because it is not this job's or by --overwrite."""
    folder = job.open(run.folder)
    if overwrite:
        _give_up(root, run, folder, "--overwrite")
        return None
    try:
        stored = manifests.load(folder)
    except ValueError as error:
        raise UserError(f"{error}; --overwrite gives up run {run.number}, which has not finished") from None
    if stored is None:
        _give_up(root, run, folder, "its folder holds no job yet")
        return None
    pinned = {file.url: (file.size, file.version) for file in stored.files}
    manifest = job.plan(pinned, stored)
    if manifest.fingerprint != stored.fingerprint:
        names = ", ".join(manifests.difference(stored.identity, manifest.identity))
        _give_up(root, run, folder, f"the job has changed in {names}")
        return None
    try:
        listed = job.inputs(True)
        manifests.check_inputs_unchanged(stored.files, {url: found for url, found in listed.items() if url in pinned})
    except ValueError as error:
        raise UserError(f"run {run.number} has not finished: {error}") from None
    finished = _answer(root, run, folder, manifest, job, resumed=True)
    log.warning("run %d, which had not finished, is finished: %s", run.number, folder.url)
    return finished


def _give_up(root: Folder, run: Run, folder: Folder, why: str) -> None:
    """Abandon a run, unless it succeeds in this very moment."""
    ended = ledgers.end(root, run, "abandoned", why)
    if ended.state == "success":
        _write_missing_success(folder)
        return
    log.warning(
        "run %d had not finished and is given up (%s): its files are new again, and %s never gets a _SUCCESS",
        run.number,
        ended.why,
        folder.url,
    )


def _answer(root: Folder, run: Run, folder: Folder, manifest: Manifest, job: Job, *, resumed: bool) -> FinishedRun:
    began = time.monotonic()
    totals, fresh_rows = job.answer(folder, manifest)
    ended = ledgers.end(root, run, "success")
    if ended.state != "success":
        raise ConcurrentRun(f"run {run.number} was given up meanwhile ({ended.why}); {folder.url} does not count")
    write_success(folder, manifest, totals)
    return FinishedRun(ended, folder, JobResult(manifest, totals, fresh_rows, time.monotonic() - began), resumed)


def _write_missing_success(folder: Folder) -> None:
    """Write the `_SUCCESS` of a run that died just before it, unless its folder was removed since."""
    if folder.exists(SUCCESS) or (manifest := manifests.load(folder)) is None:
        return
    totals = totals_of(read_records(folder, manifest.fingerprint))
    if totals.rows == manifest.rows:
        write_success(folder, manifest, totals)
