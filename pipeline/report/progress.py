"""Progress of a running job that a person can read: on a terminal one live line, else a line every ten seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType

import ray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.generate.coordinator import Counts, RunCoordinator

log = logging.getLogger(__name__)
PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5


def progress_line(counts: Counts, seconds: float, shards: int, rows: int, done_shards: int, done_rows: int) -> str:
    """Shards, rows, rates and time left: this run's `counts` on top of what earlier runs committed."""
    new_shards, new_rows, errors, tokens = counts
    line = f"{done_shards + new_shards}/{shards} shards  {done_rows + new_rows:,}/{rows:,} rows"
    if errors:
        line += f" ({errors:,} errors)"
    line += f"  {new_rows / seconds:,.1f} rows/s  {tokens / seconds:,.0f} tokens/s"
    left = rows - done_rows - new_rows
    if new_rows and left:
        line += f"  ETA {_clock(left * seconds / new_rows)}"
    return line + f"  {_clock(seconds)} elapsed"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Shows progress from `with` to its end. shards, rows: of the job; done_*: before this run."""

    def __init__(self, coordinator: RunCoordinator, shards: int, rows: int, done_shards: int, done_rows: int) -> None:
        self.coordinator = coordinator
        self.shape = (shards, rows, done_shards, done_rows)
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _line(self) -> str:
        try:
            counts = self.coordinator.read()
        except (ray.exceptions.RayError, TimeoutError) as error:
            return f"progress unknown: {type(error).__name__}"
        return progress_line(counts, time.monotonic() - self.began, *self.shape)

    def _show(self) -> None:
        console = Console(file=sys.stderr)
        if not console.is_terminal:
            while not self._stop.wait(PLAIN_SECONDS):
                print(self._line(), file=sys.stderr, flush=True)
            return
        with Live(console=console, transient=True, refresh_per_second=4) as live:
            while not self._stop.wait(LIVE_SECONDS):
                live.update(Text(self._line()))
