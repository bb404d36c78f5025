"""A pool of actors grows while shards wait and shrinks while none do, though an actor takes two calls at once."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import parts
from in_process import run_in_process
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest, BacklogAwareActorAutoscaler
from ray.data._internal.execution.operators.actor_pool_map_operator import _ActorPool
from ray.data.context import AutoscalingConfig
from slow_stages import Slowness, slowed

from pipeline import job as jobs
from pipeline.config.job import JobConfig
from pipeline.run import ray_data, stages
from pipeline.run.ray_data import SHARDS_OF_ACTOR, scale_for

LEAST, MOST = 1, 6
SHARDS, EARLY, PER = 22, 20, 3
PAUSE_SECONDS = 12.0  # between the early shards and the others; Ray removes no actor in the ten behind its start


class Operator:
    """As Ray's, with a pool of so many actors, so many shards with them, and so many calls of each at once."""

    def __init__(self, actors: int, shards: int, calls: int) -> None:
        self._inputs_complete = False
        self.metrics = SimpleNamespace(num_inputs_received=1, average_num_inputs_per_task=1)
        values = {
            "current_size": actors,
            "min_size": LEAST,
            "max_size": MOST,
            "num_pending_actors": 0,
            "num_tasks_in_flight": shards,
            "max_actor_concurrency": calls,
            "max_tasks_in_flight_per_actor": SHARDS_OF_ACTOR,
            "get_pool_util": shards / (calls * actors),
        }
        self.pool = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})

    def has_completed(self) -> bool:
        return False

    def get_autoscaling_actor_pools(self) -> list[Any]:
        return [self.pool]


def growth(actors: int, shards: int, waiting: int, calls: int) -> int:
    """By how many actors Ray changes a pool. waiting: shards that are prepared, and with no actor."""
    operator, scaling = Operator(actors, shards, calls), AutoscalingConfig()
    scale_for(scaling, calls)
    state = SimpleNamespace(
        op=operator,
        total_enqueued_input_blocks=lambda: waiting,
        _scheduling_status=SimpleNamespace(under_resource_limits=True),
    )
    nothing_known: Any = SimpleNamespace(
        **{name: lambda _: None for name in ("get_allocation", "get_op_usage", "get_budget")}
    )
    topology: Any = {operator: state}
    autoscaler: Any = BacklogAwareActorAutoscaler(topology, nothing_known, config=scaling)
    return int(autoscaler._derive_target_scaling_config(operator.pool, operator, state).delta)


def test_a_pool_of_actors_that_take_two_calls_changes_as_one_of_actors_that_take_one() -> None:
    cases = [
        case
        for case in itertools.product(range(LEAST, MOST + 1), range(SHARDS_OF_ACTOR * MOST + 1), range(20))
        if case[1] <= SHARDS_OF_ACTOR * case[0]
    ]
    changes = [growth(*case, calls=1) for case in cases]
    assert min(changes) < 0 < max(changes)
    assert [growth(*case, calls=2) for case in cases] == changes
    assert growth(1, 2, 8, calls=2) > 0, "one actor has all that it may have, and shards wait"
    assert growth(2, 0, 0, calls=2) < 0, "nothing to do"
    assert growth(2, 4, 0, calls=2) == growth(2, 4, 0, calls=1)


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
    values: dict[str, Any] = {
        "input": {"path": str(tmp_path / "in.parquet")},
        "output": {"path": str(tmp_path / "one"), "token_ids": True},
        "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 12, "temperature": 1.0},
        "actors": {"threads": 1, "max_batch": 4, "scheduler": "refill"},
        "shard_rows": PER,
        "shared_prefix": False,
    }
    run_in_process(JobConfig.model_validate(values))
    prepare = stages.prepare  # type: ignore[attr-defined]

    output = tmp_path / "pool"

    def with_a_pause(batch: Any, **arguments: Any) -> Any:
        if batch["shard"][0] >= EARLY:
            while len(list(output.glob("*.parquet"))) < EARLY:
                time.sleep(0.1)
            time.sleep(PAUSE_SECONDS)
        return prepare(batch, **arguments)

    sizes: list[tuple[int, int]] = []  # parts, actors
    scale = _ActorPool.scale

    def recorded(pool: _ActorPool, request: ActorPoolScalingRequest) -> int | None:
        changed = scale(pool, request)
        sizes.append((len(list(output.glob("*.parquet"))), pool.current_size()))
        return changed

    monkeypatch.setattr(_ActorPool, "scale", recorded)
    values["output"]["path"] = str(output)
    values["actors"] |= {"min": 1, "max": 2}
    with slowed(Slowness(prepare=0, answer=2.0, commit=0)):
        monkeypatch.setattr(stages, "prepare", with_a_pause)
        jobs.run(JobConfig.model_validate(values))
    assert len(set(pq.read_table(output / "_job/stats.parquet")["actor"].to_pylist())) == 2
    until_the_pause = [actors for done, actors in sizes if done <= EARLY]
    grown = until_the_pause.index(2)
    assert set(until_the_pause[:grown]) == {1}, "it begins with one actor"
    assert 1 in until_the_pause[grown:], "in the pause there is nothing to do for two"
    assert parts(output) == parts(tmp_path / "one")
