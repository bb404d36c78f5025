"""Answers what is new: each run answers the input files that no earlier run has answered (`input.since`).

    ROOT/2026-01-31T00-00-00Z/         a run's dated folder: a job with its plan, its answers and `_SUCCESS`
    ROOT/_ledger/000007.json           how run 7 ended: as a success, with its input files, or abandoned
    ROOT/_ledger/through-000050.json   a copy of the records 1 to 50, so that reading stays fast
    ROOT/_ledger/root.json             the folder to which the file names in made-up ids are relative, in all runs

A command holds the lease of ROOT. It finishes the dated folders without a record, then begins a new one. A record is
created once, under the next number, before the run's `_SUCCESS`. So even a command that lost the lease unnoticed does
no harm: its number is taken, and its run does not count. A file is answered if a success names it, even if the run's
folder is gone. A run with more row errors than `max_error_rate` allows gets no record. If the user has raised this
limit enough, the next command records its success. Otherwise it abandons the run, and answers the files again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.answer.stats import Totals
from pipeline.commit.claim import LEDGER, OtherJob
from pipeline.commit.finalize import RowsMissing, finalize, finished_totals, write_success
from pipeline.commit.lease import LeaseLost, leased
from pipeline.commit.sink import SUCCESS, Check, clear_temporaries
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import Files, input_root, list_files
from pipeline.messages import counted, printable
from pipeline.plan import plan_files
from pipeline.plan.inputs import has_same_content
from pipeline.plan.manifest import Manifest, NoRows
from pipeline.report.summary import JobResult
from pipeline.run.stages import Backend
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import Folder, make_writable, open_folder, read_json, write_json

log = logging.getLogger(__name__)
FORMAT = 4
SHOWN_RUNS = 20  # maximum number of runs to print
SHOWN_FILES = 3  # maximum number of names to print of files that are left for a later run
COMPACT_EVERY = 50  # number of records after which all records are copied into one file
ROOT = f"{LEDGER}/root.json"
RECORD, COMPACTED = re.compile(r"(\d{6,})\.json"), re.compile(r"through-(\d{6,})\.json")
DATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d+)?")  # the time at which a run began; no two have one name


@dataclass(frozen=True)
class AnsweredFile:
    """An input file of a run. size: in bytes. For version and digest see `InputFile`."""

    url: str
    size: int
    version: str
    digest: str
    rows: int


@dataclass(frozen=True)
class Run:
    """A run, as its record tells. All times are UTC."""

    number: int
    folder: str  # name of the run's dated folder inside the root folder
    state: Literal["unfinished", "success", "abandoned"]  # a record holds no unfinished run
    files: tuple[AnsweredFile, ...]
    ended: str = ""
    by: str = ""  # process id and host of the command that ended the run
    why: str = ""  # why the run was abandoned
    left: tuple[str, ...] = ()  # URLs of new files that this run could not read and left for a later run

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class Ledger:
    """All runs with a record, oldest first. compacted: number of runs in the compacted file. root: see `ROOT`."""

    runs: tuple[Run, ...] = ()
    compacted: int = 0
    root: str | None = None

    @property
    def succeeded(self) -> list[Run]:
        return [run for run in self.runs if run.state == "success"]

    @property
    def last_success(self) -> Run | None:
        return self.succeeded[-1] if self.succeeded else None


@dataclass(frozen=True)
class FinishedRun:
    """A run whose rows are all answered. resumed: whether an earlier command began the run."""

    run: Run
    folder: Folder
    result: JobResult
    resumed: bool


@dataclass(frozen=True)
class NightlyResult:
    """The result of one command. finished: the runs that it finished. last: the last success.

    left: URLs of new files that are left for a later run.
    """

    finished: list[FinishedRun]
    last: Run | None
    left: Sequence[str] = ()


def run(
    config: JobConfig,
    *,
    limit: int | None = None,
    overwrite: bool = False,
    check: Check = "quick",
    verbose: bool = False,
    backend: Backend | None = None,
) -> NightlyResult:
    """Finish unfinished runs, then answer the input files that no success names.

    overwrite: abandon unfinished runs. limit: raises UserError if it is set. For the other arguments and the errors see
    `job.run`.
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


