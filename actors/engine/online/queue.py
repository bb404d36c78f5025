"""Rows that wait to be admitted and functions that wait to be called, from any thread; taken by the loop's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, TypeVar

from actors.engine.online.submissions import QueueFull, Submission, Task

LAST_ENDS = 32  # rows whose ends give the rate at which rows end
T = TypeVar("T")


class WaitingQueue:
    """most: rows, and functions, that may wait."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cancelled = False  # whether a submission has been cancelled since `drop_cancelled`
        self._tasks: deque[Task] = deque()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._ends: deque[float] = deque(maxlen=LAST_ENDS)  # when the last rows ended
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        """Rows that wait."""
        return len(self._tasks)

    # from any thread

    def add(self, tasks: Sequence[Task]) -> None:
        """Raises QueueFull if there is no space for all of them."""
        with self._changed:
            if self._closed:
                raise QueueFull(1.0)
            if len(self._tasks) + len(tasks) > self.most:
                raise QueueFull(self._retry_after())
            self._tasks += tasks
            self._changed.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `make_call` call a function. Raises QueueFull if as many wait as rows may."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed or len(self._calls) >= self.most:
                raise QueueFull(self._retry_after())
            self._calls.append((future, function))
            self._changed.notify()
        return future

    def cancel(self, submission: Submission) -> None:
        """Its rows are dropped with the next `drop_cancelled`."""
        with self._changed:
            submission.cancelled = self.cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """Nothing is added any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _retry_after(self) -> float:
        """Seconds in which rows as many as wait have ended, at the rate of the last ones; at least 1."""
        if len(self._ends) < 2:
            return 1.0
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(60.0, max(1.0, each * len(self._tasks)))

    # in the loop's thread

    def wait(self, busy: Collection[Any]) -> bool:
        """Until there is something to do; False once closed. busy: what else there is to do."""
        with self._changed:
            while not (self._closed or self._tasks or busy or self._calls):
                self._changed.wait()
            return not self._closed

    def make_call(self) -> bool:
        """The first function that waits to be called; whether there was one."""
        with self._changed:
            if not self._calls:
                return False
            future, function = self._calls.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
        return True

    def drop_cancelled(self) -> int:
        """How many rows of cancelled submissions waited."""
        with self._changed:
            self.cancelled = False
            kept = [task for task in self._tasks if not task.submission.cancelled]
            dropped = len(self._tasks) - len(kept)
            self._tasks = deque(kept)
        return dropped

    def first(self, count: int) -> list[Task]:
        """The first rows, which stay."""
        with self._changed:
            return list(islice(self._tasks, count))

    def take(self, count: int) -> list[Task]:
        """The first rows, which leave."""
        with self._changed:
            return [self._tasks.popleft() for _ in range(count)]

    def take_those(self, tasks: Sequence[Task]) -> list[Task]:
        """Those of the rows that wait first of all, which leave."""
        taken = []
        with self._changed:
            while tasks and self._tasks and self._tasks[0] in tasks:
                taken.append(self._tasks.popleft())
        return taken

    def put_back(self, tasks: Sequence[Task]) -> None:
        """The rows wait first of all, in this order."""
        with self._changed:
            self._tasks.extendleft(reversed(tasks))

    def row_ended(self, now: float) -> None:
        """now: seconds of `time.monotonic`."""
        self._ends.append(now)

    def empty(self) -> list[Task]:
        """The rows that wait, which leave; functions that wait are cancelled. After `close`."""
        for future, _ in self._calls:
            future.cancel()
        return self.take(len(self._tasks))
