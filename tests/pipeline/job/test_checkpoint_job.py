"""Whole jobs whose checkpoint lies in a bucket or on a hub, or has a speed adapter: answers, statistics, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import REPO, Hub, running_hub
from in_process import answered_rows, job_config, run_in_process
from random_adapter import random_adapter
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.advise.try_rows import answer_first_rows
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig, ModelConfig, StorageConfig
from pipeline.learn.evaluate import evaluate
from pipeline.storage.folder import filesystem, open_folder

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

    trained = b'{"depths": [1], "prompt": ["full"]}'
    stored = b'{"num_layers": 4, "speedup": 1.5, "horizon": 6, "trained": %s}' % trained
    hub.push("main", {**content, "skipdecode.json": stored})
    assert run("hub", asked["hub"]) == 0  # it stays with the commit that it began with
    with pytest.raises(
        ValueError, match=r"another job, which differs in model\.commit, model\.files\.skipdecode\.json"
    ):
        run("hub", f"{REPO}@{hub.branches['main']}")


def test_evaluate_takes_them_too(sharded: Path, s3: StorageConfig, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": PROMPTS[:2], "references": [["a"], ["b"]]}), tmp_path / "dev.parquet")
    values = {
        "input": {"path": str(tmp_path / "dev.parquet")},
        "model": {"path": "s3://bucket/job-model", "cache": str(tmp_path / "cache"), "dtype": "float32"},
        "output": {"path": str(tmp_path / "out")},
        "sampling": {"max_new_tokens": 4},
        "storage": s3.model_dump(),
        "adapt": {"references": "references"},
    }
    assert [line.nominal for line in evaluate(JobConfig.model_validate(values), [1]).lines] == [1.0]


ROWS = 12


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "in.parquet"
    prompts = [" ".join(["alpha", "bravo", "cheap"][: 1 + row % 3]) for row in range(ROWS)]
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(checkpoint, tmp_path_factory.mktemp("adapter"), ScheduleSpec(speedup=2, horizon=3))


def config(inputs: Path, output: Path, checkpoint: Path, adapter: Path | None, **changes: Any) -> JobConfig:
    own = {"output": {"token_ids": True}, "sampling": {"temperature": 1.0, "seed": 5}}
    model = {} if adapter is None else {"speed_adapter": str(adapter)}
    return job_config(inputs, output, checkpoint, model=model, **own, **changes)


def test_a_job_at_1x_has_the_answers_of_the_base(inputs: Path, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    full = {"schedule": {"speedup": 1.0}}
    for name, with_adapter in (("base", None), ("adapted", adapter)):
        run_in_process(config(inputs, tmp_path / name, checkpoint, with_adapter, **full))
    assert answered_rows(tmp_path / "base") == answered_rows(tmp_path / "adapted")
    assert len(answered_rows(tmp_path / "base")) == ROWS


def test_a_job_above_1x_has_the_adapter_and_its_schedule(
    inputs: Path, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    run_in_process(config(inputs, tmp_path / "adapted", checkpoint, adapter))
    run_in_process(config(inputs, tmp_path / "base", checkpoint, None, schedule={"horizon": 3}))
    adapted, base = answered_rows(tmp_path / "adapted"), answered_rows(tmp_path / "base")
    assert [row["token_ids"] for row in adapted] != [row["token_ids"] for row in base]
    longest = max(adapted, key=lambda row: row["generated_tokens"])
    depths = ScheduleSpec(speedup=2, horizon=3).build(4)  # the adapter's horizon, not the checkpoint's 6
    assert longest["mean_depth"] == pytest.approx(depths.mean_depth(longest["generated_tokens"]))
    tried = answer_first_rows(config(inputs, tmp_path / "none", checkpoint, adapter), 3)
    assert [row.answers[0].token_ids for row in tried] == [row["token_ids"] for row in adapted[:3]]


def test_another_adapter_is_another_job(inputs: Path, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    run_in_process(config(inputs, tmp_path / "out", checkpoint, adapter))
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    again = run_in_process(config(inputs, tmp_path / "out", checkpoint, copy))  # the same adapter elsewhere
    assert again.fresh_rows == 0
    other = random_adapter(checkpoint, tmp_path / "other", ScheduleSpec(speedup=2, horizon=3), rank=2)
    shutil.copy(adapter / "skipdecode.json", other)
    for changed in (other, None):
        changes = {} if changed else {"schedule": {"horizon": 3}}
        with pytest.raises(UserError, match=r"speed_adapter"):
            run_in_process(config(inputs, tmp_path / "out", checkpoint, changed, **changes))


def test_an_adapter_in_a_bucket_is_fetched_at_planning(checkpoint: Path, adapter: Path, s3: StorageConfig) -> None:
    fs, _ = filesystem("s3://bucket", s3)
    for path in adapter.iterdir():
        fs.put_file(str(path), f"bucket/adapters/one/{path.name}")
    model = ModelConfig(path=str(checkpoint), speed_adapter="s3://bucket/adapters/one/")
    resolved = resolve_checkpoint(model, s3)
    local = resolve_checkpoint(model.model_copy(update={"speed_adapter": str(adapter)}), s3)
    assert resolved.checkpoint.spec == local.checkpoint.spec
    assert set(resolved.identity()["speed_adapter"]) == set(local.identity()["speed_adapter"])
    fs.pipe_file("bucket/adapters/one/adapter_model.safetensors", b"damaged")
    with pytest.raises(UserError, match=r"s3://bucket/adapters/one/adapter_model.safetensors: damaged|header"):
        resolve_checkpoint(model, s3)


def test_mistakes_are_refused_at_planning(inputs: Path, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for base, given, message in (
        (other, adapter, rf"{adapter}: trained for a base with weights \w+, but {other} has \w+: give the adapter"),
        (checkpoint, tmp_path / "nowhere", r"nowhere: no such folder; a speed adapter comes from a local folder or s3"),
        (checkpoint, checkpoint, r"not a speed adapter: no adapter_config.json"),
        (adapter, None, r"give it as model.speed_adapter"),
    ):
        with pytest.raises(UserError, match=message):
            run_in_process(config(inputs, tmp_path / "out", base, given))
    assert not list((tmp_path / "out").glob("*.parquet"))


def test_evaluate_runs_full_depth_by_the_base(inputs: Path, checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    found, own = {}, {"sampling": {"max_new_tokens": 6}, "schedule": {"horizon": 3}}
    for name, model in (("base", {}), ("adapted", {"speed_adapter": str(adapter)})):
        job = job_config(inputs, tmp_path / name, checkpoint, model=model, **own)
        answers = evaluate(job, [2]).answers
        found[name] = {line: [answer.token_ids for answer in each] for line, each in answers.items()}
    assert found["base"]["1x"] == found["adapted"]["1x"]
    assert found["base"]["2x"] != found["adapted"]["2x"]
