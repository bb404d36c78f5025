"""Whole jobs whose checkpoint lies in a bucket or on a hub: the answers are those of the local one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, Hub, running_hub
from transformers import AutoModelForCausalLM

from actors.answers import Prompt
from actors.generator import Generator
from pipeline import job as jobs
from pipeline.config.evaluate import EvalConfig
from pipeline.config.job import JobConfig, StorageConfig
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


def config(tmp_path: Path, model: str, storage: StorageConfig, output: str) -> JobConfig:
    values: dict[str, Any] = {
        "input": {"path": str(tmp_path / "in.parquet")},
        "output": {"path": str(tmp_path / output), "token_ids": True},
        "model": {"path": model, "dtype": "float32", "cache": str(tmp_path / "cache")},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 8, "temperature": 1.0},
        "actors": {"count": 2, "threads": 1, "cache_bytes": 2**20},
        "storage": storage.model_dump(),
        "shard_rows": 3,
    }
    return JobConfig.model_validate(values)


def answers(output: Path) -> list[list[int]]:
    rows = sorted(pq.read_table(output).to_pylist(), key=lambda row: int(row["id"].split(":")[1]))
    return [row["token_ids"] for row in rows]


@pytest.mark.slow  # what it is made of is tested in test_checkpoints.py
def test_wherever_a_checkpoint_lies_the_answers_are_the_same(
    own_ray: None, sharded: Path, hub: Hub, s3: StorageConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # of the driver alone: Ray's workers began without it
    content = {path.name: path.read_bytes() for path in sharded.iterdir()}
    hub.push("main", content)
    asked = {"bucket": "s3://bucket/job-model", "hub": f"{REPO}@main"}
    pq.write_table(pa.table({"prompt": PROMPTS}), tmp_path / "in.parquet")
    for name, path in asked.items():
        assert jobs.run(config(tmp_path, path, s3, name)).totals.errors == 0
    local = Generator(str(sharded), sampling={"max_new_tokens": 8, "temperature": 1.0}, dtype="float32", threads=1)
    ids = local.tokenizer(PROMPTS)["input_ids"]
    prompts = [Prompt(ids[row], str(tmp_path / "in.parquet"), row) for row in range(len(PROMPTS))]
    wanted = [answer.token_ids for answer in local.answer(prompts)]
    assert all(wanted)
    assert answers(tmp_path / "bucket") == answers(tmp_path / "hub") == wanted
    shards = [name for name in content if name.endswith(".safetensors")]
    assert all(hub.downloads().count(name) == 1 for name in shards)  # driver, prepare, two actors: one download
    fetched = [path for path in (tmp_path / "cache" / "checkpoints").glob("bucket-job-model-*") if path.is_dir()]
    assert len(fetched) == 1 and {path.name for path in fetched[0].iterdir()} == set(content)

    trained = b'{"min_depth": 1, "prompt": ["full"]}'
    stored = b'{"num_layers": 4, "speedup": 1.5, "horizon": 6, "trained": %s}' % trained
    hub.push("main", {**content, "skipdecode.json": stored})
    job = config(tmp_path, asked["hub"], s3, "hub")
    assert jobs.run(job).fresh_rows == 0  # it stays with the commit that it began with
    tag = job.model_copy(update={"model": job.model.model_copy(update={"path": f"{REPO}@{hub.branches['main']}"})})
    with pytest.raises(
        ValueError, match=r"another job, which differs in model\.commit, model\.files\.skipdecode\.json"
    ):
        jobs.run(tag)


def test_evaluate_takes_them_too(sharded: Path, s3: StorageConfig, tmp_path: Path) -> None:
    from pipeline.learn.evaluate.run import evaluate

    pq.write_table(pa.table({"prompt": PROMPTS[:2], "references": [["a"], ["b"]]}), tmp_path / "dev.parquet")
    found = evaluate(
        EvalConfig.model_validate(
            {
                "data": {"path": str(tmp_path / "dev.parquet")},
                "model": {"path": "s3://bucket/job-model", "cache": str(tmp_path / "cache"), "dtype": "float32"},
                "output": str(tmp_path / "out"),
                "speedups": [1],
                "sampling": {"max_new_tokens": 4},
                "storage": s3.model_dump(),
                "threads": 1,
            }
        )
    )
    assert [line.nominal for line in found.lines] == [1.0]
