"""Announces progress, as lines on standard error or as events in a log with one JSON object per line."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipeline.messages import escaped

INTERVAL = 10.0  # minimum number of seconds between two progress lines of one stage
QUIET_SECONDS = 2.0  # an `announced` phase is printed only if it takes longer than this
EVENT = "event"  # name of the field in a log record that holds the kind of event


class EscapingFormatter(logging.Formatter):
    """Formats log records with `escaped`, because they quote rows, file names and checkpoints."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class _Lines(logging.Handler):
    """Prints log records to the current `sys.stderr`, which may be replaced at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # a full disk or a closed pipe must not end the job
            print(self.format(record), file=sys.stderr, flush=True)


_log = logging.getLogger("pipeline.announced")
_log.setLevel(logging.INFO)
_log.propagate = False
_LINES = _Lines()
_LINES.setFormatter(EscapingFormatter())
_log.addHandler(_LINES)


def announce_to_log(to_log: bool) -> None:
    """Send announcements to the root logger's handlers if `to_log`, else to standard error."""
    _log.propagate = to_log
    _log.handlers = [] if to_log else [_LINES]


def goes_to_log() -> bool:
    """Return whether announcements go to the root logger's handlers."""
    return _log.propagate


def announce(text: str, event: str = "announcement", level: int = logging.INFO, **fields: Any) -> None:
    """Print `text` as a line, or write `text` and `fields` to the log as an event."""
    _log.log(level, "%s", text, extra={EVENT: event, **fields})


@contextmanager
def announced(phase: str) -> Iterator[None]:
    """Announce `phase`, which names the work of the `with` block, if the block takes longer than `QUIET_SECONDS`."""
    timer = threading.Timer(QUIET_SECONDS, announce, (f"{phase} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announce_checks(text: str) -> None:
    """Announce `text` if standard error is a terminal. Elsewhere, a failed check must print its error only."""
    if sys.stderr.isatty():
        announce(text)


class Timer:
    """Limits progress lines to one every `INTERVAL` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether `INTERVAL` has passed since the start, or since this method last returned True."""
        if time.monotonic() - self._last < INTERVAL:
            return False
        self._last = time.monotonic()
        return True


class RowProgress:
    """Announces how many rows of a stage are done."""

    def __init__(self, stage: str, rows: int) -> None:
        self.stage, self.rows = stage, rows
        self._started: set[int] = set()
        self._timer = Timer()

    def __call__(self, running: Collection[int]) -> None:
        """Update the progress. running: rows that are running. Rows that ran earlier are done."""
        self._started.update(running)
        self.at(len(self._started) - len(running))

    def at(self, done: int) -> None:
        """Announce that `done` rows are done, if `INTERVAL` seconds have passed since the last announcement."""
        if self._timer.is_due():
            announce(f"{self.stage}: {done:,} of {self.rows:,} rows")