def run_in(root: Folder, config: JobConfig, backend: Backend, overwrite: bool, check: Check = "quick") -> NightlyResult:
    """Do the work of `run` in the folder `root`, whose lease the caller holds."""
    ledger, finished = read(root), list[FinishedRun]()
    if ledger.last_success is not None:
        _write_missing_success(_folder(root, ledger.last_success.folder, config.storage))
    for name in unfinished(root, ledger):
        done = _finish(root, ledger, name, config, backend, overwrite, check)
        finished += [done] if done is not None else []
        if done is not None and done.run.state == "unfinished":
            return NightlyResult(finished, ledger.last_success)
        ledger = read(root)
    for success in ledger.succeeded if check != "quick" else ():
        finished += _checked(root, ledger, success, config, backend, check)
    compact(root, ledger)
    new, left = new_input(config, ledger), list[str]()
    if new:
        try:
            done = _answer(root, ledger, _new_name(root, ledger), config, backend, new, check)
        except NoRows:
            left = sorted(new)
            log.warning("%d new files hold no readable rows, and are left for a later run", len(new))
        else:
            finished.append(done)
            left = list(done.run.left)
    return NightlyResult(finished, read(root).last_success, left)


def _nothing_new(root: Folder, config: JobConfig) -> NightlyResult | None:
    """Return a result without runs if all runs have ended and all input is answered, else None."""
    ledger = read(root)
    last = ledger.last_success
    if not ledger.runs or (last is not None and not root.exists(f"{last.folder}/{SUCCESS}")):
        return None
    return None if unfinished(root, ledger) or new_input(config, ledger) else NightlyResult([], last)


def new_input(config: JobConfig, ledger: Ledger) -> dict[str, tuple[int, str]]:
    """Return the files that the next run must answer."""
    listed = list_files(config.input.path, config.storage, config.input.format, may_be_empty=bool(ledger.runs))
    return new_files(listed, ledger, config.input.changed)


def new_files(listed: Files, ledger: Ledger, changed: str) -> dict[str, tuple[int, str]]:
    """Return the `listed` files that no success names. A file uploaded again unchanged is not new.

    changed: value of `input.changed`. If it is "error", an answered file that has changed raises UserError. For files
    that had no rows, `changed` does not count: they are new if they have changed.
    """
    answered = {file.url: (run, file) for run in ledger.succeeded for file in run.files}
    new: dict[str, tuple[int, str]] = {}
    for url, (size, version) in listed.items():
        if url in answered:
            run, file = answered[url]
            is_same = has_same_content(url, (file.size, file.version), file.digest, (size, version))
            if is_same or (changed == "ignore" and file.rows):
                continue
            if changed == "error" and file.rows:
                raise UserError(
                    f"{url}: changed since run {run.number} answered it ({file.size} bytes then, {size} now); "
                    "put the old file back, or set input.changed: reprocess (answer all of it again) or ignore (keep "
                    f"the answers of run {run.number})"
                )
        new[url] = size, version
    return new


def unfinished(root: Folder, ledger: Ledger) -> list[str]:
    """Return the names of the dated folders that have a plan but no record, oldest first."""
    known = {run.folder for run in ledger.runs}
    names = [name for name in root.folders() if DATED.fullmatch(name) and name not in known]
    return [name for name in names if root.exists(f"{name}/{plan_files.JOB}")]


def _finish(
    root: Folder, ledger: Ledger, name: str, config: JobConfig, backend: Backend, overwrite: bool, check: Check
) -> FinishedRun | None:
    """Finish a run with the files in its plan. Return None if the run is abandoned, e.g. because the job changed."""
    folder, done = _folder(root, name, config.storage), None
    try:
        manifest = plan_files.load(folder)
    except UserError as error:
        if not overwrite:
            raise UserError(f"{error}; --overwrite abandons this run, which has not finished") from None
        manifest = None
    pinned = {file.url: (file.size, file.version) for file in manifest.files if file.rows} if manifest else {}
    answered = sorted(pinned.keys() - new_files(pinned, ledger, "reprocess").keys())
    if overwrite or manifest is None:
        why = "--overwrite"
    elif answered:
        why = f"another run has answered {answered[0]}"
    else:
        listed = list_files(config.input.path, config.storage, config.input.format, may_be_empty=True)
        files = {file.url: listed[file.url] for file in manifest.files if file.url in listed}
        try:
            done = _answer(root, ledger, name, config, backend, files, check, resumed=True)
        except OtherJob as error:
            why = f"the job has changed in {error.names}"
        except UserError as error:
            raise UserError(f"the run in {folder.url} has not finished: {error}") from None
    if done is not None and (done.run.state == "success" or done.result.fresh_rows):
        if done.run.state == "success":
            log.warning("run %d, left unfinished by an earlier command, is now finished", done.run.number)
        return done
    if done is not None:
        totals = done.result.totals
        why = f"{totals.errors:,} of {totals.rows:,} rows have an error, more than max_error_rate allows"
    record(root, ledger, name, "abandoned", manifest, why)
    log.warning("%s had not finished and is abandoned (%s): its files count as new again", folder.url, why)
    return None


