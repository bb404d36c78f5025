"""Progress lines of tune, evaluate and adapt, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

INTERVAL = 10.0  # seconds between two lines of a `RowProgress`


def announce(text: str) -> None:
    """Print the stage that begins."""
    print(text, file=sys.stderr, flush=True)


def announce_checks(text: str) -> None:
    """Print, on a terminal only, that a command checks its input; elsewhere a refusal is its only line."""
    if sys.stderr.isatty():
        announce(text)


class Timer:
    """Limits progress lines to one every `INTERVAL` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether `INTERVAL` has passed since the start, or since the last time that it had."""
        now = time.monotonic()
        due = now - self._last >= INTERVAL
        if due:
            self._last = now
        return due


class RowProgress:
    """Announces how many rows are done.

    Args:
        stage: name of the work.
        rows: their number.
    """

    def __init__(self, stage: str, rows: int) -> None:
        self.stage = stage
        self.rows = rows
        self._started: set[int] = set()
        self._timer = Timer()

    def __call__(self, running: Collection[int]) -> None:
        """Take note of the rows that run now; rows that ran before and do not any more are done."""
        self._started.update(running)
        if self._timer.is_due():
            announce(f"{self.stage}: {len(self._started) - len(running):,} of {self.rows:,} rows")
