"""Gives worker processes access to Ray: calls to the coordinator, ids of the actor and node, export of metrics."""

from __future__ import annotations

import socket
import string
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from urllib.parse import quote

import ray
from ray._private.state import actors
from ray.util.metrics import Counter, Gauge

from pipeline import metrics
from pipeline.answer.coordinator import Coordinator, RunProgress
from pipeline.answer.stage import Worker
from pipeline.metrics import METRICS

PREFIX = "skipdecode_"  # prefix of metric names; Ray adds ray_ before it, and _total after a counter's name
ANSWER_SECONDS = 5.0  # time limit for the coordinator to answer the driver


def ray_sink(output: str) -> metrics.Sink:
    """Return a sink that exports metrics through Ray. output: the job's output folder, which labels all metrics."""
    label = quote(output, safe=string.printable)  # Ray refuses labels that are not ASCII

    def sink(name: str, amount: float, part: metrics.Part | None) -> None:
        tags = {"output": label, **({} if part is None else {"part": part})}
        if METRICS[name].kind == "counter":
            _metric(name).inc(amount, tags=tags)
        else:
            _metric(name).set(amount, tags=tags)

    return sink


@cache
def _metric(name: str) -> Any:
    kind = Counter if METRICS[name].kind == "counter" else Gauge
    labels = ("output", "part") if name == "seconds" else ("output",)
    return kind(f"{PREFIX}{name}", description=METRICS[name].text, tag_keys=labels)


class RemoteCoordinator:
    """Calls methods of the `Coordinator` actor, from any process of the run."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the actor, which may raise RayError. The driver's methods raise TimeoutError after 5 s."""
        if name not in vars(Coordinator):
            raise AttributeError(name)
        seconds = ANSWER_SECONDS if name in ("stop", "working") else None
        return lambda *arguments: ray.get(getattr(self.handle, name).remote(*arguments), timeout=seconds)

    def read(self) -> RunProgress:
        """Return the progress of the run. Before the first report of an actor, count actors with a process as loading.

        Such an actor holds its CPUs while it imports libraries, which may take a minute.
        """
        run: RunProgress = ray.get(self.handle.read.remote(), timeout=ANSWER_SECONDS)
        if run.loading or run.actors:
            return run
        job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
        starting = actors(job_id=job, actor_state_name="PENDING_CREATION").values()
        own = (one for one in starting if one["ActorClassName"].startswith("MapWorker("))  # Ray Data starts others too
        return replace(run, loading=sum(bool(one["Pid"]) for one in own))


class RayWorker(Worker):
    """A worker process of Ray. output: the job's output folder, which labels the process's metrics."""

    owns_process = True

    def __init__(self, output: str) -> None:
        self.output = output

    def actor(self) -> str | None:
        return ray.get_runtime_context().get_actor_id()

    def node(self) -> str:
        """Return the host name and the start of the Ray node's id, because nodes may share a host name."""
        return f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()[:8]}"

    def attempt(self) -> int:
        """Return 1 before a restart of the actor, and 2 after one or more restarts, because Ray does not count them."""
        return 1 + int(ray.get_runtime_context().was_current_actor_reconstructed)

    def export_metrics(self) -> None:
        metrics.install(ray_sink(self.output))
