"""A clock that the test moves, in place of the module `time` in a module of the product."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Clock:
    """Stands still but for `sleep`, which moves it and calls `in_sleep`, and for what the test adds to `now`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.in_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    time = perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.in_sleep()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
