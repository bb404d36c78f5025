"""`_ledger/report.html`: the runs over a growing table, each with rows, time and errors."""

from __future__ import annotations

import calendar
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from pipeline.commit.claim import LEDGER
from pipeline.commit.sink import SUCCESS
from pipeline.config.job import StorageConfig
from pipeline.incremental import ledger as ledgers
from pipeline.incremental.ledger import Ledger, LedgerRun
from pipeline.messages import one_line, write_log
from pipeline.report.page import render
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, open_folder

log = logging.getLogger(__name__)
ROOT_REPORT = f"{LEDGER}/report.html"
SHOWN_RUNS = 60  # the newest


@dataclass(frozen=True)
class RunLine:
    """A run of the ledger. seconds: from its claim to its end. totals: its `_SUCCESS`; {} without one."""

    run: LedgerRun
    seconds: float | None
    totals: dict[str, Any]

    @property
    def errors(self) -> int | None:
        """Rows with an error; None if the run has no `_SUCCESS`."""
        return self.totals.get("errors")

    @property
    def rows_per_second(self) -> float | None:
        return self.run.rows / self.seconds if self.seconds and self.run.state == "success" else None


def write_root_report(root: Folder, storage: StorageConfig) -> None:
    """Write the report of a root whose last run has ended. An error is a warning, with its traceback in a log."""
    try:
        root.replace(ROOT_REPORT, root_page(root, storage))
    except Exception as error:  # the run has ended well
        traceback = write_log(error)
        shown = f" (traceback: {traceback})" if traceback else ""
        log.warning("%s/%s was not written: %s%s", root.url, ROOT_REPORT, one_line(error), shown)


def root_page(root: Folder, storage: StorageConfig) -> bytes:
    """The page of a root. Reads the ledger, and the `_SUCCESS` of the newest runs."""
    ledger = ledgers.read(root)
    lines = run_lines(root, storage, ledger)
    succeeded = [run for run in ledger.runs if run.state == "success"]
    values = {
        "title": f"SkipDecode runs: {root.url}",
        "url": root.url,
        "made": time.time(),
        "runs": len(ledger.runs),
        "succeeded": len(succeeded),
        "files": len({file.url for run in succeeded for file in run.files}),
        "rows": sum(run.rows for run in succeeded),
        "last": ledger.last,
        "lines": lines[::-1],
        "most_rows": max((line.run.rows for line in lines), default=0),
    }
    return render("root_page.html", values)


def run_lines(root: Folder, storage: StorageConfig, ledger: Ledger) -> list[RunLine]:
    """The newest runs, oldest first."""

    def line(run: LedgerRun) -> RunLine:
        seconds = _time(run.ended) - _time(run.began) if run.ended else None
        if run.state != "success":
            return RunLine(run, seconds, {})
        try:
            totals = json.loads(open_folder(f"{root.url.rstrip('/')}/{run.folder}", storage).read(SUCCESS))
        except (FileNotFoundError, ValueError):  # the folder was removed or moved since
            totals = {}
        return RunLine(run, seconds, totals if isinstance(totals, dict) else {})

    return list(in_parallel(line, ledger.runs[-SHOWN_RUNS:]))


def _time(text: str) -> float:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
