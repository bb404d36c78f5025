"""The Ray of a job: started in a session of its own and ended whole, or given back as it was found."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from cli_command import HANGING_SECONDS, wait_until
from in_process import invoke, job_values
from moved_clock import Clock
from ray.util.placement_group import placement_group_table

from actors.engine.errors import UserError
from pipeline.answer.coordinator import RunProgress
from pipeline.config.job import ActorsConfig
from pipeline.run import ray_session, remote


def test_a_cluster_that_does_not_grow_is_refused_after_a_while(
    own_ray: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("pipeline.runtime.announce.time", clock)
    monkeypatch.setattr(ray_session, "time", clock)
    problem = r"actors: 9 actors of 1 GPUs do not fit on 2 GPUs: .*; the cluster has not grown in 25 s"
    with (
        pytest.raises(UserError, match=problem),
        ray_session.ray_session(ActorsConfig(count=9, cpus=0.1, gpus=1, wait_seconds=25), False),
    ):
        pass
    said = re.findall(r"waiting for the cluster to grow, (.*): 9 actors of 1 GPUs", capsys.readouterr().err)
    assert said == ["10 of 25 s", "20 of 25 s"]
    assert ray.is_initialized()


WATCHED = {"autoscaler_report": {"node_type_mapping": {"ab": "node_ab", "cd": "node_cd"}}}  # as after `ray start`
GROWING = {"autoscaler_report": {"node_type_mapping": {"10.0.0.1": "head"}}}


@pytest.mark.parametrize(
    ("flag", "status", "gpus", "own", "waits"),
    [
        (b"0", WATCHED, 0, {}, False),
        (b"0", WATCHED, 0, {"wait_seconds": 600}, True),
        (b"0", WATCHED, 1, {}, True),  # another job's GPUs may come
        (b"0", GROWING, 0, {}, True),
        (b"0", {}, 0, {}, True),  # not yet reported
        (b"1", WATCHED, 0, {}, True),
    ],
)
def test_gpus_that_will_never_come_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, flag: bytes, status: dict[str, Any], gpus: int, own: dict[str, int], waits: bool
) -> None:
    values = {ray_session.GCS_AUTOSCALER_V2_ENABLED_KEY: flag, ray_session.DEBUG_AUTOSCALING_STATUS: json.dumps(status)}
    monkeypatch.setattr(ray_session, "_internal_kv_get", lambda key, **_: values[key])
    monkeypatch.setattr(ray_session, "_nodes", lambda: [{"CPU": 8.0, "GPU": gpus}])
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: False)
    monkeypatch.setattr(ray_session, "placement_group", lambda bundles: None)
    monkeypatch.setattr(ray_session, "remove_placement_group", lambda group: None)
    clock = Clock()
    monkeypatch.setattr(ray_session, "time", clock)
    began = clock.now
    with pytest.raises(UserError, match="has not grown" if waits else r"actors\.gpus: 0.*actors\.wait_seconds"):
        ray_session.wait_for_nodes(ActorsConfig(gpus=2, **own))
    assert (clock.now - began > 600) == waits


def test_a_machine_without_a_gpu_is_refused_before_ray_starts_and_without_advice_on_engines(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_session, "connected", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pq.write_table(pa.table({"prompt": ["alpha"]}), tmp_path / "in.parquet")
    gpu = {"model": {"device": "auto"}, "actors": {"gpus": 1}}
    done = invoke(tmp_path, job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **gpu))
    assert done.exit_code == 2 and "actors: 1 actors of 1 GPUs do not fit on 0 GPUs" in done.stderr
    assert "engine" not in caplog.text


def test_actors_that_have_a_process_but_have_not_reported_are_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_ray = "MapWorker(MapBatches(ShardGenerator))", "_StatsActor"  # Ray Data's own actors load no model
    named = {"a": (own, 7), "b": (own, 0), "c": (of_ray, 8)}
    handle, pending = Mock(), {key: {"ActorClassName": name, "Pid": pid} for key, (name, pid) in named.items()}
    monkeypatch.setattr(remote.ray, "get", lambda reference, timeout: handle.progress)
    monkeypatch.setattr(remote.ray, "get_runtime_context", lambda: Mock(**{"get_job_id.return_value": "01000000"}))
    monkeypatch.setattr(remote, "actors", lambda **filters: pending)
    for progress, loading in ((RunProgress(), 1), (RunProgress(loading=2), 2), (RunProgress(actors=1), 0)):
        handle.progress = progress
        assert remote.RemoteCoordinator(handle).read().loading == loading


def test_each_job_that_waits_asks_for_its_own_nodes(own_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one asks for stays when another asks, and when that one ends."""
    clock = Clock()
    monkeypatch.setattr(clock, "sleep", lambda seconds: time.sleep(0.1))
    monkeypatch.setattr(ray_session, "time", clock)

    def asked() -> list[list[float]]:
        groups = placement_group_table().values()
        return sorted(
            [bundle["GPU"] for bundle in group["bundles"].values()] for group in groups if group["state"] == "PENDING"
        )

    def wait(count: int, seconds: float) -> threading.Thread:
        def run() -> None:
            with pytest.raises(UserError, match="has not grown"):
                ray_session.wait_for_nodes(ActorsConfig(count=count, cpus=0.1, gpus=3, wait_seconds=seconds))

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    first = wait(2, 400.0)
    wait_until(lambda: asked() == [[3.0, 3.0]])
    second = wait(1, 100.0)
    wait_until(lambda: asked() == [[3.0], [3.0, 3.0]])
    clock.now += 200
    second.join()
    wait_until(lambda: asked() == [[3.0, 3.0]])
    clock.now += 300
    first.join()
    wait_until(lambda: asked() == [])


