"""Interrupts of a job: SIGTERM and SIGINT in the main thread, a lost lease in any thread.

signal ──> Interrupted                                                       outside of `graceful`
signal ──> no further shard begins ──> idle, or time is up ──> Interrupted   inside
                        second signal ──> Interrupted

All state belongs to the `interruptible` block of one job, so that jobs in several threads do not meet.
"""

from __future__ import annotations

import ctypes
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
    """The interrupts of one job, which runs in the thread that makes this.

    A job in the main thread is interrupted by signals; in another thread, where the caller handles signals, by an
    exception that Python raises there.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.has_handlers = False
        self.grace: Grace | None = None
        self.shields = 0
        self.missed = ""  # a signal that came while shielded
        self.raised = threading.Event()  # Interrupted is raised, or nothing may raise it any more
        self.lock = threading.RLock()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Signal handler, in the main thread."""
        name = signal.Signals(number).name
        if self.shields:
            self.missed = name
        elif self.grace is not None and self.grace.signal is None:
            self.grace.ask(name)
        else:
            self.raised.set()
            raise Interrupted(name if self.grace is None or self.grace.signal is None else self.grace.signal)

    def interrupt(self) -> None:
        """Raise `Interrupted` in the job's thread, from another thread, without grace."""
        if self.grace is not None and self.grace.signal is None:
            self.grace.signal = signal.SIGTERM.name
        if self.has_handlers:
            while not self.raised.is_set():  # a signal just before a call that waits does not end that call
                os.kill(os.getpid(), signal.SIGTERM)
                if self.shields or self.raised.wait(POLL_SECONDS):
                    return
            return
        with self.lock:
            if self.shields:
                self.missed = signal.SIGTERM.name
            elif not self.raised.is_set():
                self.raised.set()
                _raise_in(self.thread, Interrupted)

    def ask(self, reason: str) -> None:
        """Interrupt the job from another thread, with grace where it has some."""
        grace = self.grace
        if grace is None or not self.has_handlers:  # the end of a grace is a signal
            self.interrupt()
        elif grace.signal is None:
            grace.ask(reason)

    def end(self) -> None:
        """After this nothing is raised."""
        with self.lock:
            if not self.has_handlers and self.raised.is_set():
                _raise_in(self.thread, None)
            self.raised.set()


class _Jobs(threading.local):
    current: _Job | None = None  # of this thread


_jobs = _Jobs()


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise an exception in another thread as soon as it runs Python code; None takes back one not yet raised."""
    exception = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


class Grace:
    """The time in which shards at work may end after the first signal. `graceful` makes it.

    After `ask`, one background thread calls `stop` once, then `at_work` every 0.2 s. When either returns an empty set,
    or `seconds` have passed, the thread interrupts the job, also if all work ended in time. `end` stops the thread.

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
        self.seconds = seconds
        self.stop = stop
        self.at_work = at_work
        self.job = job
        self.signal: str | None = None
        # a handler may run inside any call of the main thread; SimpleQueue.put alone is safe there
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="grace", daemon=True)

    def ask(self, name: str) -> None:
        """The first signal came."""
        self.signal = name
        self._asked.put(name)

    def begin(self) -> None:
        """From now on `ask` may be called."""
        self._thread.start()

    def end(self) -> None:
        """After this nothing is called and no signal sent."""
        self._asked.put(None)
        self._thread.join()

    def _wait(self) -> None:
        if self._asked.get() is None:
            return
        assert self.job is not None
        raised, at_work = self.job.raised, self.stop()
        if at_work:
            shards = counted(len(at_work), "shard")
            print(
                f"stopping: up to {self.seconds:g} s for {shards} at work; a second signal stops at once",
                file=sys.stderr,
                flush=True,
            )
        end = time.monotonic() + self.seconds
        while at_work and time.monotonic() < end:
            try:
                self._asked.get(timeout=POLL_SECONDS)
                return
            except Empty:
                at_work = self.at_work()
        while not raised.is_set():  # as in `_Job.interrupt`
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                self._asked.get(timeout=POLL_SECONDS)
                return
            except Empty:
                continue


@contextmanager
def interruptible() -> Iterator[None]:
    """A job in this thread: SIGTERM and SIGINT become `Interrupted` if it is the main thread."""
    before, job = _jobs.current, _Job()
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        job.has_handlers = True
        handlers = {number: signal.signal(number, job.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    _jobs.current = job
    try:
        yield
    finally:
        try:
            job.end()
        finally:
            _jobs.current = before
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def graceful(seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]]) -> Iterator[Grace]:
    """The first signal begins the `Grace`. The work may also end by itself after a signal: check `signal` then."""
    job = _jobs.current
    grace = Grace(seconds, stop, at_work, job)
    grace.begin()
    if job is not None and seconds > 0:
        job.grace = grace
    try:
        yield grace
    finally:
        try:
            grace.end()
        finally:
            if job is not None:
                job.grace = None


@contextmanager
def shielded() -> Iterator[None]:
    """Cleanup that no interrupt cuts short: `Interrupted` is raised at the end of the outermost block."""
    job = _jobs.current
    if job is None:
        yield
        return
    with job.lock:
        job.shields += 1
    try:
        yield
    finally:
        with job.lock:
            job.shields -= 1
            missed = "" if job.shields else job.missed
            if missed:
                job.missed = ""
    if missed:
        job.raised.set()
        raise Interrupted(missed)


def interrupter() -> Callable[[], None]:
    """A function for other threads: it raises `Interrupted` in the job of this thread, without grace.

    Outside of `interruptible` it does nothing.
    """
    job = _jobs.current
    return job.interrupt if job is not None else lambda: None


def asker() -> Callable[[str], None]:
    """A function for other threads, called with a reason: as `interrupter`, but with the grace of a first signal."""
    job = _jobs.current
    return job.ask if job is not None else lambda reason: None
