"""The cache of a GPU's actor is what that GPU has free, asked once, when the job is planned."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from compressed_checkpoints import compressed

from actors.engine.checkpoint.loading import Checkpoint, memory_needed
from actors.engine.checkpoint.weights import CACHE_STEP, SPARED
from pipeline.backends.in_process import InProcess
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.plan.manifest import GPU_CACHE_BYTES, Manifest, plan_job
from pipeline.plan.memory import log_memory_estimate
from pipeline.runtime import ray_session

GIB = 2**30


def job(checkpoint: Path, folder: Path, actors: dict[str, Any], **model: Any) -> JobConfig:
    pq.write_table(pa.table({"prompt": ["a", "b"]}), folder / "in.parquet")
    return JobConfig.model_validate(
        {
            "input": {"path": str(folder / "in.parquet")},
            "output": {"path": str(folder / "out")},
            "model": {"path": str(checkpoint), "engine": "paged", **model},
            "actors": actors,
        }
    )


def plan(config: JobConfig, stored: Manifest | None = None) -> Manifest:
    resolved = resolve_checkpoint(config.model, config.storage)
    return plan_job(config, resolved, resolved.checkpoint.schedule({}), None, stored, hardware=InProcess())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ActorsConfig]:
    """A GPU with 70 of 80 GiB free; who has asked."""
    found: list[ActorsConfig] = []

    def free(self: InProcess, actors: ActorsConfig) -> tuple[int, int]:
        found.append(actors)
        return 70 * GIB, 80 * GIB

    monkeypatch.setattr(InProcess, "free_gpu_memory", free)
    return found


@pytest.mark.parametrize("engine", ["paged", "auto"])
def test_what_is_free_beside_all_else_is_cache(
    checkpoint: Path, tmp_path: Path, asked: list[ActorsConfig], engine: str
) -> None:
    config = job(checkpoint, tmp_path, {"gpus": 1}, engine=engine)
    first = plan(config)
    assert first.batching.max_batch == 512
    need = memory_needed(
        resolve_checkpoint(config.model, config.storage).checkpoint,
        "bfloat16",
        first.batching.cache_bytes,
        on_gpu=True,
        paged_rows=512,
    )
    left = 70 * GIB - need.total
    assert 0 <= left < 70 * GIB // SPARED + CACHE_STEP and first.batching.cache_bytes % CACHE_STEP == 0
    assert len(asked) == 1
    assert plan(config, first).batching == first.batching
    assert len(asked) == 1, "a job that goes on keeps its batches"


@pytest.mark.parametrize(
    ("actors", "model", "cache"),
    [
        ({"gpus": 1, "cache_bytes": 10**9}, {}, 10**9),
        ({"gpus": 1}, {"engine": "library"}, GPU_CACHE_BYTES),
        ({"gpus": 1}, {"engine": "auto", "compile": True}, GPU_CACHE_BYTES),
        ({"gpus": 0.5}, {"engine": "library"}, GPU_CACHE_BYTES // 2),
        ({}, {}, None),
        ({"gpus": 1}, {"device": "cpu"}, GPU_CACHE_BYTES),
    ],
)
def test_nobody_asks_where_it_is_known_or_there_are_no_pages(
    checkpoint: Path,
    tmp_path: Path,
    asked: list[ActorsConfig],
    actors: dict[str, Any],
    model: dict[str, Any],
    cache: int | None,
) -> None:
    batching = plan(job(checkpoint, tmp_path, actors, **model)).batching
    assert not asked and cache in (None, batching.cache_bytes)
    paged = "cache_bytes" in actors
    assert batching.max_batch == (512 if paged else 64)


def test_a_job_that_asks_for_pages_and_gets_none_is_told_when_it_is_planned(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The actors' own log lines do not reach the user."""
    config = job(checkpoint, tmp_path, {})
    resolved = resolve_checkpoint(config.model, config.storage)
    log_memory_estimate(config, resolved, plan(config).batching, InProcess())
    assert "engine: library in place of paged, which needs a GPU" in caplog.messages


