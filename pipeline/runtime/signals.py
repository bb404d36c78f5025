"""What SIGTERM and SIGINT do: `Interrupted` in the main thread, at once or after a grace for what is at work.

signal ──> Interrupted                                         outside of `graceful`
signal ──> nothing new is begun ──> idle, or time is up ──> Interrupted      inside
                    signal again ──> Interrupted
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

POLL_SECONDS = 0.2


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGINT; the same command finishes the job."""


class Grace:
    """The main thread is at work that may be finished after the first signal.

    seconds: how long. stop: begin nothing new; returns what is at work, by number. at_work: what still is. Both are
    called in a thread of their own and end the grace if they return nothing. After `ask` that thread sends SIGTERM
    to this process; signal: name of the first one, None so far.
    """

    def __init__(self, seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]]) -> None:
        self.seconds = seconds
        self.stop = stop
        self.at_work = at_work
        self.signal: str | None = None
        # a handler may run inside any other call of the main thread, and this queue alone can be put into from there
        self._asked: SimpleQueue[str | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="grace", daemon=True)

    def ask(self, name: str) -> None:
        """The first signal has come."""
        self.signal = name
        self._asked.put(name)

    def begin(self) -> None:
        """From now on `ask` may be called."""
        self._thread.start()

    def end(self) -> None:
        """Nothing is called any more, and no signal sent, once this returns."""
        self._asked.put(None)
        self._thread.join()

    def _wait(self) -> None:
        if self._asked.get() is None:
            return
        raised, at_work = _raised, self.stop()
        if at_work:
            print(
                f"stopping: {len(at_work)} shards in flight are given up to {self.seconds:g} s; "
                "once more stops at once",
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
        while not raised.is_set():  # a signal that comes just before a call that waits does not end it
            os.kill(os.getpid(), signal.SIGTERM)
            try:
                self._asked.get(timeout=POLL_SECONDS)
                return
            except Empty:
                continue


_grace: Grace | None = None  # as signals are, of the whole process
_shielded = False
_missed = ""  # the signal that came while shielded
_raised = threading.Event()  # `Interrupted` is on its way, or nobody waits for it any more


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGINT become `Interrupted` in the main thread."""
    global _raised
    _raised = raised = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        global _missed
        name = signal.Signals(number).name
        if _shielded:
            _missed = name
            return
        if _grace is not None and _grace.signal is None:
            _grace.ask(name)
            return
        raised.set()
        raise Interrupted(name if _grace is None or _grace.signal is None else _grace.signal)

    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: whoever called us handles signals
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        raised.set()


@contextmanager
def graceful(seconds: float, stop: Callable[[], set[int]], at_work: Callable[[], set[int]]) -> Iterator[Grace]:
    """The first signal is answered as `Grace` says. Work may end by itself after it: look at `signal` then."""
    global _grace
    grace = Grace(seconds, stop, at_work)
    grace.begin()
    if seconds > 0:
        _grace = grace
    try:
        yield grace
    finally:
        try:
            grace.end()
        finally:
            _grace = None


@contextmanager
def shielded() -> Iterator[None]:
    """Clearing up that a signal must not cut short: `Interrupted` comes at its end."""
    global _shielded, _missed
    _shielded, _missed = True, ""
    try:
        yield
    finally:
        _shielded = False
    if _missed:
        raise Interrupted(_missed)


def interrupt_at_once() -> None:
    """Raise `Interrupted` in the main thread, from another one, without grace."""
    if _grace is not None and _grace.signal is None:
        _grace.signal = signal.SIGTERM.name
    raised = _raised
    while not raised.is_set():  # see above
        os.kill(os.getpid(), signal.SIGTERM)
        if _shielded or raised.wait(POLL_SECONDS):
            return
