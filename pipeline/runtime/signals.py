"""Interrupts the job of this process after SIGTERM or SIGINT, or when its lease is lost. Jobs run in the main thread.

outside of `graceful`:  signal ──> Interrupted
inside of `graceful`:   signal ──> no new shard begins ──> all shards end, or time is up ──> Interrupted
                        second signal ──> Interrupted
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.messages import counted

POLL_SECONDS = 0.2


class Interrupted(KeyboardInterrupt):
    """A signal or a lost lease has interrupted the job. The same command resumes the job."""


class _Job:
    """Interrupts one job."""

    def __init__(self) -> None:
        self.grace: Grace | None = None
        self.shields = 0
        self.missed = ""  # name of a signal that came while Interrupted could not be raised; it is raised later
        self.raised = threading.Event()  # set when Interrupted was raised, or must no longer be raised

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Take no lock, because a signal may come in the middle of any call."""
        name = signal.Signals(number).name
        if self.grace is not None and self.grace.signal is None and not self.shields:
            self.grace.signal = name
            return
        self.missed = (self.grace is not None and self.grace.signal) or name
        if not self.shields:
            self.raise_missed()

    def interrupt(self) -> None:
        """Interrupt the job from another thread."""
        if self.grace is not None:
            self.grace.signal = self.grace.signal or signal.SIGTERM.name
        while not self.raised.is_set():  # repeat: a signal just before a blocking call does not end the call
            os.kill(os.getpid(), signal.SIGTERM)
            if self.shields or self.raised.wait(POLL_SECONDS):
                return

    def raise_missed(self) -> None:
        """Raise `Interrupted` if a signal came while it could not be raised."""
        missed, self.missed = self.missed, ""
        if missed:
            self.raised.set()
            raise Interrupted(missed)


_job: _Job | None = None  # the job of this process; None outside `interruptible`


class Grace:
    """Gives running shards time to finish after the first signal. `graceful` creates it.

    When `signal` is set, a background thread calls `stop` once. It then calls `at_work` every 0.2 s, and interrupts the
    job when no shard is running or `seconds` have passed.

    stop: function that lets no new shard begin. `stop` and `at_work` return the indices of running shards. Attribute
    `signal`: name of the first signal (SIGTERM also for a lost lease); None before a signal comes.
    """

    def __init__(
        self, seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]], job: _Job
    ) -> None:
        self.seconds, self.stop, self.at_work, self.job = seconds, stop, at_work, job
        self.signal: str | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="grace", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while self.signal is None:
            if self.ended.wait(POLL_SECONDS / 4):
                return
        at_work = self.stop()
        if at_work:
            shards = counted(len(at_work), "shard")
            print(
                f"stopping: up to {self.seconds:g} s for {shards} at work; a second signal stops at once",
                file=sys.stderr,
                flush=True,
            )
        end = time.monotonic() + self.seconds
        while not self.job.raised.is_set():
            if not at_work or time.monotonic() >= end:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.ended.wait(POLL_SECONDS):
                return
            at_work = at_work and self.at_work()


@contextmanager
def interruptible() -> Iterator[None]:
    """Run a job in the `with` block, in the main thread. SIGTERM and SIGINT raise `Interrupted` in the block."""
    global _job
    before, job = _job, _Job()
    handlers = {number: signal.signal(number, job.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    _job = job
    try:
        yield
        job.raise_missed()
    finally:
        job.raised.set()
        _job = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def graceful(seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]]) -> Iterator[Grace]:
    """Give running shards time after a first signal (see `Grace`). After the block, the caller must check `signal`."""
    job = _job or _Job()
    grace = Grace(seconds, stop, at_work, job)
    try:
        if seconds > 0:
            job.grace = grace
            job.raise_missed()
        yield grace
    finally:
        try:
            grace.ended.set()  # no signal is sent from here on
            grace.thread.join()
        finally:
            job.grace = None


@contextmanager
def shielded() -> Iterator[None]:
    """Run cleanup without interrupts. After a signal, raise `Interrupted` when the outermost such block ends."""
    job = _job or _Job()
    job.shields += 1
    try:
        yield
    finally:
        job.shields -= 1
    if not job.shields:
        job.raise_missed()


def interrupter() -> Callable[[], None]:
    """Return a function that interrupts the job from another thread. It does nothing outside `interruptible`."""
    job = _job
    return job.interrupt if job is not None else lambda: None
