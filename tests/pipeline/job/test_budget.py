"""A job stops at its budget, keeps what is answered, and goes on with a higher one. No Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import invoke, job_values, parts, run_in_process

from actors.engine.errors import UserError
from pipeline.commit.budget import SPENT, Budget, BudgetSpent, open_budget
from pipeline.config.job import JobConfig
from pipeline.config.load import validated
from pipeline.generate.coordinator import Coordinator
from pipeline.plan import plan_files
from pipeline.run import stages
from pipeline.storage.folder import Folder, open_folder

ROWS = 24


@pytest.fixture
def values(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    pq.write_table(pa.table({"prompt": [f"cheap pub {row}" for row in range(ROWS)]}), tmp_path / "in.parquet")
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    return job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, sampling=sampling, shard_rows=4)


@pytest.fixture
def slow_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard takes longer than a look at the budget."""
    commit_shard = stages.commit_shard

    def slow(*arguments: Any, **named: Any) -> Any:
        done = commit_shard(*arguments, **named)
        time.sleep(0.6)
        return done

    monkeypatch.setattr(stages, "commit_shard", slow)


def test_tokens_stop_the_job_and_a_higher_budget_finishes_it(
    values: dict[str, Any], slow_shards: None, in_process: None, tmp_path: Path
) -> None:
    out, limited = tmp_path / "out", {**values, "budget": {"tokens": 30}}
    done = invoke(tmp_path, limited)
    assert done.exit_code == 4, done.output
    assert "interrupted (budget.tokens: 40 of 30 used)" in done.stderr and "raise the limit" in done.stderr
    assert len(parts(out)) == 2
    done = invoke(tmp_path, limited)  # nothing is left of it
    assert done.exit_code == 4 and "40 of 30 used" in done.stderr and len(parts(out)) == 2
    done = invoke(tmp_path, limited, "--set", "budget.tokens=1000")
    assert done.exit_code == 0, done.output
    undisturbed = {**values, "output": {"path": str(tmp_path / "other")}}
    run_in_process(JobConfig.model_validate(undisturbed))
    assert parts(out) == parts(tmp_path / "other")
    done = invoke(tmp_path, limited)  # a finished job is never refused
    assert done.exit_code == 0 and "nothing left to do" in done.stdout


def test_money_counts_the_clock_of_all_runs(values: dict[str, Any], slow_shards: None, tmp_path: Path) -> None:
    priced = {**values, "price_per_hour": 3600.0}  # one a second
    with pytest.raises(BudgetSpent, match=r"budget\.money: [0-9.]+ of 1 used"):
        run_in_process(JobConfig.model_validate({**priced, "budget": {"money": 1.0}}))
    spent = json.loads((tmp_path / "out" / SPENT).read_text())["device_seconds"]
    assert 1.0 <= spent < 60
    before = len(parts(tmp_path / "out"))
    assert 0 < before < ROWS / 4
    with pytest.raises(BudgetSpent):
        run_in_process(JobConfig.model_validate({**priced, "budget": {"money": spent + 0.5}}))
    again = json.loads((tmp_path / "out" / SPENT).read_text())["device_seconds"]
    assert spent + 0.5 <= again
    (tmp_path / "out" / SPENT).unlink()  # a killed driver
    result = run_in_process(JobConfig.model_validate({**priced, "budget": {"hours": 1.0}}))
    assert result.totals.rows == ROWS


def test_devices_multiply_the_clock(values: dict[str, Any], tmp_path: Path) -> None:
    config = JobConfig.model_validate({**values, "actors": {"count": 4, "gpus": 2}, "budget": {"hours": 8}})
    budget = Budget(config, open_folder(str(tmp_path), config.storage), 0.0, 0)
    assert budget.spent(3599, 0) is None
    assert budget.spent(3600, 0) == "budget.hours: 8 of 8 used"


def test_a_run_without_a_budget_is_counted_by_a_later_one(values: dict[str, Any], tmp_path: Path) -> None:
    run_in_process(JobConfig.model_validate(values))
    spent = json.loads((tmp_path / "out" / SPENT).read_text())["device_seconds"]
    config = JobConfig.model_validate({**values, "budget": {"hours": 1.0}})
    folder = open_folder(config.output.path, config.storage)
    manifest = plan_files.load(folder)
    assert manifest is not None and spent > 0
    assert open_budget(config, folder, manifest.fingerprint).used()["hours"] >= spent / 3600


def test_a_run_that_was_replaced_leaves_the_record_of_its_successor(values: dict[str, Any], local: Folder) -> None:
    first, second = (open_budget(JobConfig.model_validate(values), local, "") for _ in range(2))
    with first.spending(Coordinator(), 1):
        with second.spending(Coordinator(), 1):
            time.sleep(0.01)
        recorded = local.read(SPENT)
    assert local.read(SPENT) == recorded


def test_money_needs_a_price(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"budget\.money needs price_per_hour"):
        validated(JobConfig, {**values, "budget": {"money": 5.0}}, "job.yaml")
