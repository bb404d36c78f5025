"""On Ray: a plan from several actors at once; a job that its budget stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_values

from pipeline import job as jobs
from pipeline.commit.budget import BudgetSpent
from pipeline.config.job import JobConfig
from pipeline.estimate import estimate

ROWS = 240


@pytest.fixture
def values(checkpoint: Path, tmp_path: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"prompt": [f"cheap pub {row}" for row in range(ROWS)]}), tmp_path / "in.parquet")
    own: dict[str, Any] = {"schedule": {"speedup": 1}, "sampling": {"max_new_tokens": 4, "ignore_eos": True}}
    own |= {"actors": {"count": 2, "max_batch": 8}, "shard_rows": 2}
    return job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **own)


@pytest.mark.slow
def test_actors_measure_at_the_same_time(own_ray: None, values: dict[str, Any], tmp_path: Path) -> None:
    found = estimate(JobConfig.model_validate(values), seconds=5)
    assert found["chosen"]["generated_tokens"] == 4 * ROWS
    assert 0 < found["sample"]["rows"] <= 2 * 64
    assert found["startup"]["load"] > 0 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_job_stops_at_its_budget_and_its_rest_is_planned(ray_to_be_left: None, values: dict[str, Any]) -> None:
    with pytest.raises(BudgetSpent, match=r"budget\.tokens"):
        jobs.run(JobConfig.model_validate({**values, "budget": {"tokens": 8}}))
    rest = estimate(JobConfig.model_validate({**values, "budget": {"tokens": 8}}), seconds=5)
    assert rest["budget_used"]["tokens"] >= 8
    assert 0 < rest["rows_left"] < ROWS == rest["rows"]
    result = jobs.run(JobConfig.model_validate({**values, "budget": {"tokens": 4 * ROWS}}))
    assert result.totals.rows == ROWS and result.fresh_rows == rest["rows_left"]
