"""Real processes that die of a row, on a real Ray: the row is found, every other one is answered, nothing loops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import poison_stages
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from in_process import answered_rows, invoke, job_config, run_and_read
from transformers import AutoTokenizer

from pipeline import job as jobs
from pipeline.config.job import JobConfig
from pipeline.run import stages

ROWS, SHARD_ROWS, POISON = 6, 2, 3


ray.cloudpickle.register_pickle_by_value(poison_stages)  # workers cannot import what lies beside the tests


@pytest.fixture
def job(checkpoint: Path, tmp_path: Path) -> JobConfig:
    """6 rows in three shards; row 3 is the only one of nine tokens, and has the word that kills."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = [" ".join(["cheap"] * (1 + row % 3)) for row in range(ROWS)]
    prompts[POISON] = f"food {poison_stages.KILLER}"
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert [row for row in range(ROWS) if lengths[row] == poison_stages.DEADLY_TOKENS] == [POISON], lengths
    pq.write_table(pa.table({"id": [f"row-{row}" for row in range(ROWS)], "prompt": prompts}), tmp_path / "in.parquet")
    return job_config(
        tmp_path / "in.parquet",
        tmp_path / "out",
        checkpoint,
        input={"id": "id"},
        output={"token_ids": True},
        sampling={"temperature": 1.0, "seed": 3},
        actors={"count": 1, "max_batch": 2},
        shard_rows=SHARD_ROWS,
        attempts=1,
    )


@pytest.mark.parametrize(
    ("stage", "deadly"),
    [
        pytest.param("ShardGenerator", poison_stages.DeadlyGenerate, marks=pytest.mark.slow),
        ("prepare", poison_stages.deadly_prepare),
    ],
    ids=["generate", "prepare"],
)
def test_a_row_that_kills_its_process_is_found(
    own_ray: None, stage: str, deadly: Any, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"path": str(tmp_path / "undisturbed"), "token_ids": True}
    want = run_and_read({**job.model_dump(exclude_none=True), "output": elsewhere})
    monkeypatch.setattr(stages, stage, deadly)
    outcome = jobs.run(job)
    assert (outcome.totals.rows, outcome.totals.errors) == (ROWS, 1)
    rows = answered_rows(tmp_path / "out")
    row = rows.pop(POISON)
    assert (row["id"], row["finish_reason"], row["generated_text"]) == (want.pop(POISON)["id"], "error", None)
    assert row["error"] == "the process died 1 time while it worked on this row alone"
    assert rows == want and all(row["error"] is None for row in rows)
    assert list((tmp_path / "out" / "_job" / "quarantine").iterdir()) == []


@pytest.mark.slow
def test_no_actor_of_a_finished_job_stays_in_an_exit_handler(
    own_ray: None, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Ray that goes on, as a cluster does."""
    monkeypatch.setattr(stages, "ShardGenerator", poison_stages.StaysAtExit)
    jobs.run(job)
    process = int((Path(job.model.path).parent / poison_stages.STAYING).read_text())
    end = time.monotonic() + 20
    while psutil.pid_exists(process) and time.monotonic() < end:
        time.sleep(0.1)
    if stays := psutil.pid_exists(process):
        psutil.Process(process).kill()
    assert not stays


@pytest.mark.ray
@pytest.mark.slow
def test_an_actor_that_dies_while_it_loads_ends_the_job_in_one_line(
    ray_to_be_left: None, job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Path(job.model.path).parent / poison_stages.LOADS
    loads.unlink(missing_ok=True)
    monkeypatch.setattr(stages, "ShardGenerator", poison_stages.DeadlyLoad)
    result = invoke(tmp_path, job)
    assert result.exit_code == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("skipdecode: failed: ")
    assert "an actor died while it loaded the model, attempt 1 of 1" in last
    assert len(loads.read_text().splitlines()) == 1
