"""The demo checkpoint on E2E test prompts at 3x, two actors: whole, and killed half-way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from cli_command import Command
from in_process import parts, run_in_process

from actors.engine.cpu.kernels import multiplies
from pipeline.config.job import JobConfig

ROOT = Path(__file__).parents[3]
E2E = ROOT.parent / "shared" / "data" / "e2e"
CHECKPOINT = ROOT / "configs" / "demo" / "checkpoint"
ROWS = 504

pytestmark = pytest.mark.skipif(not E2E.is_dir(), reason=f"no {E2E}: tests/benchmarks/fetch_data.py")


def job(output: Path | str, **changes: Any) -> JobConfig:
    values: dict[str, Any] = {
        "input": {"path": str(E2E / "test.parquet"), "id": "id"},
        "output": {"path": str(output)},
        "model": {"path": str(CHECKPOINT), "dtype": "float32"},
        "schedule": {"speedup": 3},
        "sampling": {"max_new_tokens": 64, "temperature": 0.7, "top_p": 0.9, "seed": 1},
        "actors": {"count": 2, "threads": 1},
        "shard_rows": 48,
    }
    return JobConfig.model_validate({**values, **changes})


def assert_short_of_half_the_depth(output: Path, count: int, summary: dict[str, Any]) -> None:
    """Every prompt has a text, at less than half of the 24 layers."""
    rows = pq.read_table(output).to_pylist()
    assert len(rows) == len({row["id"] for row in rows}) == count
    assert all(row["generated_text"] and row["error"] is None for row in rows)
    assert all(row["mean_depth"] < 11 for row in rows)
    assert summary["mean_depth"] < 11
    assert summary["num_layers"] == 24
    assert summary["layer_ratio"] > 2.7


def test_the_first_prompts_in_this_process(tmp_path: Path) -> None:
    run_in_process(job(tmp_path / "out"), limit=64)
    assert_short_of_half_the_depth(tmp_path / "out", 64, json.loads((tmp_path / "out" / "_SUCCESS").read_text()))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not multiplies(torch.bfloat16, torch.device("cpu")), reason="no kernel for products")
def test_killed_half_way_and_started_again_the_bytes_are_the_same(tmp_path: Path) -> None:
    """Of bfloat16 by the kernels, and of slots that are refilled."""
    changes: dict[str, Any] = {
        "model": {"path": str(CHECKPOINT), "dtype": "bfloat16"},
        "actors": {"count": 2, "threads": 1, "scheduler": "refill", "max_batch": 20},
    }
    code, out, err = Command(tmp_path, job(tmp_path / "whole", **changes), "--json").end()
    assert code == 0, err
    assert_short_of_half_the_depth(tmp_path / "whole", ROWS, json.loads(out.splitlines()[-1]))
    config, whole = job(tmp_path / "out", **changes), parts(tmp_path / "whole")
    first = Command(tmp_path, config)
    first.wait_for_parts(tmp_path / "out", len(whole) // 2)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    early = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.parquet")}
    assert 0 < len(early) < len(whole)
    code, out, err = Command(tmp_path, config, "--json").end()
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["fresh_rows"] < ROWS
    assert parts(tmp_path / "out") == whole
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in early} == early
