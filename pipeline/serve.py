"""`skipdecode serve`: one Ray Serve deployment with OpenAI's API, for trying a model; for traffic use vLLM's servers.

Each request is answered as a line of an OpenAI batch file. Requests that wait together are answered together.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pyarrow as pa
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from actors.engine.errors import UserError, flat
from actors.engine.schedule.schedule import Schedule
from actors.generator import Generator
from actors.openai_answers import error_body, response
from actors.openai_requests import ENDPOINTS
from actors.settings import EngineSettings
from pipeline.answer.settings import fetched
from pipeline.answer.stage import prompts
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.job import JobConfig
from pipeline.config.serve import ServeConfig
from pipeline.input.shards import Shard
from pipeline.plan.batching import plan_batching
from pipeline.plan.hardware import Hardware
from pipeline.plan.job import engine_settings
from pipeline.plan.memory import log_memory_estimate
from pipeline.prepare.prompt_spec import PromptSpec, check_generation, check_spec, prompt_spec
from pipeline.prepare.prompts import prepare_table
from pipeline.prepare.row_settings import BATCH_COLUMNS
from pipeline.run.ray_data import RayData
from pipeline.run.ray_session import actor_cpus, is_own_ray, ray_session
from pipeline.runtime.announce import announce, announced
from pipeline.runtime.signals import Interrupted, interruptible

NAME = "skipdecode"
MAX_REQUESTS = 1000  # maximum requests that the replica holds at the same time; further ones wait in Ray's proxy
WAIT_SECONDS = 0.02  # time for which a request waits for others to share its batch
READY_SECONDS = 300.0  # time limit for the server to answer after the model is loaded
QUIET: Any = {"enable_access_log": False, "log_level": "WARNING"}


@dataclass(frozen=True)
class PlannedServer:
    """A server whose model, schedule and memory have been checked. Does not hold weights."""

    name: str  # the model's name in answers
    job: JobConfig  # settings of a job whose rows are the requests
    spec: PromptSpec
    schedule: Schedule
    settings: EngineSettings  # checkpoint and adapter are sources for `fetch`


def plan_server(config: ServeConfig, hardware: Hardware) -> PlannedServer:
    """Check all that can be checked without weights; return the plan. Raises a one-line UserError for a mistake."""
    job = config.job()
    checkpoint = resolve_checkpoint(job.model, job.storage)
    schedule = checkpoint.schedule(job.schedule.changes(), job.model, unadapted=job.schedule.unadapted)
    spec = prompt_spec(job, checkpoint, time.time())
    check_generation(job, checkpoint)
    check_spec(spec)
    batching = plan_batching(job, checkpoint, 1, hardware)
    log_memory_estimate(job, checkpoint, batching, hardware)
    job = job.model_copy(update={"actors": job.actors.model_copy(update={"threads": batching.threads})})
    name = config.name or job.model.path.partition("@")[0].rstrip("/").rpartition("/")[2]
    return PlannedServer(name, job, spec, schedule, engine_settings(job, checkpoint, schedule, batching))


class Server:
    """The deployment. One thread loads and runs the model, so that /health answers while rows are in flight."""

    def __init__(self, planned: PlannedServer) -> None:
        self.planned, self.created, self.numbers = planned, int(time.time()), count()
        self.fingerprint = f"fp_{uuid.uuid4().hex[:10]}"
        self.thread = ThreadPoolExecutor(1, "generator")
        self.generator = self.thread.submit(lambda: Generator(fetched(planned.settings))).result()
        batch: Any = serve.batch  # its types allow only functions that a decorator sees
        self.batched = batch(self._batch, max_batch_size=planned.settings.max_batch, batch_wait_timeout_s=WAIT_SECONDS)

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        path, method = request.url.path, request.method
        if path == "/health":
            return PlainTextResponse("ok")
        if path == "/v1/models":
            shown = {"id": self.planned.name, "object": "model", "created": self.created, "owned_by": NAME}
            return JSONResponse({"object": "list", "data": [shown]})
        if path not in ENDPOINTS or method != "POST":
            status = 405 if path in ENDPOINTS else 404
            return JSONResponse(error_body(f"{method} {path}: not supported", status), status)
        try:
            text = (await request.body()).decode()
        except UnicodeDecodeError as error:
            return JSONResponse(error_body(f"body: not UTF-8: {error}", 400), 400)
        status, body = await self.batched((path, text))
        return JSONResponse(body, status)

    async def _batch(self, requests: list[tuple[str, str]]) -> list[tuple[int, dict[str, Any]]]:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.answers, requests)

    def answers(self, requests: Sequence[tuple[str, str]]) -> list[tuple[int, dict[str, Any]]]:
        """Return status and body of the response to each request (endpoint, body)."""
        lines = [("request", "POST", url, body) for url, body in requests]
        schema = pa.schema([(name, pa.string()) for name in BATCH_COLUMNS])
        table = pa.Table.from_pylist([dict(zip(BATCH_COLUMNS, line, strict=True)) for line in lines], schema)
        rows = prompts(prepare_table(table, self.planned.spec), Shard(0, "requests", 0, len(lines)))
        # equal requests with a seed get equal answers; without a seed, each request gets other random numbers
        rows = [replace(row, row=0 if "seed" in row.sampling else next(self.numbers)) for row in rows]
        samples: list[list[dict[str, Any]]] = [[] for _ in rows]
        for answer in self.generator.answer(rows):
            samples[answer.row].append(vars(answer))
        named: dict[str, Any] = {"created": self.created, "model": self.planned.name, "job": self.fingerprint}
        return [
            response(url, found, key=uuid.uuid4().hex[:24], **named)
            for (url, _), found in zip(requests, samples, strict=True)
        ]


def check_port(host: str, port: int) -> None:
    """Raise UserError if no server can listen on this address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {flat(error.strerror)}; change host or port") from None


def run_server(config: ServeConfig, *, verbose: bool) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises UserError if configuration, model or port is wrong; Interrupted if a signal comes before serving begins.
    """
    if not verbose:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
    host, port = config.host, config.port
    with interruptible():
        check_port(host, port)
        with announced("reading the checkpoint's description"):
            planned = plan_server(config, Hardware() if is_own_ray() else RayData(verbose=verbose))
        actors = planned.job.actors
        make: Any = serve.deployment(Server)
        deployment = make.options(
            ray_actor_options={"num_cpus": actor_cpus(actors), "num_gpus": actors.gpus},
            max_ongoing_requests=MAX_REQUESTS,
            logging_config=QUIET,
        )
        with ExitStack() as ending, ray_session(actors, verbose):
            if serve.status().applications.keys() - {NAME}:  # one of this name is left by a server that was killed
                raise UserError(
                    "RAY_ADDRESS: Ray Serve runs on this cluster already, and its applications would end with this "
                    "server: use another cluster"
                )
            announce("starting Ray Serve and loading the model")
            try:
                with suppress(ray.exceptions.GetTimeoutError):  # if the proxy starts late, `_wait_for_http` waits
                    serve.start(http_options={"host": host, "port": port}, logging_config=QUIET)
                serve.run(deployment.bind(planned), name=NAME, logging_config=QUIET)
                _wait_for_http(host, port)
                name = f"{config.model.path} as {planned.name!r}"
                announce(f"serving {name} at {planned.schedule.name} on http://{host}:{port}/v1 (Ctrl-C stops)")
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
