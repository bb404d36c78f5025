"""The Ray of a job: given back as it was found, watched for its death, waited for no longer than allowed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from typing import Any

import psutil
import pytest
import ray
from ray.data import DataContext

from actors.engine.errors import UserError
from pipeline.config.job import ActorsConfig
from pipeline.runtime import liveness, ray_session
from pipeline.runtime.liveness import Endpoint, RayDied, watched
from pipeline.runtime.signals import interruptible


@pytest.fixture
def server() -> Any:
    """A port that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def endpoint(server: socket.socket, patience: float = 0.3) -> Endpoint:
    return Endpoint("GCS", "127.0.0.1", server.getsockname()[1], patience)


def test_a_process_of_rays_that_dies_ends_the_block_in_one_line(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)
    threading.Timer(0.5, server.close).start()
    began = time.monotonic()
    with pytest.raises(RayDied, match=r"^Ray's GCS at 127\.0\.0\.1:\d+ has died"), interruptible():
        wait(endpoint(server))
    assert 0.5 < time.monotonic() - began < 5


def wait(watched_endpoint: Endpoint) -> None:
    with watched([watched_endpoint]):
        for _ in range(900):
            time.sleep(0.01)


def test_an_error_of_rays_that_precedes_its_death_is_explained(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)
    gcs = endpoint(server)

    def fail() -> None:
        with watched([gcs]):
            server.close()
            raise ray.exceptions.RaySystemError("socket closed")

    with pytest.raises(RayDied), interruptible():
        fail()


def test_a_short_silence_is_no_death(server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "POLL_SECONDS", 0.1)
    silent = [False, True, True, False, False]
    monkeypatch.setattr(Endpoint, "accepts", lambda self: not (silent and silent.pop()))
    with interruptible(), watched([endpoint(server, 1.0)]):
        time.sleep(1.0)


def test_an_error_of_the_job_is_not_taken_for_rays_death(server: socket.socket) -> None:
    def fail() -> None:
        with watched([endpoint(server)]):
            raise ray.exceptions.RaySystemError("a task failed")

    with pytest.raises(ray.exceptions.RaySystemError), interruptible():
        fail()


def test_a_cluster_that_does_not_grow_is_refused_after_a_while(
    own_ray: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_session, "WAIT_LINE_SECONDS", 0.2)
    monkeypatch.setattr(ray_session, "WAIT_POLL_SECONDS", 0.1)
    problem = r"actors: 9 actors of 1 GPUs do not fit on 2 GPUs: .*; the cluster has not grown in 0\.5 s"
    with (
        pytest.raises(UserError, match=problem),
        ray_session.ray_session(ActorsConfig(count=9, cpus=0.1, gpus=1, wait_seconds=0.5), False),
    ):
        pass
    assert "waiting for the cluster to grow, 0 of 0.5 s: 9 actors of 1 GPUs" in capsys.readouterr().err
    assert ray.is_initialized()


def test_the_callers_settings_are_given_back(own_ray: None) -> None:
    context, logger = DataContext.get_current(), logging.getLogger("ray")
    handlers = {handler: handler.level for handler in logging.getLogger("ray.data").handlers}
    before = (logger.level, handlers, signal.getsignal(signal.SIGTERM))
    kept = context.execution_no_progress_timeout_s, context.raise_original_map_exception, context.enable_progress_bars
    logger.setLevel(logging.DEBUG)
    try:
        with ray_session.connected(False):
            assert logger.level == logging.ERROR
            with ray_session.connected(False):
                pass
            assert logger.level == logging.ERROR, "another job still runs"
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before[0])
    after = {handler: handler.level for handler in logging.getLogger("ray.data").handlers}
    assert (logger.level, after, signal.getsignal(signal.SIGTERM)) == before
    assert DataContext.get_current() is context
    assert kept == (
        context.execution_no_progress_timeout_s,
        context.raise_original_map_exception,
        context.enable_progress_bars,
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_a_killed_ray_ends_the_job_and_leaves_the_process_alive(ray_to_be_left: None, victim: str) -> None:
    ray.shutdown()

    def run() -> None:
        with ray_session.connected(False):
            for process in psutil.Process(os.getpid()).children():
                if process.name() == victim:
                    process.kill()
            for _ in range(3000):
                time.sleep(0.01)

    name = {"gcs_server": "GCS", "raylet": "raylet"}[victim]
    with pytest.raises(RayDied, match=f"^Ray's {name} at "), interruptible():
        run()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "error", [ConnectionError("Failed to connect"), ray.exceptions.AuthenticationError("no token")]
)
def test_a_cluster_that_refuses_this_client_is_named_with_the_remedy(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    shown = str(ray_session._start_error(error, address))
    assert shown.startswith(f"Ray at {address} runs but refuses this client") and "RAY_AUTH_MODE=token" in shown
    server.close()
    gone = ConnectionError("Failed to connect")
    assert ray_session._start_error(gone, address) is gone


def test_a_port_for_metrics_must_be_free_and_of_our_own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--metrics-port: {port} on 127.0.0.1 cannot be used"):
            ray_session.check_metrics_port(port)
    ray_session.check_metrics_port(port)
    monkeypatch.setattr(ray_session, "is_own_ray", lambda: False)
    with pytest.raises(UserError, match="the nodes of a cluster have ports of their own"):
        ray_session.check_metrics_port(port)
