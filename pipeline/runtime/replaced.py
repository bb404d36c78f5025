"""Attributes of libraries replaced for a block; see the table of private interfaces in pipeline/README.md."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Replacement = tuple[Any, str, Any]  # owner, name of its attribute, what replaces it


class Replaced:
    """Attributes that are replaced while any thread is in its block. make: called when the first one enters."""

    def __init__(self, make: Callable[[], list[Replacement]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._before: list[Replacement] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for owner, name, value in self._make():
                    self._before.append((owner, name, vars(owner)[name]))
                    setattr(owner, name, value)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    while self._before:
                        setattr(*self._before.pop())
