"""Progress of a running job, and the job's gauges.

One live line on a terminal; else a line every ten seconds, and whenever the run waits for something else.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import ray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline import metrics
from pipeline.generate.coordinator import RunCoordinator, RunProgress, Workload
from pipeline.generate.time_left import seconds_left
from pipeline.messages import counted
from pipeline.runtime.announce import announce, goes_to_log

PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5


@dataclass(frozen=True)
class Rates:
    """Rates over the time in which shards were worked on, and the time left; None: not known yet.

    eta_seconds: until the command ends, not only its last row.
    """

    rows_per_second: float | None
    tokens_per_second: float | None
    eta_seconds: float | None


def rates(run: RunProgress, seconds: float, working_seconds: float, work: Workload) -> Rates:
    """Arguments as for `progress_line`."""
    if run.shards == 0 or working_seconds <= 0:
        return Rates(None, None, None if work.planned is None else work.planned.seconds_left(seconds, working_seconds))
    left = None
    if run.pace is not None:
        shards, rows = work.shards - work.done_shards - run.shards, work.rows - work.done_rows - run.rows
        left = seconds_left(run.pace, run.at_work, run.waiting, shards, rows, run.loading)
        if work.planned is not None and shards:
            left = work.planned.blended(left, run.pace.shards, working_seconds)
    return Rates(run.rows / working_seconds, run.tokens / working_seconds, left)


def progress_line(run: RunProgress, seconds: float, working_seconds: float, work: Workload) -> str:
    """Shards, rows, rates and time left; before the first commit what the run waits for.

    The time left is known from the first commit on, before it where `plan` has predicted the run.

    Args:
        seconds: since the command began.
        working_seconds: since the first shard began, which rates are taken from.
    """
    line = f"{work.done_shards + run.shards}/{work.shards} shards  {work.done_rows + run.rows:,}/{work.rows:,} rows"
    if run.errors:
        line += f" ({run.errors:,} errors)"
    found = rates(run, seconds, working_seconds, work)
    if run.shards == 0:
        line += f"  {_waits_for(run)[1]}"
    if found.rows_per_second is not None and found.tokens_per_second is not None:
        line += f"  {found.rows_per_second:,.1f} rows/s"
        if run.tokens > run.rows:  # else the answers are labels of one token
            line += f"  {found.tokens_per_second:,.0f} tokens/s"
    if found.eta_seconds is not None:
        line += f"  ETA {_clock(found.eta_seconds)}"
    return line + f"  {_clock(seconds)} elapsed"


def _waits_for(run: RunProgress) -> tuple[str, str]:
    """What a run without a commit waits for: without numbers, and for its line."""
    if run.at_work:
        return "answering", f"answering {counted(len(run.at_work), 'shard')}"
    if run.download:
        return "downloading", run.download
    if run.loading:
        return "loading", f"loading the model in {counted(run.loading, 'actor')}"
    return "starting", "starting workers, preparing the first shard"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Progress:
    """Shows progress from `with` to its end."""

    def __init__(self, coordinator: RunCoordinator, work: Workload) -> None:
        self.coordinator = coordinator
        self.work = work
        self.working_since: float | None = None
        self.phase = ""
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
        if kind is None:
            line, fields = self._read()  # with the last commits
            if not self._is_live():
                announce(line, "progress", **fields)

    def _read(self) -> tuple[str, dict[str, Any]]:
        """The line, and the same as fields of an event. Sets the job's gauges."""
        try:
            run = self.coordinator.read()
        except (ray.exceptions.RayError, TimeoutError):
            return "progress unknown: the run's coordinator does not answer", {}
        now = time.monotonic()
        self.phase = "rows" if run.shards else _waits_for(run)[0]
        if self.working_since is None and (run.at_work or run.shards):
            self.working_since = now
        seconds, working_seconds = time.time() - self.work.began, now - (self.working_since or now)
        work, found = self.work, rates(run, seconds, working_seconds, self.work)
        done = work.done_rows + run.rows
        metrics.set_gauge("job_rows", work.rows)
        metrics.set_gauge("job_rows_done", done)
        fields: dict[str, Any] = {"seconds": seconds, "shards_done": work.done_shards + run.shards}
        fields |= {"shards": work.shards, "rows_done": done, "rows": work.rows, "errors": run.errors}
        fields |= {name: value for name, value in asdict(found).items() if value is not None}
        if found.eta_seconds is not None:
            metrics.set_gauge("eta_seconds", found.eta_seconds)
        return progress_line(run, seconds, working_seconds, work), fields

    def _is_live(self) -> bool:
        """Whether one line is redrawn on a terminal, and goes at the end."""
        return not goes_to_log() and Console(file=sys.stderr).is_terminal

    def _show(self) -> None:
        if not self._is_live():
            shown, phase = time.monotonic(), ""
            while not self._stop.wait(LIVE_SECONDS):
                line, fields = self._read()
                if self.phase != phase or time.monotonic() - shown >= PLAIN_SECONDS:
                    if self.phase == "rows" != phase:
                        line += ": the first rows"
                    shown, phase = time.monotonic(), self.phase
                    announce(line, "progress", **fields)
            return
        with Live(console=Console(file=sys.stderr), transient=True, refresh_per_second=4) as live:
            while not self._stop.wait(LIVE_SECONDS):
                live.update(Text(self._read()[0]))
