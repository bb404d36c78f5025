"""`_ledger/report.html`: the runs over a growing table, each with rows, time and errors."""

from __future__ import annotations

import calendar
import time
from typing import Any

from pipeline.commit.claim import LEDGER
from pipeline.commit.sink import SUCCESS
from pipeline.config.job import StorageConfig
from pipeline.incremental import ledger as ledgers
from pipeline.incremental.ledger import Ledger, LedgerRun
from pipeline.report.page import render
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, open_folder, read_json

ROOT_REPORT = f"{LEDGER}/report.html"
SHOWN_RUNS = 60  # number of newest runs that are shown


def root_page(root: Folder, storage: StorageConfig) -> bytes:
    """Return the page of a root of incremental runs. Reads the ledger, and the `_SUCCESS` of the newest runs."""
    ledger = ledgers.read(root)
    lines = run_lines(root, storage, ledger)
    values = {
        "title": f"SkipDecode runs: {root.url}",
        "url": root.url,
        "made": time.time(),
        "runs": len(ledger.runs),
        "succeeded": len(ledger.succeeded),
        "files": len({file.url for run in ledger.succeeded for file in run.files}),
        "rows": sum(run.rows for run in ledger.succeeded),
        "last": ledger.last,
        "lines": lines[::-1],
        "most_rows": max((line["run"].rows for line in lines), default=0),
    }
    return render("root_page.html", values)


def run_lines(root: Folder, storage: StorageConfig, ledger: Ledger) -> list[dict[str, Any]]:
    """Return the newest runs, oldest first, with seconds from claim to end, and the totals of their `_SUCCESS`."""

    def line(run: LedgerRun) -> dict[str, Any]:
        seconds = _time(run.ended) - _time(run.began) if run.ended else None
        succeeded, folder = run.state == "success", open_folder(f"{root.url.rstrip('/')}/{run.folder}", storage)
        found = read_json(folder, SUCCESS) if succeeded else {}  # None if the folder has been removed or moved
        totals = found if isinstance(found, dict) else {}
        rate = run.rows / seconds if seconds and succeeded else None
        return {"run": run, "seconds": seconds, "totals": totals, "rows_per_second": rate}

    return list(in_parallel(line, ledger.runs[-SHOWN_RUNS:]))


def _time(text: str) -> float:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))
