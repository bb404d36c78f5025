"""Shows the progress of a running job, and sets the job's metrics (gauges).

On a terminal, one line is redrawn. Elsewhere, a line is printed every `PLAIN_SECONDS` and when a new phase begins.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ray
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline import metrics
from pipeline.answer.coordinator import Coordinator, RunProgress, Workload
from pipeline.messages import counted, escaped
from pipeline.runtime.announce import announce, goes_to_log
from pipeline.storage.concurrency import repeating

PLAIN_SECONDS = 10.0
LIVE_SECONDS = 0.5
RATE_SECONDS = 300.0  # rates are computed from the commits in the last RATE_SECONDS
EXAMPLE_SECONDS = 60.0  # time between two answers shown as examples
STARVED_SECONDS = 20.0  # the progress line shows that actors wait for rows if they have waited longer than this


def rates(seen: Sequence[tuple[float, RunProgress]], now: float, work: Workload) -> dict[str, float]:
    """Return rows per second, tokens per second and the seconds left; an empty dict if no rate is known yet.

    seen: pairs (time in s, progress at this time), oldest first. The first pair is from the start of answering or from
    a commit. The other pairs are from later commits.
    """
    if len(seen) < 2:
        return {}
    (began, first), (ended, last) = seen[0], seen[-1]
    shards = last.shards - first.shards
    # time after the last commit counts only once the next one is overdue, so the rate does not sink between commits
    seconds = max(ended - began, (now - began) * shards / (shards + 1), 1e-3)
    rows_per_second, left = (last.rows - first.rows) / seconds, work.rows - work.done_rows - last.rows
    found = {"rows_per_second": rows_per_second, "tokens_per_second": (last.tokens - first.tokens) / seconds}
    return {**found, "eta_seconds": left / rows_per_second} if left and rows_per_second else found


def progress_line(run: RunProgress, found: Mapping[str, float], seconds: float, work: Workload) -> str:
    """Return the progress line. found: the result of `rates`. seconds: time since the start."""
    line = f"{work.done_shards + run.shards}/{work.shards} shards  {work.done_rows + run.rows:,}/{work.rows:,} rows"
    if run.errors:
        kinds = ", ".join(f"{answers:,} {kind}" for kind, answers in run.kinds)
        line += f" ({counted(run.errors, 'error')}{': ' if kinds else ''}{kinds})"
    if run.shards == 0:
        line += f"  {_waits_for(run)[1]}"
    if found:
        line += f"  {found['rows_per_second']:,.1f} rows/s"
        if run.tokens > run.rows:  # otherwise the answers are labels of one token
            line += f"  {found['tokens_per_second']:,.0f} tokens/s"
    if "eta_seconds" in found:
        line += f"  ETA {_clock(found['eta_seconds'])}"
    return line + f"  {_clock(seconds)} elapsed"


def _waits_for(run: RunProgress) -> tuple[str, str]:
    """Return what a run without commits waits for: as one word, and as a text for the progress line."""
    if run.at_work:
        return "answering", f"answering {counted(run.at_work, 'shard')}"
    if run.loading:
        return "loading", f"loading the model in {counted(run.loading, 'actor')}"
    return "starting", "starting workers, preparing the first shard"


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


@contextmanager
def shown_progress(coordinator: Coordinator, work: Workload) -> Iterator[Progress]:
    """Show progress until the `with` block ends."""
    progress, console = Progress(coordinator, work), Console(file=sys.stderr)
    # on a terminal, a single line is redrawn, and removed at the end
    is_live = not goes_to_log() and console.is_terminal
    live = Live(console=console, transient=True, refresh_per_second=4) if is_live else None
    with live or nullcontext(), repeating(partial(progress.show, live), LIVE_SECONDS, "progress"):
        yield progress
    line, fields = progress.read()  # includes the latest commits
    progress.warn()
    if live is None:
        announce(line, "progress", **fields)


class Progress:
    """Reads the progress of a run from its coordinator, and shows it."""

    def __init__(self, coordinator: Coordinator, work: Workload) -> None:
        self.coordinator = coordinator
        self.work = work
        self.seen: deque[tuple[float, RunProgress]] = deque()  # argument of `rates`
        self.phase = self.shown_phase = ""
        self.shown = time.monotonic()
        self.example, self.example_due = "", 0.0
        self.warnings, self.warned = tuple[str, ...](), False
        self.starved_since: float | None = None

    def read(self) -> tuple[str, dict[str, Any]]:
        """Return the progress as a line, and as the fields of an event. Set the job's metrics (gauges)."""
        try:
            run, now = self.coordinator.read(), time.monotonic()
            starved = self._starved(run, now)
        except (ray.exceptions.RayError, TimeoutError):
            unknown = "progress unknown: the run's coordinator does not answer"
            return unknown if self.phase else "starting the run's coordinator", {}
        self.example, self.warnings = run.example, run.warnings
        self.phase = "rows" if run.shards else _waits_for(run)[0]
        if not self.seen and (run.at_work or run.shards):
            self.seen.append((now, run))
        if self.seen and run.shards > self.seen[-1][1].shards:
            self.seen.append((now, run))
        while len(self.seen) > 2 and self.seen[1][0] < now - RATE_SECONDS:
            self.seen.popleft()
        work, seconds, found = self.work, time.time() - self.work.began, rates(self.seen, now, self.work)
        done = work.done_rows + run.rows
        metrics.set_gauge("job_rows", work.rows)
        metrics.set_gauge("job_rows_done", done)
        if "eta_seconds" in found:
            metrics.set_gauge("eta_seconds", found["eta_seconds"])
        fields: dict[str, Any] = {"seconds": seconds, "shards_done": work.done_shards + run.shards}
        fields |= {"shards": work.shards, "rows_done": done, "rows": work.rows, "errors": run.errors, **found}
        fields |= {"error_kinds": dict(run.kinds)} if run.kinds else {}
        return progress_line(run, found, seconds, work) + starved, fields

    def _starved(self, run: RunProgress, now: float) -> str:
        """Return a text if for `STARVED_SECONDS` actors have waited for rows, or no actor has started; else ""."""
        left = self.work.shards - self.work.done_shards - run.shards - run.at_work  # shards that have not begun
        if left <= 0 or run.loading or run.at_work >= max(run.actors, 1):
            self.starved_since = None
        elif self.starved_since is None:
            self.starved_since = now
        elif now - self.starved_since >= STARVED_SECONDS:
            free, cpus = (found.get("CPU", 0.0) for found in (ray.available_resources(), ray.cluster_resources()))
            waiting = f"{run.actors - run.at_work} of {run.actors} actors wait for rows"
            waiting = waiting if run.actors else "no actor has started"
            return f"  {waiting}: {free:g} of the cluster's {cpus:g} CPUs are free"
        return ""

    def show(self, live: Live | None) -> None:
        """Redraw the line on a terminal; elsewhere, print it if it is due. Every `EXAMPLE_SECONDS`, print an answer."""
        line, fields = self.read()
        if live is not None:
            live.update(Text(escaped(line)))
        elif self.phase != self.shown_phase or time.monotonic() - self.shown >= PLAIN_SECONDS:
            if self.phase == "rows" != self.shown_phase:
                line += ": the first rows"
            self.shown, self.shown_phase = time.monotonic(), self.phase
            announce(line, "progress", **fields)
        self.warn()
        if not self.example or time.monotonic() < self.example_due:
            return
        self.example_due, example = time.monotonic() + EXAMPLE_SECONDS, f"example: {self.example}"
        if live is not None:
            live.console.print(Text(escaped(example)))
        else:
            announce(example, "example")

    def warn(self) -> None:
        """Print, once, the signs of bad answers in the first committed shard. A user may then stop the job."""
        if self.warned:
            return
        self.warned = bool(self.warnings)
        for line in self.warnings:
            announce(f"warning: in the first shard, {line}", "warning", logging.WARNING)
