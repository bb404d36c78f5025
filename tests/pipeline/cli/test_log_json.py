"""Log and progress as JSON lines: one object a line, with the fields of an event."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import wait_until
from in_process import invoke, job_values
from moved_clock import Clock

from pipeline.answer.coordinator import Coordinator, RunProgress, Workload
from pipeline.cli.command import JsonLines
from pipeline.report import progress as progress_module
from pipeline.report.progress import shown_progress
from pipeline.runtime.announce import announce_to_log

pytestmark = pytest.mark.usefixtures("own_handlers")


def events(lines: str) -> list[dict[str, Any]]:
    """Every line is an object."""
    found = [json.loads(line) for line in lines.splitlines()]
    assert all({"time", "level", "logger", "event", "message"} <= one.keys() for one in found), found
    return found


def job(folder: Path, checkpoint: Path, **changes: Any) -> dict[str, Any]:
    pq.write_table(pa.table({"id": [1, 2, 3], "prompt": ["alpha", None, "bravo"]}), folder / "in.parquet")
    return job_values(folder / "in.parquet", folder / "out", checkpoint, **changes)


def test_a_job_logs_objects_and_its_summary(in_process: None, tmp_path: Path, checkpoint: Path) -> None:
    done = invoke(tmp_path, job(tmp_path, checkpoint), "--log-json", "--json")
    assert done.exit_code == 0, done.output
    *_, last = events(done.stderr)
    (printed,) = done.stdout.splitlines()
    assert last["event"] == "summary" and last["summary"] == json.loads(printed)
    assert last["summary"]["rows"] == 3 and last["summary"]["errors"] == 1


def test_a_failed_command_ends_with_an_event(in_process: None, tmp_path: Path, checkpoint: Path) -> None:
    strict = job(tmp_path, checkpoint, max_error_rate=0.0)
    done = invoke(tmp_path, strict, "--log-json")
    last = events(done.stderr)[-1]
    assert done.exit_code == last["exit_status"] == 3
    assert (last["event"], last["level"]) == ("end", "ERROR") and "1 of 3 rows have an error" in last["message"]
    wrong = invoke(tmp_path, strict, "--log-json", "--set", "sampling.top_p=2")
    (only,) = events(wrong.stderr)
    assert wrong.exit_code == only["exit_status"] == 2 and "top_p" in only["message"]


def test_progress_is_an_event_with_numbers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress_module, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(progress_module, "PLAIN_SECONDS", 0.0)
    logging.getLogger().addHandler(caplog.handler)
    announce_to_log(True)
    clock, coordinator = Clock(), Coordinator()
    monkeypatch.setattr(progress_module, "time", clock)
    with shown_progress(coordinator, Workload(8, 1000, 1, 50, clock.now - 60)) as shown:
        shown.seen.append((clock.now - 10, RunProgress()))
        coordinator.begin(0)
        coordinator.ended(0, True, 100, 2, 500)
        wait_until(lambda: any(getattr(one, "rows_done", 0) == 150 for one in caplog.records))
    one = json.loads(JsonLines().format(caplog.records[-1]))
    assert (one["event"], one["rows_done"], one["rows"], one["errors"]) == ("progress", 150, 1000, 2)
    assert (one["shards_done"], one["shards"]) == (2, 8)
    assert one["seconds"] == 60  # since the command began
    assert one["eta_seconds"] == pytest.approx(85) and one["tokens_per_second"] == pytest.approx(50)
    assert "ETA" in one["message"]
