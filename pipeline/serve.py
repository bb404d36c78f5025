"""`skipdecode serve`: plans a server, builds its Ray Serve application, and runs it until a signal comes.

Config files of Ray Serve and RayService use `build`: `import_path: pipeline.serve:build`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any
from urllib.request import ProxyHandler, build_opener

import ray
from ray import serve
from ray.serve import Application

from actors.engine.errors import UserError, flat
from actors.engine.machine import process_memory
from actors.engine.schedule.schedule import Schedule
from actors.server import Server
from actors.serving.http import Limits
from actors.serving.model import ServedModel
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.input import InputConfig
from pipeline.config.job import JobConfig, OutputConfig
from pipeline.config.load import load_config
from pipeline.config.serve import HttpConfig, ServeConfig
from pipeline.estimate import name_of
from pipeline.generate.settings import fetched, generator_settings
from pipeline.plan.batching import plan_batching
from pipeline.plan.hardware import Hardware
from pipeline.plan.memory import actor_need, check_fits, describe
from pipeline.prepare.chat import Chat, read_messages, render_chat
from pipeline.prepare.prompt_spec import marks_of_thinking
from pipeline.run.ray_data import RayData
from pipeline.run.ray_session import actor_cpus, is_own_ray, ray_session
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.signals import Interrupted, interruptible

MAX_WAITING = 256  # maximum answers that wait in the queue; further requests get status 429
NAME = "skipdecode"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
READY_SECONDS = 300.0  # time limit for the server to answer after the model is loaded
GRACE_SECONDS = 20  # seconds that requests in flight have to finish when a replica stops
# makes Ray Serve run requests in a replica's main event loop, so that no messages pass between threads
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
QUIET: Any = {"enable_access_log": False, "log_level": "WARNING"}


@dataclass(frozen=True)
class PlannedServer:
    """A server whose model, schedule, memory and API key have been checked. Does not hold weights or the API key."""

    config: ServeConfig  # configuration with the number of threads filled in
    generator: dict[str, Any]  # arguments of `Generator`, with a pinned checkpoint
    limits: Limits
    schedule: Schedule  # schedule for requests that name no speed
    described: str  # one line that shows parameters and memory

    def load(self) -> ServedModel:
        """Fetch the checkpoint to this node, compare it with the plan, and load the model."""
        return ServedModel(self.config.served_name, fetched(self.generator), render, MAX_WAITING)


def plan_server(config: ServeConfig, *, on_this_machine: bool, hardware: Hardware | None = None) -> PlannedServer:
    """Check all that can be checked without weights; return the plan. Raises a one-line UserError for a mistake.

    on_this_machine: whether the replicas must fit into this machine's memory.
    hardware: hardware to plan for; None: that of this process.
    """
    limits = Limits(config.http.timeout_seconds, key_sha256=key_digest(config.http))
    checkpoint = resolve_checkpoint(config.model, config.storage)
    schedule = checkpoint.schedule(config.schedule.changes(), config.model, unadapted=config.schedule.unadapted)
    job = JobConfig.model_validate(
        {
            "input": InputConfig(path=["unused"]),
            "output": OutputConfig(path="unused"),
            "model": config.model,
            "sampling": config.sampling.model_dump(),
            "reasoning": config.reasoning,
            "actors": config.replicas,
            "storage": config.storage,
        }
    )
    batching = plan_batching(job, checkpoint, 1, hardware)
    generator = {
        **generator_settings(config.model, config.sampling, None),
        "checkpoint": checkpoint.pinned(),
        "speed_adapter": None if schedule.is_full_depth else checkpoint.pinned_adapter(),
        "schedule": config.schedule.changes(),
        "unadapted": config.schedule.unadapted,
        "reasoning": marks_of_thinking(job, checkpoint),
        "threads": batching.threads,
        "cache_bytes": batching.cache_bytes,
        "max_batch": batching.max_batch,
    }
    if "seed" in config.sampling.model_fields_set:  # without a seed, requests get random ones
        generator["sampling"]["seed"] = config.sampling.seed
    replicas = config.replicas.model_copy(update={"threads": batching.threads})
    need = actor_need(config.model, replicas, checkpoint, batching)
    if on_this_machine:
        check_fits(need, config.model, replicas, process_memory())
    config = config.model_copy(update={"replicas": replicas})
    return PlannedServer(config, generator, limits, schedule, describe(need, config.model.dtype, replicas))


def key_digest(http: HttpConfig) -> str | None:
    """Return the API key's SHA-256; None without a key. Raises UserError if the key's environment variable is empty."""
    if http.api_key_env is None:
        return None
    key = os.environ.get(http.api_key_env, "").strip()
    if not key:
        raise UserError(f"http.api_key_env: the environment variable {http.api_key_env} is empty; set it to the key")
    return hashlib.sha256(key.encode()).hexdigest()


def check_port(http: HttpConfig) -> None:
    """Raise UserError if no server can listen on this address."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((http.host, http.port))
        except OSError as error:
            where = f"{http.host}:{http.port}"
            raise UserError(f"http: cannot listen on {where}: {flat(error.strerror)}; change host or port") from None


