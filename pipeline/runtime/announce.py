"""Progress lines on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

INTERVAL = 10.0  # seconds between two lines of a `RowProgress`
QUIET_SECONDS = 2.0  # after which an `announced` phase is named


def announce(text: str) -> None:
    """Print the stage that begins."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def announced(phase: str) -> Iterator[None]:
    """Print what is being done, once it takes longer than `QUIET_SECONDS`."""
    timer = threading.Timer(QUIET_SECONDS, announce, (f"{phase} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
