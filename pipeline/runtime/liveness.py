"""Ends a job in one line when the Ray under it dies.

Ray itself would end this process from C++, which runs no cleanup: without its GCS after 60 s of silent retries, without
the raylet of this node after some seconds. A thread therefore connects to both of them once a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray

from pipeline.runtime.signals import Interrupted, interrupter

POLL_SECONDS = 1.0
CONNECT_SECONDS = 5.0
PATIENCE = 3.0  # without a connection, after which a process counts as dead
CLUSTER_GCS_PATIENCE = 45.0  # the GCS of a cluster may restart; Ray's own patience ends after 60 s


class RayDied(RuntimeError):
    """The Ray under the job has died; the message says which of its processes."""


@dataclass(frozen=True)
class Endpoint:
    """A process of Ray that accepts TCP connections. patience: seconds without one until it counts as dead."""

    name: str
    host: str
    port: int
    patience: float

    def accepts(self) -> bool:
        try:
            socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS).close()
        except OSError:
            return False
        return True


def endpoints(*, own: bool) -> list[Endpoint]:
    """The GCS, and the raylet of the node that this process is connected to. own: a Ray that ends with this process."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    gcs = Endpoint("GCS", host.strip("[]"), int(port), PATIENCE if own else CLUSTER_GCS_PATIENCE)
    nodes = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return [gcs, *(Endpoint("raylet", node["NodeManagerAddress"], node["NodeManagerPort"], PATIENCE) for node in nodes)]


@contextmanager
def watched(watched_endpoints: list[Endpoint]) -> Iterator[None]:
    """Raises RayDied in this thread, inside of `interruptible`, when an endpoint dies during the block."""
    watch = _Watch(watched_endpoints)
    watch.start()
    try:
        yield
    except (Interrupted, ray.exceptions.RayError):
        with suppress(Interrupted):  # from the watch
            watch.wait_for_verdict()
        if watch.dead:
            raise RayDied(watch.dead) from None
        raise
    finally:
        watch.stop()


class _Watch:
    def __init__(self, watched_endpoints: list[Endpoint]) -> None:
        self.endpoints = watched_endpoints
        self.dead = ""  # what has died, as a sentence
        self._interrupt = interrupter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for_verdict(self) -> None:
        """While an endpoint is silent, wait until it counts as dead: an error of Ray's may precede that."""
        end = time.monotonic() + 2 * PATIENCE
        while not self.dead and time.monotonic() < end and not all(each.accepts() for each in self.endpoints):
            time.sleep(POLL_SECONDS / 5)

    def _run(self) -> None:
        silent: dict[str, float] = {}  # endpoint -> since when, monotonic clock
        while not self._stop.wait(POLL_SECONDS):
            for endpoint in self.endpoints:
                if endpoint.accepts():
                    silent.pop(endpoint.name, None)
                elif time.monotonic() - silent.setdefault(endpoint.name, time.monotonic()) >= endpoint.patience:
                    at = f"{endpoint.host}:{endpoint.port}"
                    self.dead = (
                        f"Ray's {endpoint.name} at {at} has died: see the memory and the kernel's log of its machine"
                    )
                    self._interrupt()
                    return
