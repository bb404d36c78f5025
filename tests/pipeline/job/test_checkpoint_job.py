"""Whole jobs whose checkpoint lies in a bucket or on a hub: the answers are those of the local one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, Hub, running_hub
from in_process import answered_rows, job_config, run_in_process
from transformers import AutoModelForCausalLM

from pipeline.config.evaluate import EvalConfig
from pipeline.config.job import StorageConfig
from pipeline.storage.folder import open_folder

PROMPTS = [f"name[Zizzi], area[{row}]" for row in range(12)]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def sharded(checkpoint: Path, s3: StorageConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint in shards, in the bucket too."""
    folder = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder, max_shard_size="40KB")
    bucket = open_folder("s3://bucket/job-model", s3)
    for path in checkpoint.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.iterdir():
        bucket.replace(path.name, path.read_bytes())
    return folder


def test_wherever_a_checkpoint_lies_the_answers_are_the_same(
    sharded: Path, hub: Hub, s3: StorageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    content = {path.name: path.read_bytes() for path in sharded.iterdir()}
    hub.push("main", content)
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")
    own: dict[str, Any] = {"sampling": {"temperature": 1.0}, "storage": s3.model_dump(), "shard_rows": 3}

    def run(name: str, path: str) -> int:
        model = {"cache": str(tmp_path / "cache")}
        return run_in_process(job_config(tmp_path / "in.parquet", tmp_path / name, path, model=model, **own)).fresh_rows

    asked = {"local": str(sharded), "bucket": "s3://bucket/job-model", "hub": f"{REPO}@main"}
    assert [run(name, path) for name, path in asked.items()] == [len(PROMPTS)] * 3
    local, bucket, of_hub = (answered_rows(tmp_path / name) for name in asked)
    assert local == bucket == of_hub and all(row["generated_text"] is not None for row in local)
    assert all(hub.downloads().count(name) == 1 for name in content if name.endswith(".safetensors"))
    fetched = [path for path in (tmp_path / "cache" / "checkpoints").glob("bucket-job-model-*") if path.is_dir()]
    assert len(fetched) == 1 and {path.name for path in fetched[0].iterdir()} == set(content)

    trained = b'{"min_depth": 1, "prompt": ["full"]}'
    stored = b'{"num_layers": 4, "speedup": 1.5, "horizon": 6, "trained": %s}' % trained
    hub.push("main", {**content, "skipdecode.json": stored})
    assert run("hub", asked["hub"]) == 0  # it stays with the commit that it began with
    with pytest.raises(
        ValueError, match=r"another job, which differs in model\.commit, model\.files\.skipdecode\.json"
    ):
        run("hub", f"{REPO}@{hub.branches['main']}")


def test_evaluate_takes_them_too(sharded: Path, s3: StorageConfig, tmp_path: Path) -> None:
    from pipeline.learn.evaluate.run import evaluate

    pq.write_table(pa.table({"prompt": PROMPTS[:2], "references": [["a"], ["b"]]}), tmp_path / "dev.parquet")
    values = {
        "data": {"path": str(tmp_path / "dev.parquet")},
        "model": {"path": "s3://bucket/job-model", "cache": str(tmp_path / "cache"), "dtype": "float32"},
        "output": str(tmp_path / "out"),
        "speedups": [1],
        "sampling": {"max_new_tokens": 4},
        "storage": s3.model_dump(),
        "threads": 1,
    }
    assert [line.nominal for line in evaluate(EvalConfig.model_validate(values)).lines] == [1.0]
