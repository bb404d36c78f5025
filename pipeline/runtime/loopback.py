"""A Ray that we start for one job listens on this machine's loopback and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import ray_constants

LOOPBACK: dict[str, Any] = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}


@contextmanager
def on_loopback() -> Iterator[None]:
    """Around `ray.init(**LOOPBACK)`.

    Ray puts the address that other machines reach in place of 127.0.0.1, and then listens on all addresses, unless
    it takes this for a platform without clusters; it reads that from the environment only as it is imported.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
