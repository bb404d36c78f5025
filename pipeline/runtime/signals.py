"""Interrupt a job: by SIGTERM or SIGINT, a lost lease, or a spent budget.

signal ──> Interrupted                                                       outside of `graceful`
signal ──> no further shard begins ──> idle, or time is up ──> Interrupted   inside
                        second signal ──> Interrupted

Only the main thread is interrupted in the middle of its work. A job in another thread begins no further shard, and
raises `Interrupted` where its `shielded` or `interruptible` block ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from pipeline.messages import counted

POLL_SECONDS = 0.2


class Interrupted(KeyboardInterrupt):
    """SIGTERM, SIGINT, a lost lease or a spent budget; the same command finishes the job."""

    advice: str | None = None  # what the user should do next, if it differs from the command's usual advice


class _Job:
    """Interrupts one job, which runs in the thread that creates this object."""

    def __init__(self) -> None:
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        self.grace: Grace | None = None
        self.shields = 0
        self.missed = ""  # name of an interrupt that is yet to be raised
        self.raised = threading.Event()  # set once Interrupted is raised, or must no longer be raised

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread. It may come inside any call, so no lock is taken."""
        name = signal.Signals(number).name
        if self.grace is not None and self.grace.signal is None and not self.shields:
            self.grace.signal = name
            return
        self.missed = (self.grace is not None and self.grace.signal) or name
        if not self.shields:
            self.raise_missed()

    def interrupt(self, *, with_grace: bool) -> None:
        """Interrupt the job from another thread."""
        if self.grace is not None:
            self.grace.signal = self.grace.signal or signal.SIGTERM.name
            if with_grace or not self.in_main_thread:
                return
        elif not self.in_main_thread:
            self.missed = signal.SIGTERM.name
            return
        while not self.raised.is_set():  # a signal just before a waiting call does not end the call
            os.kill(os.getpid(), signal.SIGTERM)
            if self.shields or self.raised.wait(POLL_SECONDS):
                return

    def raise_missed(self) -> None:
        """Raise `Interrupted` for an interrupt that came while it could not be raised."""
        missed, self.missed = self.missed, ""
        if missed:
            self.raised.set()
            raise Interrupted(missed)


class _Jobs(threading.local):
    current: _Job | None = None  # the job of this thread


_jobs = _Jobs()


class Grace:
    """The time for shards at work to end after the first signal. `graceful` creates it.

    Once `signal` is set, a background thread calls `stop` once, then `at_work` every 0.2 s. When either returns an
    empty set, or `seconds` have passed, it interrupts a job in the main thread.

    stop: lets no further shard begin. stop, at_work: return the indices of the shards at work. `signal`: name of the
    first signal (SIGTERM also for a lost lease); None before a signal comes.
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
        if not self.job.in_main_thread:
            return
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
    """Run a job in this thread: in the main thread, SIGTERM and SIGINT become `Interrupted`."""
    before, job = _jobs.current, _Job()
    numbers = (signal.SIGTERM, signal.SIGINT) if job.in_main_thread else ()
    handlers = {number: signal.signal(number, job.on_signal) for number in numbers}
    _jobs.current = job
    try:
        yield
        job.raise_missed()
    finally:
        job.raised.set()
        _jobs.current = before
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def graceful(seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]]) -> Iterator[Grace]:
    """Begin a `Grace` when the first signal comes. Work may still end normally after it: check `Grace.signal`."""
    job = _jobs.current or _Job()
    grace = Grace(seconds, stop, at_work, job)
    try:
        if seconds > 0 or not job.in_main_thread:
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
    """Run cleanup without interrupts: `Interrupted` is raised at the end of the outermost block."""
    job = _jobs.current or _Job()
    job.shields += 1
    try:
        yield
    finally:
        job.shields -= 1
    if not job.shields:
        job.raise_missed()


def interrupter(*, with_grace: bool = False) -> Callable[[], None]:
    """Return a function with which another thread interrupts this thread's job; outside of `interruptible` a no-op.

    with_grace: whether shards at work get time to end, as after a first signal.
    """
    job = _jobs.current
    return partial(job.interrupt, with_grace=with_grace) if job is not None else lambda: None
