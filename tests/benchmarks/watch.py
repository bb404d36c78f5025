"""What a run asks of its driver and of Ray's object store, looked at once a second from a thread of the driver."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import psutil
import ray
from ray._private.internal_api import get_memory_info_reply
from ray._private.state import GlobalState
from ray.data._internal.execution.streaming_executor import StreamingExecutor

SECONDS = 1.0
MIB = 2**20
KINDS = {"raylet": "raylet", "gcs_server": "gcs"}


@dataclass
class Sample:
    """At `at` (s since 1970): bytes of the driver, of the store in use and spilled; CPU seconds so far by kind."""

    at: float
    driver: int
    store: int
    spilled: int
    cpu: dict[str, float] = field(default_factory=dict)


class Watch:
    """Samples from entering to leaving, and the tasks of every Ray Data stage that ended meanwhile."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.tasks: dict[str, int] = {}
        self.store_size = 0
        self._cpu: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._shutdown = StreamingExecutor.shutdown

    def __enter__(self) -> Watch:
        shutdown, tasks = self._shutdown, self.tasks

        def counted(executor: Any, *rest: Any, **more: Any) -> None:
            for operator in executor._topology or ():
                tasks[operator.name] = operator.metrics.num_tasks_submitted
            shutdown(executor, *rest, **more)

        StreamingExecutor.shutdown = counted
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        StreamingExecutor.shutdown = self._shutdown
        self._stop.set()
        self._thread.join()

    def between(self, first: float, last: float) -> dict[str, Any]:
        """Figures of the time from `first` to `last`, s since 1970; MiB and CPU seconds."""
        inside = [one for one in self.samples if first - SECONDS <= one.at <= last + SECONDS]
        assert inside, "the job ended before it was looked at: take more rows"
        quarters = [inside[min(len(inside) - 1, len(inside) * part // 4)].driver for part in range(5)]
        return {
            "driver_mib_start": round(self.samples[0].driver / MIB),
            "driver_mib_by_quarter": [round(one / MIB) for one in quarters],
            "driver_mib_peak": round(max(one.driver for one in self.samples) / MIB),
            "store_mib_size": round(self.store_size / MIB),
            "store_mib_peak": round(max(one.store for one in self.samples) / MIB, 1),
            "spilled_mib": round(max(one.spilled for one in self.samples) / MIB, 1),
            "cpu_seconds": {
                kind: round(inside[-1].cpu[kind] - inside[0].cpu.get(kind, 0.0), 1) for kind in inside[-1].cpu
            },
            "tasks": self.tasks,
        }

    def _look(self) -> None:
        while not self._stop.wait(SECONDS):
            store, spilled = self._store()
            self.samples.append(Sample(time.time(), psutil.Process().memory_info().rss, store, spilled, self._spent()))

    def _store(self) -> tuple[int, int]:
        if not ray.is_initialized():
            return 0, 0
        state: GlobalState = ray._private.state.state
        try:
            stats = get_memory_info_reply(state).store_stats
        except (grpc.RpcError, ray.exceptions.RayError, AssertionError, ValueError):
            return 0, 0  # Ray is on its way up or down
        self.store_size = max(self.store_size, stats.object_store_bytes_avail)
        return stats.object_store_bytes_used, stats.spilled_bytes_total

    def _spent(self) -> dict[str, float]:
        """CPU seconds of the driver and of all its descendants, those that have ended too."""
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                kind = "driver" if process.pid == psutil.Process().pid else KINDS.get(process.name(), "workers")
                self._cpu[kind, process.pid] = sum(process.cpu_times()[:2])
            except psutil.Error:
                continue
        spent: dict[str, float] = {}
        for (kind, _), seconds in self._cpu.items():
            spent[kind] = spent.get(kind, 0.0) + seconds
        return spent