def test_log_levels_are_given_back_when_the_last_job_ends(own_ray: None) -> None:
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        with ray_session.connected(False):
            assert logger.level == logging.ERROR
            with ray_session.connected(False):
                pass
            assert logger.level == logging.ERROR, "another job still runs"
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


def processes(session: int) -> list[psutil.Process]:
    """The living processes of a session."""
    return [
        process
        for process in psutil.process_iter(["status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE and session_of(process.pid) == session
    ]


def session_of(process: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(process)
    return None


def test_a_ray_of_our_own_lives_in_a_session_of_its_own_and_ends_whole(no_ray: None) -> None:
    def stays_at_exit() -> int:
        """In a worker, which then waits for ever when it should end, signals or not; its session."""
        atexit.register(time.sleep, 10**6)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return os.getsid(0)

    with ray_session.connected(False):
        session = ray.get(ray.remote(num_cpus=0)(stays_at_exit).remote())
        names = {process.name() for process in processes(session)}
        assert ray.nodes()[0]["NodeManagerAddress"] == "127.0.0.1"
    assert session != os.getsid(0) and names >= {"gcs_server", "raylet"}
    assert not processes(session) and not ray.is_initialized()


def job_with_ray() -> subprocess.Popen[str]:
    """A process that starts a Ray, prints its address, and ends when it reads a line."""
    code = (
        "from pipeline.run import ray_session; import ray\n"
        "with ray_session.connected(False): print(ray.get_runtime_context().gcs_address, flush=True); input()"
    )
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-c", code], text=True, env={**os.environ, "RAY_ADDRESS": ""}, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_ray_that_dies_is_named(no_ray: None, victim: str) -> None:
    """Ray itself then ends the process: from C++, without a word."""
    job = job_with_ray()
    assert job.stdout is not None and job.stdout.readline()
    for process in psutil.Process(job.pid).children(recursive=True):
        if process.name() == victim:
            process.kill()
    err = job.communicate(timeout=HANGING_SECONDS)[1]
    assert job.returncode not in (0, None) and "the job's Ray has died: check this machine's memory" in err


def test_two_jobs_have_each_a_ray_of_its_own(no_ray: None) -> None:
    jobs = [job_with_ray() for _ in range(2)]
    addresses = {job.stdout.readline() for job in jobs if job.stdout is not None}
    sessions = [process.pid for job in jobs for process in psutil.Process(job.pid).children()]
    assert len(addresses) == 2 and len(sessions) == 2
    jobs[0].kill()
    assert jobs[1].communicate("\n", timeout=HANGING_SECONDS) and jobs[1].returncode == 0
    wait_until(lambda: not any(processes(session) for session in sessions), every=0.2)


def test_a_ray_that_does_not_start_says_why(no_ray: None, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", "/dev/null/none")
        with pytest.raises(ray.exceptions.RaySystemError, match=r"Ray did not start: .*/dev/null"):
            ray_session.connected(False).__enter__()
        patch.setenv("RAY_TMPDIR", str(tmp_path / ("long" * 20)))
        with pytest.raises(
            UserError, match="the path of this folder is too long for Ray's sockets; set RAY_TMPDIR=/tmp"
        ):
            ray_session.connected(False).__enter__()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("address", "says"),
    [("127.0.0.1:1", "nothing answers at 127.0.0.1:1"), ("http://127.0.0.1:8265", "is no Ray address; set HOST:6379")],
)
def test_an_address_without_a_ray_is_refused_at_once(
    no_ray: None, monkeypatch: pytest.MonkeyPatch, address: str, says: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"^RAY_ADDRESS: .*{says}"):
        ray_session.connected(False).__enter__()


def test_a_port_for_metrics_must_be_free_and_of_our_own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--metrics-port: {port} on 127.0.0.1 cannot be used"):
            ray_session.check_metrics_port(port)
    ray_session.check_metrics_port(port)
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: False)
    with pytest.raises(UserError, match="each node of a cluster has its own port"):
        ray_session.check_metrics_port(port)


LATE = "The current node timed out during startup."
STARTS = """
import json, runpy, subprocess, sys, types
errors, ray = json.loads(sys.argv.pop()), types.ModuleType("ray")
def init(**settings):
    subprocess.Popen(["sleep", "4321"])
    if errors:
        raise Exception(errors.pop(0))
ray.init, ray.shutdown = init, lambda: None
ray.get_runtime_context = lambda: types.SimpleNamespace(gcs_address="here")
sys.modules["ray"], sys.argv = ray, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([LATE], {"address": "here"}),
        (["no disk"], {"error": "no disk"}),
        ([LATE, "no disk"], {"error": f"{LATE} The second start: no disk"}),
    ],
)
def test_a_ray_that_starts_too_slowly_is_started_once_more(errors: list[str], told: dict[str, str]) -> None:
    """What the first start has left behind ends before the second one begins."""
    head = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(ray_session.HEAD), "{}", json.dumps(errors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert head.stdin and head.stdout
    assert json.loads(head.stdout.readline()) == told

    def left_alone() -> bool:
        left = 0
        for one in processes(head.pid):
            with suppress(psutil.Error):  # it ends at this moment
                left += one.cmdline() == ["sleep", "4321"]
        return left <= 1

    wait_until(left_alone)
    head.stdin.close()
    head.wait(HANGING_SECONDS)
    assert processes(head.pid) == []
