"""What a job counts while it runs is what its statistics say."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_config, run_in_process
from recorded_metrics import Recorded

from pipeline import metrics
from pipeline.config.job import JobConfig
from pipeline.generate.coordinator import Coordinator, RunProgress, Workload
from pipeline.metrics import METRICS
from pipeline.report.progress import shown_progress

DRIVER = {"job_rows", "job_rows_done", "eta_seconds"}
STORE = {"store_retries"}  # tests/pipeline/storage/test_s3.py


def config(folder: Path, checkpoint: Path) -> JobConfig:
    pq.write_table(pa.table({"id": range(20), "prompt": [None, *["alpha bravo"] * 19]}), folder / "in.parquet")
    own = {"input": {"id": "id"}, "actors": {"max_batch": 4}, "shard_rows": 5, "price_per_hour": 3600.0}
    return job_config(folder / "in.parquet", folder / "out", checkpoint, **own)


def test_the_metrics_of_a_job_are_its_totals(tmp_path: Path, checkpoint: Path) -> None:
    recorded = Recorded()
    with metrics.installed(recorded):
        totals = run_in_process(config(tmp_path, checkpoint)).totals
    found = recorded.counters
    assert found["rows"] == totals.rows == 20 and found["row_errors"] == totals.errors == 1
    for name in ("generated_tokens", "decode_steps", "layer_steps"):
        assert found[name] == getattr(totals, name) > 0
    assert found["prompt_tokens"] == totals.padded_prompt_tokens - totals.padding_tokens > 0
    for part in ("prepare", "prefill", "decode", "commit"):
        seconds = getattr(totals, f"{part}_seconds")
        assert found[f"seconds/{part}"] == pytest.approx(seconds) and seconds > 0
    assert totals.money == pytest.approx(totals.device_seconds) == pytest.approx(totals.generate_seconds)
    names = {name.split("/")[0] for name in found} | recorded.gauges.keys()
    assert names == METRICS.keys() - DRIVER - STORE


def test_the_driver_sets_the_jobs_gauges() -> None:
    coordinator, recorded = Coordinator(), Recorded()
    with metrics.installed(recorded), shown_progress(coordinator, Workload(8, 1000, 1, 50)) as progress:
        progress.seen.append((time.monotonic() - 10, RunProgress()))
        coordinator.begin(0)
        coordinator.ended(0, True, 100, 0, 500)
    assert recorded.gauges.keys() == DRIVER
    assert (recorded.gauges["job_rows"], recorded.gauges["job_rows_done"]) == (1000, 150)
    assert recorded.gauges["eta_seconds"] == pytest.approx(85, rel=0.1)
