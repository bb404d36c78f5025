"""How much memory the values that a template has made take while they live."""

from __future__ import annotations

import sys
from typing import Any

SMALLEST = 256  # bytes; the seconds that a template has bound what is smaller
SWEEP = 2**26  # bytes that may come new between two looks at what has gone


def _references(values: dict[int, tuple[Any, int]], key: int) -> int:
    return sys.getrefcount(values[key][0])


_OURS = _references({0: (object(), 0)}, 0)  # those of a value that only `Held` knows


class Held:
    """A text that grows piece by piece is many values, of which one lives: only those that live count."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, int]] = {}  # id -> the value, which keeps the id its own; its bytes
        self._bytes = 0
        self._next_sweep = SWEEP

    def add(self, value: Any, size: int) -> int:
        """Bytes that live now, at most; a value that is known counts once."""
        if size >= SMALLEST and id(value) not in self._values:
            self._values[id(value)] = value, size
            self._bytes += size
            if self._bytes > self._next_sweep:
                self._sweep()
        return self._bytes

    def _sweep(self) -> None:
        """Forget what nobody else knows; the newest first, as what holds another value is newer."""
        for key in reversed(list(self._values)):
            if _references(self._values, key) <= _OURS:
                self._bytes -= self._values.pop(key)[1]
        self._next_sweep = self._bytes + SWEEP
