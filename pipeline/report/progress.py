"""Progress of a running job: one live line on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

import ray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.generate.coordinator import RunCoordinator, RunProgress, Workload

PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5


def progress_line(run: RunProgress, seconds: float, working_seconds: float, work: Workload) -> str:
    """Shards, rows, rates and time left; before the first commit what the run waits for.

    Args:
        seconds: since the run began.
        working_seconds: since the first shard began, which rates and time left are taken from.
    """
    line = f"{work.done_shards + run.shards}/{work.shards} shards  {work.done_rows + run.rows:,}/{work.rows:,} rows"
    if run.errors:
        line += f" ({run.errors:,} errors)"
    if run.shards == 0:
        line += f"  {_waits_for(run)}"
    elif working_seconds > 0:
        line += f"  {run.rows / working_seconds:,.1f} rows/s  {run.tokens / working_seconds:,.0f} tokens/s"
        left = work.rows - work.done_rows - run.rows
        if run.rows and left:
            line += f"  ETA {_clock(left * working_seconds / run.rows)}"
    return line + f"  {_clock(seconds)} elapsed"


def _waits_for(run: RunProgress) -> str:
    if run.at_work:
        return f"answering the first {run.at_work} shards"
    if run.download:
        return run.download
    if run.loading:
        return f"loading the model in {run.loading} actors"
    return "starting workers, preparing the first shard"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Shows progress from `with` to its end."""

    def __init__(self, coordinator: RunCoordinator, work: Workload) -> None:
        self.coordinator = coordinator
        self.work = work
        self.began = time.monotonic()
        self.working_since: float | None = None
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
            run = self.coordinator.read()
        except (ray.exceptions.RayError, TimeoutError):
            return "progress unknown: the run's coordinator does not answer"
        now = time.monotonic()
        if self.working_since is None and (run.at_work or run.shards):
            self.working_since = now
        return progress_line(run, now - self.began, now - (self.working_since or now), self.work)

    def _show(self) -> None:
        console = Console(file=sys.stderr)
        if not console.is_terminal:
            shown = time.monotonic()
            while not self._stop.wait(LIVE_SECONDS):
                line = self._line()
                if time.monotonic() - shown >= PLAIN_SECONDS:
                    shown = time.monotonic()
                    print(line, file=sys.stderr, flush=True)
            return
        with Live(console=console, transient=True, refresh_per_second=4) as live:
            while not self._stop.wait(LIVE_SECONDS):
                live.update(Text(self._line()))
