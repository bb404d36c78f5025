"""A Ray that this process starts listens on the loopback of this machine only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import ray_constants

VARIABLE = "SKIPDECODE_RAY_ON_LOOPBACK"  # set for a process that connects to such a Ray of another process
LOOPBACK: dict[str, Any] = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}


def loopback_environment(address: str) -> dict[str, str]:
    """Variables with which `skipdecode` in another process uses the Ray of this one. address: of its GCS."""
    return {"RAY_ADDRESS": address, **({VARIABLE: "1"} if address.startswith("127.0.0.1:") else {})}


def is_on_loopback(address: str) -> bool:
    """Whether the Ray at an address, "" for one to be started, listens on the loopback only."""
    return not address or VARIABLE in os.environ


@contextmanager
def on_loopback() -> Iterator[None]:
    """Put this around `ray.init(**LOOPBACK)`, or around `ray.init` that connects to such a Ray.

    Ray replaces 127.0.0.1 by an address that other machines reach, and then listens on all addresses, unless its
    platform has no clusters. It reads that from the environment when it is imported; hence the private constant.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