def _answer(
    root: Folder,
    ledger: Ledger,
    name: str,
    config: JobConfig,
    backend: Backend,
    files: Files,
    check: Check,
    *,
    resumed: bool = False,
    success: Run | None = None,
) -> FinishedRun:
    """Run the job of a dated folder over `files`. Record its success, unless too many rows have an error.

    success: the run's record, if there is one. Raises LeaseLost if another command has made the next record.
    """
    ended = [success] if success is not None else []

    def accept(manifest: Manifest, totals: Totals) -> bool:
        if not ended and totals.errors <= config.max_error_rate * totals.rows:
            left = () if resumed else sorted(files.keys() - {file.url for file in manifest.files})
            ended.append(record(root, ledger, name, "success", manifest, left=left))
        return bool(ended)

    def begin() -> None:
        if ledger.root is None:
            root.create(ROOT, (json.dumps({"format": FORMAT, "root": base}) + "\n").encode())

    base = ledger.root or input_root(config.input, config.storage, files)
    output = config.output.model_copy(update={"path": f"{root.url.rstrip('/')}/{name}"})
    dated = config.model_copy(update={"output": output})
    result = jobs.run(dated, check=check, backend=backend, night=jobs.Night(files, base, begin, accept))
    accept(result.manifest, result.totals)  # for a folder that has `_SUCCESS` already
    run = ended[0] if ended else _run_of(ledger, name, "unfinished", result.manifest)
    return FinishedRun(run, _folder(root, name, config.storage), result, resumed)


def _checked(
    root: Folder, ledger: Ledger, run: Run, config: JobConfig, backend: Backend, check: Check
) -> list[FinishedRun]:
    """Check the output files (parts) of a success. If a part is gone or set aside, answer its shard again.

    Raises UserError if a part is damaged and `check` is not "repair".
    """
    folder = _folder(root, run.folder, config.storage)
    manifest = plan_files.load(folder)
    if manifest is None or finished_totals(folder, manifest, check) is not None:
        return []
    listed = list_files(config.input.path, config.storage, config.input.format, may_be_empty=True)
    files = {file.url: listed[file.url] for file in manifest.files if file.url in listed}
    try:
        again = _answer(root, ledger, run.folder, config, backend, files, check, resumed=True, success=run)
    except OtherJob as error:
        problem = f"some of its output files are missing or damaged, but the job has changed in {error.names}"
        raise UserError(f"{folder.url}: {problem}; undo the change to answer these rows again") from None
    log.warning("run %d, which had lost output files, is now finished: %s", run.number, folder.url)
    return [again]


def _write_missing_success(folder: Folder) -> None:
    """Write the `_SUCCESS` of a run killed before this step, unless files in its folder are damaged or gone."""
    try:
        manifest = None if folder.exists(SUCCESS) else plan_files.load(folder)
        if manifest is not None:
            write_success(folder, manifest, finalize(folder, manifest))
    except (UserError, RowsMissing) as error:
        log.warning("%s gets no _SUCCESS: %s; run --repair answers lost rows again", folder.url, error)


def _folder(root: Folder, name: str, storage: StorageConfig) -> Folder:
    return open_folder(f"{root.url.rstrip('/')}/{name}", storage)


def _new_name(root: Folder, ledger: Ledger) -> str:
    """Return the current time as a folder name. Append a number if an earlier run has this name."""
    date, used = _now().replace(":", "-"), {*root.folders(), *(run.folder for run in ledger.runs)}
    names = [date, *(f"{date}-{number}" for number in range(2, len(used) + 2))]
    return next(name for name in names if name not in used)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _run_of(ledger: Ledger, name: str, state: Any, manifest: Manifest | None, **values: Any) -> Run:
    pinned = manifest.files if manifest is not None else ()
    files = tuple(AnsweredFile(file.url, file.size, file.version, file.digest, file.rows) for file in pinned)
    return Run(len(ledger.runs) + 1, name, state, files, **values)


def record(
    root: Folder,
    ledger: Ledger,
    name: str,
    state: Literal["success", "abandoned"],
    manifest: Manifest | None,
    why: str = "",
    left: Sequence[str] = (),
) -> Run:
    """Record how a run ended, under the number after those in `ledger`. Raises LeaseLost if this number is taken."""
    by = f"process {os.getpid()} on {socket.gethostname()}"
    run = _run_of(ledger, name, state, manifest, ended=_now(), by=by, why=why, left=tuple(left))
    # if the store's response was lost, the client has retried, and the existing record is ours: it holds our nonce
    data = (json.dumps({"format": FORMAT, **asdict(run), "nonce": uuid.uuid4().hex}, indent=1) + "\n").encode()
    if not root.create(_record_name(run.number), data) and root.read(_record_name(run.number)) != data:
        raise LeaseLost(f"another command has recorded run {run.number} meanwhile, so {name} does not count")
    return run