@pytest.mark.parametrize("model", [{"engine": "library"}, {"engine": "auto", "compile": True}])
def test_8_bits_without_the_paged_engine_are_refused_when_a_job_is_planned(
    checkpoint: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    if "compile" in model:
        with pytest.raises(ValueError, match=r"weights: fp8 does not go with compile: True; leave compile out"):
            job(checkpoint, tmp_path, {"gpus": 1}, weights="fp8", **model)
        return
    config = job(checkpoint, tmp_path, {"gpus": 1}, weights="fp8", **model)
    resolved = resolve_checkpoint(config.model, config.storage)
    with pytest.raises(ValueError, match=r"^model\.weights: fp8: on a GPU only the paged engine has it, .*"):
        log_memory_estimate(config, resolved, plan(config).batching, InProcess())


@pytest.mark.parametrize(
    ("actors", "model", "line"),
    [
        ({}, {}, "model.kv_cache: int8 is for GPUs: set actors.gpus, or leave it out"),
        ({"gpus": 1}, {"device": "cpu"}, "kv_cache: int8 does not go with device: cpu; leave device out"),
        ({"gpus": 1}, {"engine": "library"}, "kv_cache: int8 does not go with engine: library; leave engine out"),
        ({"gpus": 1}, {"engine": "auto", "compile": True}, "does not go with compile: True; leave compile out"),
        ({"gpus": 1}, {"dtype": "float16"}, "kv_cache: int8 does not go with dtype: float16; leave dtype out"),
    ],
)
def test_a_cache_of_8_bits_is_refused_where_it_is_known_not_to_be(
    checkpoint: Path, tmp_path: Path, actors: dict[str, Any], model: dict[str, Any], line: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        job(checkpoint, tmp_path, actors, kv_cache="int8", **model)


def test_a_cache_of_8_bits_is_refused_when_a_model_without_pages_is_planned(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[ActorsConfig]
) -> None:
    config = job(checkpoint, tmp_path, {"gpus": 1}, engine="auto", kv_cache="int8")
    resolved = resolve_checkpoint(config.model, config.storage)
    log_memory_estimate(config, resolved, plan(config).batching, InProcess())
    monkeypatch.setattr(Checkpoint, "has_pages", False)
    with pytest.raises(
        ValueError, match=r"^model\.kv_cache: int8: on a GPU only the paged engine has it, .*"
    ) as caught:
        log_memory_estimate(config, resolved, plan(config).batching, InProcess())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "actors", "model", "line"),
    [
        ("int8", {}, {}, "int8 weights (expanded to bfloat16 where a CPU lacks the instructions)"),
        ("int8", {}, {"dtype": "float32"}, "int8 weights, expanded to float32"),
        ("fp8", {}, {}, "fp8 weights, expanded to bfloat16"),
        ("fp8", {"gpus": 1}, {}, "fp8 weights (expanded to bfloat16 where a GPU lacks the instructions)"),
    ],
)
def test_what_becomes_of_a_checkpoints_8_bits_is_told_when_a_job_is_planned(
    checkpoint: Path,
    tmp_path: Path,
    asked: list[ActorsConfig],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    actors: dict[str, Any],
    model: dict[str, Any],
    line: str,
) -> None:
    config = job(compressed(checkpoint, tmp_path / kind, kind), tmp_path, actors, **{"engine": "auto", **model})
    resolved = resolve_checkpoint(config.model, config.storage)
    with caplog.at_level(logging.INFO):
        log_memory_estimate(config, resolved, plan(config).batching, InProcess())
    assert f"model: {line}" in caplog.messages


def test_8_bits_leave_room_for_cache(checkpoint: Path, tmp_path: Path, asked: list[ActorsConfig]) -> None:
    plain, int8 = (plan(job(checkpoint, tmp_path, {"gpus": 1}, **model)) for model in ({}, {"weights": "int8"}))
    assert int8.batching.max_batch == plain.batching.max_batch == 512
    assert int8.fingerprint != plain.fingerprint


@pytest.mark.parametrize("short", [1, 10**6, 2 * CACHE_STEP])
def test_no_room_is_told_before_anything_is_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    """And with one byte more a job is planned that has room for rows."""
    config = job(checkpoint, tmp_path, {"gpus": 1})
    need = memory_needed(
        resolve_checkpoint(config.model, config.storage).checkpoint,
        "bfloat16",
        2 * CACHE_STEP,
        on_gpu=True,
        paged_rows=512,
    )
    monkeypatch.setattr(InProcess, "free_gpu_memory", lambda *_: (need.total - short, 80 * GIB))
    with pytest.raises(ValueError, match=r"^the model needs .* of 80\.0 GiB are free: lower .*") as caught:
        plan(config)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(InProcess, "free_gpu_memory", lambda *_: (need.total, 80 * GIB))
    assert plan(config).batching.cache_bytes == CACHE_STEP


@pytest.mark.parametrize(
    ("gpus", "most"),
    [
        (0.5, 35),
        (2, 70),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 70), (0.25, 17.5))),  # a process each
    ],
)
def test_actors_that_share_a_gpu_share_it_evenly(
    own_ray: None, monkeypatch: pytest.MonkeyPatch, gpus: float, most: float
) -> None:
    monkeypatch.setattr(ray_session, "_gpu_memory", lambda: (70 * 2**30, 80 * 2**30))
    assert ray_session.free_gpu_memory(ActorsConfig(gpus=gpus)) == (most * GIB, 80 * GIB)


def test_a_gpu_that_torch_does_not_see_is_told(own_ray: None) -> None:
    """Ray's are pretended here."""
    with pytest.raises(ValueError, match=r"^actors\.gpus: Ray has GPUs, but torch sees none there: .*gpus: 0$"):
        ray_session.free_gpu_memory(ActorsConfig(gpus=1))


@pytest.mark.slow
def test_a_machine_without_a_gpu_is_told_at_once(ray_to_be_left: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the Ray that is started for the question, which is gone then."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.shutdown()
    with pytest.raises(ValueError, match=r"actors of 1 GPUs do not fit on 0 GPUs"):
        ray_session.free_gpu_memory(ActorsConfig(gpus=1))
    assert not ray.is_initialized()
