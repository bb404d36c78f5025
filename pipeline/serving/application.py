"""The Ray Serve application of a server, and the command that runs it until a signal comes.

`build` is for `serve build` files and RayService: `import_path: pipeline.serving.application:build`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from actors.engine.errors import flat
from actors.server import Server
from pipeline.backends.ray_data import RayData
from pipeline.config.load import load_config
from pipeline.config.serve import ReplicasConfig, ServeConfig
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.ray_session import actor_cpus, ray_session
from pipeline.runtime.signals import Interrupted, interruptible
from pipeline.serving.chat import render
from pipeline.serving.plan import LOOPBACK, PlannedServer, check_port, plan_server

NAME = "skipdecode"
READY_SECONDS = 300.0  # to listen once the model is loaded
GRACE_SECONDS = 20  # for requests in flight when a replica stops
SHUTDOWN_SECONDS = 30.0  # for all of Ray Serve to stop
# the replica's requests run in its first event loop, without a change of threads for each message; read by Ray Serve
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
QUIET: Any = {"enable_access_log": False, "log_level": "WARNING"}


def build(args: dict[str, str]) -> Application:
    """The application of a file. args: {"config": path of the file}."""
    config = load_config(ServeConfig, args["config"])
    return application(plan_server(config, on_this_machine=False, hardware=RayData()))


def application(planned: PlannedServer) -> Application:
    """Return the application of a planned server."""
    replicas = planned.config.replicas
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": actor_cpus(replicas.as_actors()),
            "num_gpus": replicas.gpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        # a replica's own queue refuses what is too much, with a time to come again
        "max_ongoing_requests": 2 * (replicas.max_batch + replicas.max_waiting),
        "max_queued_requests": replicas.max_waiting,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": GRACE_SECONDS,
        "logging_config": QUIET,
        **_scaling(replicas),
    }
    server = Server.options(**options)  # type: ignore[attr-defined]
    bound = server.bind(planned.settings, planned.limits, render)
    return bound  # type: ignore[no-any-return]


def _scaling(replicas: ReplicasConfig) -> dict[str, Any]:
    if replicas.max is None:
        return {"num_replicas": replicas.count or 1}
    target = replicas.target_requests or max(1, replicas.max_batch // 2)
    return {
        "num_replicas": None,
        "autoscaling_config": {
            "min_replicas": replicas.min,
            "max_replicas": replicas.max,
            "target_ongoing_requests": target,
        },
    }


def run_server(config: ServeConfig, *, verbose: bool) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight then get `GRACE_SECONDS`.

    Raises:
        UserError: Configuration, model or port do not fit.
        Interrupted: A signal before the server was ready.
    """
    if not verbose:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with interruptible():
        check_port(config.http)
        with announced("reading the checkpoint's description"):
            planned = plan_server(config, on_this_machine=True)
        http, url = config.http, f"http://{config.http.host}:{config.http.port}"
        if http.host not in LOOPBACK and http.api_key_env is None:
            announce(
                f"{http.host}: others than this machine can send requests, without a key; http.api_key_env asks for one"
            )
        announce(planned.described)
        with ray_session(planned.config.replicas.as_actors(), verbose):
            announce("starting Ray Serve and loading the model")
            with _ray_serve(http.host, http.port):
                serve.run(application(planned), name=NAME, logging_config=QUIET)
                _wait_for_http(f"{url}/health")
                speed = planned.schedule.speedup or 1
                announce(f"serving {config.served_name} at {speed:g}x on {url}/v1 (Ctrl-C stops)")
                _wait()


@contextmanager
def _ray_serve(host: str, port: int) -> Iterator[None]:
    """Run Ray Serve for the block; its proxies listen on host and port."""
    controller: Any = None
    try:
        with suppress(ray.exceptions.GetTimeoutError):  # a busy machine: the proxy is waited for later
            serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        yield
    finally:
        if controller is None:
            serve.shutdown()
        else:
            _end(controller)


def _end(controller: Any) -> None:
    """As `serve.shutdown`, where Ray repeats the call and reports it failed: the controller ends without an answer."""
    stopped = controller.graceful_shutdown.options(max_task_retries=0).remote()
    try:
        ray.get(stopped, timeout=SHUTDOWN_SECONDS)
    except ray.exceptions.RayActorError:
        pass  # it has ended
    except ray.exceptions.GetTimeoutError:
        announce(f"Ray Serve did not stop within {SHUTDOWN_SECONDS:g} s")


def _wait_for_http(url: str) -> None:
    """Until the server answers there. Raises RuntimeError after `READY_SECONDS`."""
    host = urlsplit(url).hostname
    if host in ("0.0.0.0", "::"):
        url = url.replace(f"//{host}", "//127.0.0.1" if host == "0.0.0.0" else "//[::1]")
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            with urlopen(url, timeout=10) as reply:
                if reply.status == 200:
                    return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer after {READY_SECONDS:g} s: {flat(error)}") from None
        time.sleep(0.2)


def _wait() -> None:
    """Until a signal comes."""
    try:
        while ray.is_initialized():
            time.sleep(1)
    except Interrupted:
        announce("stopping")