def render(tokenizer: Any, messages: Any) -> tuple[str, int]:
    """Render a chat as a job does. Return the prompt and the number of its control tokens (see `ControlTokens.prompt`).

    Raises UserError if messages are wrong, or if the chat template refuses them.
    """
    if tokenizer.chat_template is None:
        raise UserError("this model has no chat template; use /v1/completions")
    return render_chat(tokenizer, Chat(now=time.time()), read_messages(messages))


def build(args: dict[str, str]) -> Application:
    """Return the Ray Serve application for a server's configuration file. args: {"config": path of the file}."""
    config = load_config(ServeConfig, args["config"])
    return application(plan_server(config, on_this_machine=False, hardware=RayData()))


def application(planned: PlannedServer) -> Application:
    """Return the Ray Serve application of a planned server."""
    replicas, max_batch = planned.config.replicas, planned.generator["max_batch"]
    scaling: dict[str, Any] = {"num_replicas": replicas.count or 1}
    if replicas.max is not None:
        target = max(1, max_batch // 2)  # if replicas have more requests than this, another one starts
        limits = {"min_replicas": replicas.min, "max_replicas": replicas.max, "target_ongoing_requests": target}
        scaling = {"num_replicas": None, "autoscaling_config": limits}
    server = Server.options(  # type: ignore[attr-defined]
        **scaling,
        ray_actor_options={
            "num_cpus": actor_cpus(replicas),
            "num_gpus": replicas.gpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        # above the limit of the replica's own queue: that one must refuse first, because it sends Retry-After
        max_ongoing_requests=2 * (max_batch + MAX_WAITING),
        max_queued_requests=MAX_WAITING,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=GRACE_SECONDS,
        logging_config=QUIET,
    )
    return server.bind(planned.load, planned.limits)  # type: ignore[no-any-return]


def run_server(config: ServeConfig, *, verbose: bool) -> None:
    """Serve until SIGTERM or SIGINT. Requests in flight then have `GRACE_SECONDS` to finish.

    Raises UserError if configuration, model or port is wrong; Interrupted if a signal comes before serving begins.
    """
    if not verbose:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with interruptible():
        check_port(config.http)
        cluster = None if is_own_ray() else RayData(verbose=verbose)  # whose nodes are not like this machine
        with announced("reading the checkpoint's description"):
            planned = plan_server(config, on_this_machine=cluster is None, hardware=cluster)
        host, port = config.http.host, config.http.port
        if host not in LOOPBACK and config.http.api_key_env is None:
            announce(
                f"{host}: other machines can send requests without an API key; set http.api_key_env to require a key"
            )
        announce(planned.described)
        with ExitStack() as ending, ray_session(planned.config.replicas, verbose):
            if serve.status().applications.keys() - {NAME}:  # one of this name is left by a server that was killed
                raise UserError(
                    "RAY_ADDRESS: Ray Serve runs on this cluster already, and its applications would end with this "
                    "server: deploy pipeline.serve:build there, or use another cluster"
                )
            announce("starting Ray Serve and loading the model")
            try:
                with suppress(ray.exceptions.GetTimeoutError):  # if the proxy starts late, `_wait_for_http` waits
                    serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
                serve.run(application(planned), name=NAME, logging_config=QUIET)
                _wait_for_http(host, port)
                name = f"{config.model.path} as {config.served_name!r}"
                announce(f"serving {name} at {name_of(planned.schedule)} on http://{host}:{port}/v1 (Ctrl-C stops)")
                with suppress(Interrupted):
                    while ray.is_initialized():
                        time.sleep(1)
                announce("stopping")
            finally:
                if not verbose:  # Ray prints that the call which ends its controller has failed
                    ending.enter_context(redirect_stdout(None))
                serve.shutdown()


def _wait_for_http(host: str, port: int) -> None:
    """Wait until the server answers. Raises RuntimeError if it does not answer within `READY_SECONDS`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/health"
    deadline = time.monotonic() + READY_SECONDS
    opener = build_opener(ProxyHandler({}))  # a proxy that the environment names may not reach this machine
    while True:
        try:
            with opener.open(url, timeout=10):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url} does not answer after {READY_SECONDS:g} s: {flat(error)}") from None
        time.sleep(0.2)
