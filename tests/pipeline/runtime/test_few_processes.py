"""A Ray of a job's own: which processes it has, that a job runs on it, and that Ray is left as it was."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import ray._private.state
from ray._private import parameter, services
from ray.data import ActorPoolStrategy
from ray.data._internal.stats import _StatsManager

from pipeline.backends.few_actors import few_actors
from pipeline.runtime import few_processes, ray_session
from pipeline.runtime.few_processes import STAND_IN, without_agents
from pipeline.runtime.replaced import Replaced

PORTS = (*few_processes.DASHBOARD_PORTS, *few_processes.ENVIRONMENT_PORTS)


class Doubled:
    """Callable class of a dataset's actors."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"] * 2}


def test_a_ray_of_our_own_runs_a_dataset_with_no_processes_but_its_workers(ray_to_be_left: None) -> None:
    ray.shutdown()
    before = [vars(services)["start_ray_process"], parameter.RayParams, vars(_StatsManager)["update_execution_metrics"]]
    with ray_session.connected(False, few=True), few_actors():
        pool = ActorPoolStrategy(size=2)
        rows = ray.data.range(8).map_batches(Doubled, compute=pool, batch_size=2, num_cpus=0.25)
        assert sorted(row["id"] for row in rows.take_all()) == list(range(0, 16, 2))
        children = [child.cmdline() for child in psutil.Process().children(recursive=True)]
        actors = {actor["ActorClassName"] for actor in ray._private.state.actors().values()}
    scripts = [" ".join(words[1:]) for words in children if words and Path(words[0]).name.startswith("python")]
    assert sum(STAND_IN.name in script for script in scripts) == 2
    assert all(STAND_IN.name in script or "default_worker.py" in script for script in scripts), scripts
    assert actors == {"MapWorker(MapBatches(Doubled))"}
    after = [vars(services)["start_ray_process"], parameter.RayParams, vars(_StatsManager)["update_execution_metrics"]]
    assert after == before


def test_with_metrics_the_dashboards_agent_stays() -> None:
    command = [
        "raylet",
        "--session_dir=/s",
        "--node_id=n",
        "--dashboard_agent_command=a b",
        "--runtime_env_agent_command=c",
    ]
    with_metrics, without = (without_agents(command, metrics=metrics) for metrics in (True, False))
    assert with_metrics[:4] == command[:4] and without[:3] == command[:3]
    for changed, ports in (
        (with_metrics[4], ["runtime_env_agent_port"]),
        (without[4], ["runtime_env_agent_port"]),
        (without[3], list(few_processes.DASHBOARD_PORTS)),
    ):
        words = shlex.split(changed.split("=", 1)[1])
        assert words[:4] == [sys.executable, "-I", "-S", str(STAND_IN)] and words[4:] == ["/s", "n", *ports]


def test_a_stand_in_writes_its_ports_and_ends_with_its_raylet(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-I", "-S", str(STAND_IN), str(tmp_path), "node", *PORTS])
    raylet = subprocess.Popen(["sh", "-c", f"{command} & wait"])
    while len(list(tmp_path.glob("*_node"))) < len(PORTS):
        time.sleep(0.02)
    [stand_in] = psutil.Process(raylet.pid).children()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {f"{name}_node": "-1" for name in PORTS}
    raylet.kill()
    raylet.wait()
    stand_in.wait(timeout=30)


def test_attributes_come_back_when_the_last_thread_has_left() -> None:
    class Owner:
        value = 1

    replaced = Replaced(lambda: [(Owner, "value", 2)])
    with replaced():
        with replaced():
            assert Owner.value == 2
        assert Owner.value == 2
    assert Owner.value == 1
    with pytest.raises(KeyError), replaced():
        raise KeyError(os.name)
    assert Owner.value == 1
