"""A Ray that this process starts listens on the loopback of this machine only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import ray_constants

LOOPBACK: dict[str, Any] = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}


@contextmanager
def on_loopback() -> Iterator[None]:
    """Put this around `ray.init(**LOOPBACK)`.

    Ray replaces 127.0.0.1 by an address that other machines reach, and then listens on all addresses, unless its
    platform has no clusters. It reads that from the environment when it is imported; hence the private constant.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
