"""What a worker process sees of Ray: the run's coordinator, the process itself, and metrics, named ray_skipdecode_*."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import ray
from ray.util.metrics import Counter, Gauge

from pipeline import metrics
from pipeline.generate.coordinator import Coordinator
from pipeline.metrics import METRICS, OUTPUT

PREFIX = "skipdecode_"  # Ray adds ray_ before it, and _total after a counter


class RayMetrics:
    """See `metrics.Sink`. output: the label of all metrics, the job's output folder."""

    def __init__(self, output: str) -> None:
        self.labels = {OUTPUT: output}

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """See `metrics.Sink`."""
        _metric(name).inc(amount, tags=self.labels | labels)

    def set(self, name: str, value: float) -> None:
        """See `metrics.Sink`."""
        _metric(name).set(value, tags=self.labels)


def export(output: str) -> None:
    """Export the metrics of this worker process, which works for the job of that output folder."""
    metrics.install(RayMetrics(output))


@cache
def _metric(name: str) -> Any:
    metric = METRICS[name]
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(f"{PREFIX}{name}", description=metric.text, tag_keys=(OUTPUT, *metric.labels))


Result = TypeVar("Result")
ANSWER_SECONDS = 5.0  # in which the driver expects the coordinator to answer


class RemoteCoordinator:
    """Call the methods of the `Coordinator` actor from any process of the run."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the actor. Those that the driver calls raise RayError or TimeoutError."""
        if name not in vars(Coordinator):
            raise AttributeError(name)
        seconds = ANSWER_SECONDS if name in ("stop", "working", "read") else None
        return lambda *arguments: ray.get(getattr(self.handle, name).remote(*arguments), timeout=seconds)


class RayWorker:
    """A process of Ray's; see `Worker`. output: the job's output folder, the label of its metrics."""

    owns_process = True

    def __init__(self, output: str) -> None:
        self.output = output

    def actor(self) -> str | None:
        actor: str | None = ray.get_runtime_context().get_actor_id()
        return actor

    def node(self) -> str:
        """Host and the beginning of the Ray node's id: containers and local nodes share host names."""
        return f"{socket.gethostname()} {ray.get_runtime_context().get_node_id()[:8]}"

    def attempt(self) -> int:
        """Ray counts no attempts of a task, only whether its actor was restarted."""
        return 1 + int(ray.get_runtime_context().was_current_actor_reconstructed)

    def export_metrics(self) -> None:
        """Metrics go to Ray."""
        export(self.output)


def exporting(function: Callable[..., Any], output: str) -> Callable[..., Any]:
    """A stage's function, which exports the metrics of the job of that output folder from its worker process.

    It keeps its name, by which Ray shows the stage.
    """

    def call(batch: Any, **arguments: Any) -> Any:
        export(output)
        return function(batch, **arguments)

    call.__name__ = function.__name__
    return call
