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
from queue import Empty, SimpleQueue
from types import FrameType

from pipeline.messages import counted

POLL_SECONDS = 0.2


class Interrupted(KeyboardInterrupt):
    """SIGTERM, SIGINT, a lost lease or a spent budget; the same command finishes the job."""

    advice: str | None = None  # what to do next, if it is not the command's usual advice


class _Job:
    """The interrupts of one job, which runs in the thread that makes this."""

    def __init__(self) -> None:
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        self.grace: Grace | None = None
        self.shields = 0
        self.missed = ""  # name of an interrupt that is yet to be raised
        self.raised = threading.Event()  # Interrupted is raised, or may not be raised any more

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        name = signal.Signals(number).name
        if self.shields:
            self.missed = name
        elif self.grace is not None and self.grace.signal is None:
            self.grace.ask(name)
        else:
            self.missed = name if self.grace is None or self.grace.signal is None else self.grace.signal
            self.raise_missed()

    def interrupt(self) -> None:
        """Interrupt the job from another thread, without grace."""
        if self.in_main_thread:
            if self.grace is not None and self.grace.signal is None:
                self.grace.signal = signal.SIGTERM.name
            while not self.raised.is_set():  # a signal just before a call that waits does not end that call
                os.kill(os.getpid(), signal.SIGTERM)
                if self.shields or self.raised.wait(POLL_SECONDS):
                    return
        elif self.grace is not None:
            self.grace.ask(signal.SIGTERM.name)
        else:
            self.missed = signal.SIGTERM.name

    def ask(self, reason: str) -> None:
        """Interrupt the job from another thread, with grace where it has some."""
        if self.grace is None:
            self.interrupt()
        elif self.grace.signal is None:
            self.grace.ask(reason)

    def raise_missed(self) -> None:
        """Raise `Interrupted` for an interrupt that came while it could not be raised."""
        missed, self.missed = self.missed, ""
        if missed:
            self.raised.set()
            raise Interrupted(missed)


class _Jobs(threading.local):
    current: _Job | None = None  # of this thread


_jobs = _Jobs()


class Grace:
    """The time in which shards at work may end after the first signal. `graceful` makes it.

    After `ask`, a background thread calls `stop` once, then `at_work` every 0.2 s. When either returns an empty set, or
    `seconds` have passed, it interrupts a job in the main thread.

    Args:
        seconds: the longest time for the work to end.
        stop: lets no further shard begin, and returns the indices of the shards at work.
        at_work: returns the indices of the shards still at work.
        job: the job to interrupt; None outside of `interruptible`, then `ask` must not be called.

    `signal`: name of the first signal, SIGTERM also for a lost lease; None before.
    """

    def __init__(
        self, seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]], job: _Job | None
    ) -> None:
        self.seconds, self.stop, self.at_work, self.job = seconds, stop, at_work, job
        self.signal: str | None = None
        # a handler may run inside any call of the main thread; SimpleQueue.put alone is safe there
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="grace", daemon=True)
        self._thread.start()

    def ask(self, name: str) -> None:
        """Begin the grace."""
        self.signal = name
        self._asked.put(name)

    def end(self) -> None:
        """End the thread: no signal is sent from here on."""
        self._asked.put(None)
        self._thread.join()

    def _wait(self) -> None:
        if self._asked.get() is None:
            return
        assert self.job is not None
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
            try:
                self._asked.get(timeout=POLL_SECONDS)
                return
            except Empty:
                at_work = at_work and self.at_work()


@contextmanager
def interruptible() -> Iterator[None]:
    """Run a job in this thread: in the main thread, SIGTERM and SIGINT become `Interrupted`."""
    before, job = _jobs.current, _Job()
    handlers = {}
    if job.in_main_thread:
        handlers = {number: signal.signal(number, job.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
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
    """Begin a `Grace` at the first signal. The work may also end by itself after a signal: check `signal` then."""
    job = _jobs.current
    grace = Grace(seconds, stop, at_work, job)
    try:
        if job is not None and (seconds > 0 or not job.in_main_thread):
            job.grace = grace
            job.raise_missed()
        yield grace
    finally:
        try:
            grace.end()
        finally:
            if job is not None:
                job.grace = None


@contextmanager
def shielded() -> Iterator[None]:
    """Run cleanup that no interrupt cuts short: `Interrupted` is raised at the end of the outermost block."""
    job = _jobs.current
    if job is None:
        yield
        return
    job.shields += 1
    try:
        yield
    finally:
        job.shields -= 1
    if not job.shields:
        job.raise_missed()


def interrupter() -> Callable[[], None]:
    """Return a function for other threads that interrupts the job of this thread, without grace.

    Outside of `interruptible` it does nothing.
    """
    job = _jobs.current
    return job.interrupt if job is not None else lambda: None


def asker() -> Callable[[str], None]:
    """Return a function for other threads, called with a reason: as `interrupter`, but with a first signal's grace."""
    job = _jobs.current
    return job.ask if job is not None else lambda reason: None
