"""Records incremental runs in a ledger: the input files that each run has claimed, and how the run ended.

    _ledger/000007.json          the input files that run 7 claims; written when run 7 begins
    _ledger/000007.end.json      how run 7 ended: success or abandoned
    _ledger/through-000050.json  a copy of the records of runs 1 to 50, so that reading stays fast

A record is created once and never changed, so neither lock nor clock is needed. A run begins only after the previous
run has ended. If two commands begin a run at once, only one can create the record. If two commands end a run, the first
end counts. A file is answered if a successful run has claimed it, even if the run's folder is gone. Others are new.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from actors.engine.errors import UserError
from pipeline.commit.claim import LEDGER
from pipeline.input.files import Files, InputFile
from pipeline.messages import counted, printable
from pipeline.plan.inputs import has_same_content
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import Folder, read_json, write_json

log = logging.getLogger(__name__)
FORMAT = 3
SHOWN_RUNS = 20  # maximum number of runs to print
SHOWN_FILES = 3  # maximum number of names to print of files that are left for a later run
COMPACT_EVERY = 50  # number of ended runs after which all ended runs are copied into one file
RECORD, COMPACTED = re.compile(r"(\d{6,})(?:\.end)?\.json"), re.compile(r"through-(\d{6,})\.json")
State = Literal["unfinished", "success", "abandoned"]


class ConcurrentRun(Exception):
    """Another command claimed the files first, or abandoned this run."""


@dataclass(frozen=True)
class ClaimedFile:
    """An input file that a run has claimed. size: in bytes. For version and digest see `InputFile`."""

    url: str
    size: int
    version: str
    digest: str
    rows: int


@dataclass(frozen=True)
class LedgerRun:
    """A run in the ledger. All times are UTC."""

    number: int
    folder: str  # name of the run's output folder inside the root folder
    began: str
    by: str  # process id and host of the command that began the run
    files: tuple[ClaimedFile, ...]
    state: State = "unfinished"
    ended: str = ""
    why: str = ""  # why the run was abandoned
    root: str = ""  # folder to which the file names in the ids are relative, in all runs; see `PartSpec`
    left: tuple[str, ...] = ()  # URLs of new files that this run could not read and left for a later run

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


@dataclass(frozen=True)
class Ledger:
    """All runs, oldest first. Only the last run may be unfinished. compacted: number of runs in the compacted file."""

    runs: tuple[LedgerRun, ...] = ()
    compacted: int = 0

    @property
    def last(self) -> LedgerRun | None:
        return self.runs[-1] if self.runs else None

    @property
    def succeeded(self) -> list[LedgerRun]:
        return [run for run in self.runs if run.state == "success"]

    @property
    def last_success(self) -> LedgerRun | None:
        return self.succeeded[-1] if self.succeeded else None


def claim_name(number: int) -> str:
    return f"{LEDGER}/{number:06d}.json"


def end_name(number: int) -> str:
    return f"{LEDGER}/{number:06d}.end.json"


def compacted_name(number: int) -> str:
    return f"{LEDGER}/through-{number:06d}.json"


def read(root: Folder) -> Ledger:
    """Read the ledger from the folder `root`. Raises UserError if a record is missing or cannot be read."""
    names = root.names(LEDGER)

    def newest(kind: re.Pattern[str]) -> int:
        return max((int(match[1]) for name in names if (match := kind.fullmatch(name))), default=0)

    last, compacted = newest(RECORD), newest(COMPACTED)
    runs = (read_json(root, compacted_name(compacted), list[LedgerRun]) if compacted else None) or []
    # if the compacted file is damaged, read all records: it is only a copy
    if [run.number for run in runs] != list(range(1, compacted + 1)):
        runs, compacted = [], 0

    def run(number: int) -> LedgerRun:
        # read each record by name, because a listing may miss a record that is being written
        values, end = _record(root, claim_name(number)), _record(root, end_name(number))
        if values is None:
            raise UserError(f"{root.url}/{claim_name(number)}: missing; restore it, else files would be answered twice")
        if end is None and number < last:
            raise UserError(f"{root.url}/{end_name(number)}: missing, although later runs have begun; restore it")
        try:
            return TypeAdapter(LedgerRun).validate_python(values if end is None else {**values, "state": None, **end})
        except ValidationError as error:
            problem = error.errors()[0]
            key, why = ".".join(map(str, problem["loc"])), problem["msg"]
            name = end_name(number) if key in ("state", "ended", "why") else claim_name(number)
            raise UserError(
                f"{root.url}/{name}: not a record of a run ({key}: {why}); restore it from a copy"
            ) from None

    return Ledger((*runs, *map(run, range(compacted + 1, last + 1))), compacted)


def claim(root: Folder, ledger: Ledger, manifest: Manifest, left: Sequence[str] = ()) -> LedgerRun:
    """Begin the next run: record in the ledger that it claims the files in `manifest`.

    left: URLs of new files that are left for a later run. Raises ConcurrentRun if the last run has not ended, or
    another command has begun the next run since `ledger` was read.
    """
    if ledger.last is not None and ledger.last.state == "unfinished":
        raise ConcurrentRun(f"run {ledger.last.number} was begun by {ledger.last.by}")
    number, began = ledger.last.number + 1 if ledger.last else 1, _now()
    files = (ClaimedFile(file.url, file.size, file.version, file.digest, file.rows) for file in manifest.files)
    run = LedgerRun(
        number,
        _folder_name(began, ledger),
        began,
        f"process {os.getpid()} on {socket.gethostname()}",
        tuple(files),
        root=manifest.batching.root,
        left=tuple(left),
    )
    claimed = {key: value for key, value in asdict(run).items() if key not in ("state", "ended", "why")}
    # if the store's response was lost, the client has retried, and the existing record is ours: it holds our nonce
    data = _encode({**claimed, "nonce": uuid.uuid4().hex})
    if not root.create(claim_name(number), data) and root.read(claim_name(number)) != data:
        raise ConcurrentRun(f"run {number} was begun by another command; repeat this command when that run has ended")
    return run


def end(root: Folder, run: LedgerRun, state: State, why: str = "") -> LedgerRun:
    """Record how a run ended, unless this is recorded already. Return the run with the recorded end."""
    values: dict[str, Any] = {"state": state, "ended": _now(), "why": why}
    if not root.create(end_name(run.number), _encode({"number": run.number, **values})):
        first = _record(root, end_name(run.number))
        assert first is not None, "a record is never removed"
        values = {key: first[key] for key in values}
    return replace(run, **values)


def new_files(listed: Files, ledger: Ledger, changed: str) -> dict[str, tuple[int, str]]:
    """Return the `listed` files that no successful run has answered. A file uploaded again unchanged is not new.

    changed: value of `input.changed`. If it is "error", an answered file that has changed raises UserError. For files
    that had no rows, `changed` does not count: they are new if they have changed.
    """
    answered = {file.url: (run, file) for run in ledger.succeeded for file in run.files}
    new: dict[str, tuple[int, str]] = {}
    for url, (size, version) in listed.items():
        if url in answered:
            run, file = answered[url]
            if (changed == "ignore" and file.rows) or _is_same(file, size, version):
                continue
            if changed == "error" and file.rows:
                raise UserError(
                    f"{url}: changed since run {run.number} answered it ({file.size} bytes then, {size} now); "
                    "put the old file back, or set input.changed: reprocess (answer all of it again) or ignore (keep "
                    f"the answers of run {run.number})"
                )
        new[url] = size, version
    return new


def _is_same(file: ClaimedFile | InputFile, size: int, version: str) -> bool:
    """Return whether a file, which now has this size and version, still has the content that was answered."""
    return has_same_content(file.url, (file.size, file.version), file.digest, (size, version))


def compact(root: Folder, ledger: Ledger) -> None:
    """Copy all ended runs into one file if at least `COMPACT_EVERY` runs have ended since the last copy."""
    ended = [run for run in ledger.runs if run.state != "unfinished"]
    if ended and ended[-1].number - ledger.compacted >= COMPACT_EVERY:
        # two commands may write this file, but write the same bytes, because ended runs do not change
        write_json(root, compacted_name(ended[-1].number), [asdict(run) for run in ended])
        if ledger.compacted:
            root.remove(compacted_name(ledger.compacted))


def print_ledger(console: Console, ledger: Ledger) -> None:
    """Print the newest runs as a table, and the totals of all successful runs."""
    shown = ledger.runs[-SHOWN_RUNS:]
    title = "Runs" if len(shown) == len(ledger.runs) else f"The last {len(shown)} of {len(ledger.runs)} runs"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("run", "files", "rows", "folder", "ended", "state"):
        table.add_column(name, justify="right" if name in ("run", "files", "rows") else "left")
    for run in shown:
        state = f"{run.state}: {run.why}" if run.why else run.state
        if run.left:
            state += f"; left for a later run: {some(run.left)}"
        table.add_row(str(run.number), f"{len(run.files):,}", f"{run.rows:,}", run.folder, run.ended, state)
    console.print(table)
    files = [file for run in ledger.succeeded for file in run.files]
    rows = sum(file.rows for file in files)
    answered = f"{counted(len({file.url for file in files}), 'file')} and {counted(rows, 'row')}"
    console.print(f"\n{answered} answered in {counted(len(ledger.succeeded), 'run')}")


def some(urls: Sequence[str]) -> str:
    """Return the first `SHOWN_FILES` URLs as text, with the number of the other URLs."""
    more = len(urls) - SHOWN_FILES
    return ", ".join(urls[:SHOWN_FILES]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def _record(root: Folder, name: str) -> dict[str, Any] | None:
    try:
        values = json.loads(root.read(name))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{root.url}/{name}: not JSON: {error}; restore it from a copy") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise UserError(
            f"{root.url}/{name}: has format {printable(found)[:40]}, but this version of skipdecode reads {FORMAT}; "
            "use the version that wrote it, or another output.path"
        )
    return values


def _encode(values: Mapping[str, Any]) -> bytes:
    return (json.dumps({"format": FORMAT, **values}, indent=1) + "\n").encode()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _folder_name(began: str, ledger: Ledger) -> str:
    """Return the time `began` as a folder name without colons. Append a number if an earlier run has this name."""
    date, used = began.replace(":", "-"), {run.folder for run in ledger.runs}
    names = [date, *(f"{date}-{number}" for number in range(2, len(used) + 2))]
    return next(name for name in names if name not in used)
