"""A job whose actor has a GPU, its graphs and a cache planned from what is free; skipped where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from pipeline import job as jobs
from pipeline.config.job import JobConfig

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"), pytest.mark.ray]


def test_a_gpu_answers_what_the_cpu_answers(checkpoint: Path, tmp_path: Path) -> None:
    """Greedy, in float32; by a Ray that the job starts, so that the GPU is not a pretended one."""
    ray.shutdown()
    prompts = [f"row {row}: {'word ' * (row % 9)}" for row in range(60)]
    pq.write_table(pa.table({"id": list(range(60)), "prompt": prompts}), tmp_path / "in.parquet")

    def texts(name: str, actors: dict[str, Any], **model: Any) -> tuple[list[str], jobs.JobResult]:
        config = {
            "input": {"path": str(tmp_path / "in.parquet"), "id": "id"},
            "output": {"path": str(tmp_path / name)},
            "model": {"path": str(checkpoint), "dtype": "float32", **model},
            "schedule": {"agreement_rows": 0},
            "sampling": {"max_new_tokens": 24},
            "actors": actors,
        }
        outcome = jobs.run(JobConfig.model_validate(config))
        table = pa.concat_tables(pq.read_table(one) for one in sorted((tmp_path / name).glob("*.parquet")))
        return table.sort_by("id")["generated_text"].to_pylist(), outcome

    on_cpu, _ = texts("cpu", {}, device="cpu")
    on_gpu, outcome = texts("gpu", {"gpus": 1}, engine="paged")
    assert on_gpu == on_cpu
    assert outcome.manifest.batching.cache_bytes > 2**30, "planned from what is free"
    (device,) = set(pq.read_table(tmp_path / "gpu" / "_job" / "stats.parquet")["device"].to_pylist())
    assert torch.cuda.get_device_name() in device
