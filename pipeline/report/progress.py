"""Progress of a running job, and the job's gauges.

One live line on a terminal; else a line every ten seconds, and whenever the run waits for something else.
"""

from __future__ import annotations

import heapq
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
from pipeline.messages import counted
from pipeline.runtime.announce import announce, goes_to_log

PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5
MOST_TURNS = 2000  # shards that are given to actors one by one; of more, the others count by the mean


@dataclass(frozen=True)
class Pace:
    """Rates over the time in which shards were worked on, and the time left; None: not known yet, or none."""

    rows_per_second: float
    tokens_per_second: float
    eta_seconds: float | None


def pace(run: RunProgress, working_seconds: float, work: Workload) -> Pace | None:
    """None before the first commit. Arguments as for `progress_line`."""
    if run.shards == 0 or working_seconds <= 0:
        return None
    return Pace(run.rows / working_seconds, run.tokens / working_seconds, _seconds_left(run, work))


def _seconds_left(run: RunProgress, work: Workload) -> float | None:
    """Until the last commit: what is left goes shard by shard to as many actors as have been at work lately.

    None before the first commit.
    """
    left = work.shards - work.done_shards - run.shards
    if not run.recent or left <= 0:
        return 0.0 if run.recent else None
    usual = run.row_seconds * (work.rows - work.done_rows - run.rows) / left
    overdue = [seconds for seconds in run.elapsed if seconds > usual]  # of these the end is not known: at least so long
    usual = (usual * run.recent + sum(overdue)) / (run.recent + len(overdue))
    actors = max(1, round(run.at_once))
    usual *= actors / max(run.at_once, 1e-9)  # they wait for prompts meanwhile, or for a commit
    free = sorted((max(usual - seconds, 0.0) for seconds in run.elapsed), reverse=True)[:actors]
    free += [0.0] * (actors - len(free))
    heapq.heapify(free)
    begun = min(run.at_work, left)
    for _ in range(min(left - begun, MOST_TURNS)):
        heapq.heapreplace(free, free[0] + usual)
    return max(free) + max(left - begun - MOST_TURNS, 0) * usual / actors


def progress_line(run: RunProgress, seconds: float, working_seconds: float, work: Workload) -> str:
    """Shards, rows, rates and time left; before the first commit what the run waits for.

    Args:
        seconds: since the command began.
        working_seconds: since the first shard began, which rates and time left are taken from.
    """
    line = f"{work.done_shards + run.shards}/{work.shards} shards  {work.done_rows + run.rows:,}/{work.rows:,} rows"
    if run.errors:
        line += f" ({run.errors:,} errors)"
    rates = pace(run, working_seconds, work)
    if run.shards == 0:
        line += f"  {_waits_for(run)[1]}"
    elif rates is not None:
        line += f"  {rates.rows_per_second:,.1f} rows/s"
        if run.tokens > run.rows:  # else the answers are labels of one token
            line += f"  {rates.tokens_per_second:,.0f} tokens/s"
        if rates.eta_seconds:
            line += f"  ETA {_clock(rates.eta_seconds)}"
    return line + f"  {_clock(seconds)} elapsed"


def _waits_for(run: RunProgress) -> tuple[str, str]:
    """What a run without a commit waits for: without numbers, and for its line."""
    if run.at_work:
        return "answering", f"answering {counted(run.at_work, 'shard')}"
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
        work, rates = self.work, pace(run, working_seconds, self.work)
        done = work.done_rows + run.rows
        metrics.set_gauge("job_rows", work.rows)
        metrics.set_gauge("job_rows_done", done)
        fields: dict[str, Any] = {"seconds": seconds, "shards_done": work.done_shards + run.shards}
        fields |= {"shards": work.shards, "rows_done": done, "rows": work.rows, "errors": run.errors}
        if rates is not None:
            fields |= asdict(rates)
            if rates.eta_seconds is not None:
                metrics.set_gauge("eta_seconds", rates.eta_seconds)
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
