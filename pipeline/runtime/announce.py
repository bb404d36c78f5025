"""Progress lines of tune, evaluate and adapt, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

INTERVAL = 10.0  # seconds between two lines of a `RowProgress`


def announce(text: str) -> None:
    """Print the stage that begins."""
    print(text, file=sys.stderr, flush=True)


class RowProgress:
    """Announces how many rows are done, at most every `INTERVAL` seconds.

    Args:
        stage: what is done with them.
        rows: their number.
    """

    def __init__(self, stage: str, rows: int) -> None:
        self.stage = stage
        self.rows = rows
        self._started: set[int] = set()
        self._last = time.monotonic()

    def __call__(self, running: Collection[int]) -> None:
        """Take note of the rows that run now; rows that ran before and do not any more are done."""
        self._started.update(running)
        if time.monotonic() - self._last >= INTERVAL:
            self._last = time.monotonic()
            announce(f"{self.stage}: {len(self._started) - len(running):,} of {self.rows:,} rows")
