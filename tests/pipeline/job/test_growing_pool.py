"""A pool of actors grows while shards wait and shrinks while none do, though an actor takes two calls at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_config, parts, run_in_process
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest
from ray.data._internal.execution.operators.actor_pool_map_operator import _ActorPool
from slow_stages import Slowness, slowed

from pipeline import job as jobs
from pipeline.run import ray_data, stages

SHARDS, EARLY, PER = 22, 20, 3


def test_tasks_that_ask_for_no_cpus_run_on_no_node_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": "head", "Alive": True, "Resources": {"memory": 1.0}},
        {"NodeID": "worker", "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "idle", "Alive": True, "Resources": {"CPU": 0.0}},
        {"NodeID": "gone", "Alive": False, "Resources": {}},
    ]
    monkeypatch.setattr(ray_data.ray, "nodes", lambda: nodes)
    assert ray_data._place() == {"label_selector": {"ray.io/node-id": "!in(head,idle)"}}
    monkeypatch.setattr(ray_data.ray, "nodes", lambda: nodes[1:2])
    assert ray_data._place() == {}


@pytest.mark.slow
def test_a_pool_grows_and_shrinks_and_writes_the_same_bytes(
    own_ray: None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"name[Zizzi], area[{row % 7}]" for row in range(SHARDS * PER)]
    pq.write_table(pa.table({"prompt": rows}), tmp_path / "in.parquet")
    own: dict[str, Any] = {
        "output": {"token_ids": True},
        "model": {"dtype": "bfloat16"},
        "sampling": {"max_new_tokens": 12, "temperature": 1.0},
        "shard_rows": PER,
        "shared_prefix": False,
    }
    refill = {"max_batch": 4, "scheduler": "refill"}
    run_in_process(job_config(tmp_path / "in.parquet", tmp_path / "one", checkpoint, actors=refill, **own))
    prepare = stages.prepare  # type: ignore[attr-defined]

    output = tmp_path / "pool"

    def with_a_pause(*arguments: Any, **named: Any) -> Any:
        for block in prepare(*arguments, **named):
            while block["shard"][0].as_py() >= EARLY and not shrunk.exists():
                time.sleep(0.1)
            yield block

    sizes: list[tuple[int, int]] = []  # parts, actors
    shrunk = tmp_path / "shrunk"
    scale = _ActorPool.scale

    def recorded(pool: _ActorPool, request: ActorPoolScalingRequest) -> int | None:
        changed = scale(pool, request)
        sizes.append((len(list(output.glob("*.parquet"))), pool.current_size()))
        if pool.current_size() < max(size for _, size in sizes):
            shrunk.touch()
        return changed

    monkeypatch.setattr(_ActorPool, "scale", recorded)
    pool = job_config(tmp_path / "in.parquet", output, checkpoint, actors={**refill, "min": 1, "max": 2}, **own)
    with slowed(Slowness(prepare=0, answer=2.0, commit=0)):
        monkeypatch.setattr(stages, "prepare", with_a_pause)
        jobs.run(pool)
    assert len(set(pq.read_table(output / "_job/stats.pq")["actor"].to_pylist())) == 2
    until_the_pause = [actors for done, actors in sizes if done <= EARLY]
    grown = until_the_pause.index(2)
    assert set(until_the_pause[:grown]) == {1}, "it begins with one actor"
    assert 1 in until_the_pause[grown:], "in the pause there is nothing to do for two"
    assert parts(output) == parts(tmp_path / "one")