def _record_name(number: int) -> str:
    return f"{LEDGER}/{number:06d}.json"


def read(root: Folder) -> Ledger:
    """Read the ledger in the folder `root`. Raises UserError if a record is missing or cannot be read."""
    names = root.names(LEDGER)

    def newest(kind: re.Pattern[str]) -> int:
        return max((int(match[1]) for name in names if (match := kind.fullmatch(name))), default=0)

    compacted = newest(COMPACTED)
    runs = (read_json(root, _compacted_name(compacted), list[Run]) if compacted else None) or []
    # if the compacted file is damaged, read all records: it is only a copy
    if [run.number for run in runs] != list(range(1, compacted + 1)):
        runs, compacted = [], 0

    for number in range(compacted + 1, newest(RECORD) + 1):
        try:
            runs.append(TypeAdapter(Run).validate_python(_values(root, _record_name(number))))
        except ValidationError as error:
            problem = error.errors()[0]
            wrong = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            raise UserError(
                f"{root.url}/{_record_name(number)}: not a record of a run ({wrong}); restore it from a copy"
            ) from None
    return Ledger(tuple(runs), compacted, _values(root, ROOT)["root"] if names else None)


def _values(root: Folder, name: str) -> dict[str, Any]:
    try:
        values = json.loads(root.read(name))
    except FileNotFoundError:
        raise UserError(f"{root.url}/{name}: missing; restore it, else files would be answered twice") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{root.url}/{name}: not JSON: {error}; restore it from a copy") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise UserError(
            f"{root.url}/{name}: has format {printable(found)[:40]}, but this version of skipdecode reads {FORMAT}; "
            "use the version that wrote it, or another output.path"
        )
    return values


def compact(root: Folder, ledger: Ledger) -> None:
    """Copy all records into one file if there are at least `COMPACT_EVERY` new ones since the last copy."""
    if len(ledger.runs) - ledger.compacted >= COMPACT_EVERY:
        write_json(root, _compacted_name(len(ledger.runs)), [asdict(run) for run in ledger.runs])
        if ledger.compacted:
            root.remove(_compacted_name(ledger.compacted))


def _compacted_name(number: int) -> str:
    return f"{LEDGER}/through-{number:06d}.json"


def print_ledger(console: Console, root: Folder, storage: StorageConfig) -> None:
    """Print the newest runs as a table, and the totals of all successes."""
    ledger = read(root)
    runs = list(ledger.runs)
    for name in unfinished(root, ledger):
        manifest = plan_files.load(_folder(root, name, storage))
        runs.append(_run_of(Ledger(tuple(runs)), name, "unfinished", manifest))
    shown = runs[-SHOWN_RUNS:]
    title = "Runs" if len(shown) == len(runs) else f"The last {len(shown)} of {len(runs)} runs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("run", "files", "rows", "folder", "ended", "state"):
        table.add_column(name, justify="right" if name in ("run", "files", "rows") else "left")
    for run in shown:
        state = f"{run.state}: {run.why}" if run.why else run.state
        if run.left:
            state += f"; left for a later run: {_some(run.left)}"
        table.add_row(str(run.number), f"{len(run.files):,}", f"{run.rows:,}", run.folder, run.ended, state)
    console.print(table)
    rows = {(file.url, file.version): file.rows for run in ledger.succeeded for file in run.files}
    answered = f"{counted(len({url for url, _ in rows}), 'file')} and {counted(sum(rows.values()), 'row')}"
    console.print(f"\n{answered} answered in {counted(len(ledger.succeeded), 'run')}")


def _some(urls: Sequence[str]) -> str:
    """Return the first `SHOWN_FILES` URLs as text, with the number of the other URLs."""
    more = len(urls) - SHOWN_FILES
    return ", ".join(urls[:SHOWN_FILES]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def print_runs(console: Console, result: NightlyResult) -> None:
    """Print which runs finished (or that nothing is new), and which files are left for a later run."""
    lines = [f"left for a later run: {_some(result.left)}"] if result.left else []
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
        lines.append(f"nothing new since run {last.number} ({last.folder})")
    elif not result.finished:
        lines.append("nothing new: there was no run yet, and no file has rows")
    console.print("\n".join(lines))


def runs_summary(root: str, result: NightlyResult, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
