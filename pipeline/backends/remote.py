"""What stages see of Ray in a worker process: the run's coordinator, and the process itself."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import ray

from pipeline.generate.coordinator import RunProgress
from pipeline.runtime.ray_metrics import export

Result = TypeVar("Result")
ANSWER_SECONDS = 5.0  # in which the driver expects the coordinator to answer


class RemoteCoordinator:
    """A handle to the `Coordinator` actor, in any process of the run."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def loading(self, actor: str | None) -> int:
        """See `RunCoordinator`, also for the methods below."""
        loads: int = ray.get(self.handle.loading.remote(actor))
        return loads

    def downloading(self, actor: str | None, line: str) -> None:
        self.handle.downloading.remote(actor, line)

    def loaded(self, actor: str | None) -> None:
        self.handle.loaded.remote(actor)

    def begin(self, shard: int) -> bool:
        begins: bool = ray.get(self.handle.begin.remote(shard))
        return begins

    def ended(self, shard: int, first: bool, rows: int, errors: int, tokens: int) -> None:
        self.handle.ended.remote(shard, first, rows, errors, tokens)

    def stop(self) -> set[int]:
        """Empty if the coordinator does not answer."""
        return self._shards(self.handle.stop)

    def working(self) -> set[int]:
        """Empty if the coordinator does not answer."""
        return self._shards(self.handle.working)

    def read(self) -> RunProgress:
        """Raises RayError or TimeoutError."""
        progress: RunProgress = ray.get(self.handle.read.remote(), timeout=ANSWER_SECONDS)
        return progress

    def _shards(self, method: Any) -> set[int]:
        try:
            shards: set[int] = ray.get(method.remote(), timeout=ANSWER_SECONDS)
        except (ray.exceptions.RayError, TimeoutError):
            return set()
        return shards


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
