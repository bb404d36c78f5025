"""Requests of many clients, answered by the engine's loop in a thread of its own: rows in, tokens out after each step.

    submit(requests)    from any thread: rows wait in a bounded queue
    turn()              in the loop's thread: cancelled rows leave, waiting rows are added to the engine's loop, a step

A row's tokens depend neither on its neighbours, nor on when it was admitted, nor on rows that leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.build import current_device
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.loop import REFILL_SHARE, Call, Loop
from actors.engine.types import Completion, FinishReason, Request, TokenLogprob

PASS_TOKENS = 2048  # prompt tokens computed between two steps; rows in flight wait meanwhile
PATIENCE = 4  # steps that waiting rows let pass, so that more rows share their prefill
SWITCH_SECONDS = 1e-4  # interval after which a thread of Python makes room for another
MAX_FAILURES = 3  # failed turns without an answered row between them, after which the loop counts as broken
log = logging.getLogger(__name__)


class QueueFull(Exception):
    """The queue has no space. retry_after: estimated seconds until it has."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


class ClientGone(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class Event:
    """New tokens of one row.

    Args:
        index: Number of the request in its submission.
        tokens: Tokens sampled since the row's last event; without streaming, all of them at the end.
        logprobs: Their log-probabilities, if the request asks for them.
        completion: The answer, in the last event. An error without tokens: the row could not be answered.
    """

    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None


@dataclass(eq=False)
class Submission:
    """Requests that were submitted together, and their events that nobody has taken yet.

    Args:
        left: Rows whose last event has not been taken.
        streams: Whether tokens are sent as they are sampled, or with the answers only.
        cancelled: Whether the rows are no longer wanted.
    """

    left: int
    streams: bool
    cancelled: bool = False
    _events: dict[int, Event] = field(default_factory=dict)  # by row
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _client_gone: bool = False

    def put(self, new: Event) -> None:
        """Add an event to those of its row that have not been taken; called in the reader's thread."""
        old = self._events.get(new.index, Event(new.index))
        tokens, logprobs = old.tokens + new.tokens, old.logprobs + new.logprobs
        self._events[new.index] = Event(new.index, tokens, logprobs, new.completion)
        self._ready.set()

    def leave(self) -> None:
        """Make `take` raise ClientGone."""
        self._client_gone = True
        self._ready.set()

    async def take(self) -> list[Event]:
        """Wait for events; return at most one of each row. Raises ClientGone."""
        await self._ready.wait()
        self._ready.clear()
        if self._client_gone:
            raise ClientGone
        events, self._events = list(self._events.values()), {}
        self.left -= sum(event.completion is not None for event in events)
        return events


Delivery = list[tuple[Submission, Event]]


def hand_out(events: Delivery) -> None:
    """Put events into their submissions."""
    for submission, event in events:
        submission.put(event)


@dataclass(eq=False)
class _Task:
    """A row that waits or is in flight. sent: number of its tokens that have been sent."""

    request: Request
    submission: Submission
    index: int
    sent: int = 0


class OnlineLoop:
    """Answers requests as they come.

    Args:
        engine: Has no rows in flight and is used by nobody else.
        cache_bytes: Bytes of key/value cache of the rows in flight.
        max_rows: Largest number of rows in flight.
        max_waiting: Largest number of rows in the queue.
    """

    def __init__(self, engine: Engine, *, cache_bytes: int, max_rows: int, max_waiting: int) -> None:
        self.engine, self.max_rows, self.max_waiting, self.cache_bytes = engine, max_rows, max_waiting, cache_bytes
        self.ended = self.cancelled = self.failed = 0  # rows
        self.failures = 0  # failed turns since a row ended
        self._loop = Loop(
            engine,
            budget_bytes=cache_bytes,
            max_rows=max_rows,
            share_prefixes=False,
            scheduler="refill",
            joins_calls=True,
            online=True,
        )
        self._deliver: Callable[[Delivery], object] = hand_out
        self._waiting: deque[_Task] = deque()
        self._tasks: dict[tuple[Call, int], _Task] = {}  # in the loop, by call and number in it
        self._changed = threading.Condition()  # guards _waiting, _closed and the submissions' `cancelled`
        self._closed = self._has_cancelled = False
        self._step_first = False  # whether a decode step comes before the next prefill
        self._waited = 0  # steps that waiting rows have let pass
        self._row_seconds = 0.0  # moving average of the time between two ends of rows
        self._last_end = time.monotonic()
        self._thread: threading.Thread | None = None

    # from any thread

    def submit(self, requests: Sequence[Request], *, streams: bool) -> Submission:
        """Queue requests, at least one.

        Raises:
            UserError: A request that can never run.
            QueueFull: The queue has no space for all of them.
        """
        for request in requests:
            limit = request.new_tokens_limit(self.engine.decoder.context_length)
            needed = self.engine.row_bytes(len(request.prompt_ids), limit, request.schedule)
            if needed > self.cache_bytes:
                raise UserError(
                    f"{len(request.prompt_ids)} prompt and up to {request.sampling.max_new_tokens} new tokens need "
                    f"{needed} bytes of cache, this server has {self.cache_bytes}: lower max_tokens"
                )
        if len(requests) > self.max_waiting:
            raise UserError(f"{len(requests)} answers at once; this server queues at most {self.max_waiting}")
        submission = Submission(len(requests), streams)
        with self._changed:
            if self._closed or self.waiting + len(requests) > self.max_waiting:
                raise QueueFull(min(60.0, max(1.0, self._row_seconds * self.waiting)))
            self._waiting += [_Task(request, submission, index) for index, request in enumerate(requests)]
            self._changed.notify()
        return submission

    def cancel(self, submission: Submission) -> None:
        """Let the submission's rows leave with the next turn; no event is sent after that."""
        with self._changed:
            submission.cancelled = self._has_cancelled = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Rows that are not in flight yet."""
        return len(self._waiting) + max(0, len(self._tasks) - len(self.engine.rows))

    @property
    def in_flight(self) -> int:
        """Rows in flight."""
        return len(self.engine.rows)

    @property
    def healthy(self) -> bool:
        """False once the engine fails turn after turn, or the thread has ended."""
        return self.failures < MAX_FAILURES and not (self._thread is not None and not self._thread.is_alive())

    def start(self, deliver: Callable[[Delivery], object]) -> None:
        """Answer in a thread of its own until `close`.

        The thread gives Python's lock back in each kernel; with the default interval it would wait 5 ms for it behind
        the threads that serve clients.

        Args:
            deliver: Has `hand_out` called in the readers' thread; called in the loop's thread, once a turn.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current turn; rows that have not ended get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._loop.cancel(self._tasks.keys())
        self._fail([*self._tasks.values(), *self._waiting], "the server stops")
        self._tasks.clear()
        self._waiting.clear()

    # in the loop's thread

    def _run(self) -> None:
        with current_device(self.engine.decoder.device):
            while not self._closed:
                if not self.turn():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed or self._waiting)

    def turn(self) -> bool:
        """Let cancelled rows leave, admit waiting rows, or make a step; return whether there were rows."""
        self._drop_cancelled()
        self._add()
        if not self._tasks:
            return False
        try:
            ended = self._loop.step()
        except Exception as error:
            log.exception("a step of the engine failed")
            self.failures += 1
            failed = [row for row in self._tasks if row[0].error is not None]
            # the error's text may hold what no client should see
            self._fail([self._tasks.pop(row) for row in failed], f"the server failed: {type(error).__name__}")
        else:
            self._send(ended)
        return True

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        with self._changed:
            self._has_cancelled = False
            rows = len(self._waiting) + len(self._tasks)
            self._waiting = deque(task for task in self._waiting if not task.submission.cancelled)
        gone = {row for row, task in self._tasks.items() if task.submission.cancelled}
        self._loop.cancel(gone)
        self._tasks = {row: task for row, task in self._tasks.items() if row not in gone}
        self.cancelled += rows - len(self._waiting) - len(self._tasks)

    def _add(self) -> None:
        """Make a call of the first waiting rows, of one speed and with at most `PASS_TOKENS` prompt tokens.

        A prefill of one row costs as much as one of a few: beside many rows in flight, few waiting rows wait for
        others, `PATIENCE` steps at most. Between two prefills the rows in flight make a step.
        """
        busy = len(self.engine.rows)
        if not self._waiting or self._loop.has_waiting:
            return
        if busy and self._step_first:
            self._step_first = False
            return
        if len(self._waiting) < math.ceil(busy / REFILL_SHARE) and self._waited < PATIENCE:
            self._waited += 1
            return
        tasks, tokens = [self._waiting.popleft()], 0
        schedule = tasks[0].request.schedule
        with self._changed:
            while self._waiting and len(tasks) < self.max_rows:
                request = self._waiting[0].request
                tokens += len(request.prompt_ids)
                if request.schedule is not schedule or tokens > PASS_TOKENS:
                    break
                tasks.append(self._waiting.popleft())
        call = self._loop.add([task.request for task in tasks])
        self._tasks |= {(call, row): task for row, task in enumerate(tasks)}
        self._step_first, self._waited = True, 0

    def _send(self, ended: Sequence[tuple[Call, int, Completion]]) -> None:
        """Send the answers of rows that have ended, and the new tokens of rows in flight that stream."""
        events: Delivery = []
        for call, row, completion in ended:
            task = self._tasks.pop((call, row))
            events += self._event(task, completion.token_ids, completion.logprobs, completion)
        for call, row, running in self._loop.running():
            task = self._tasks[call, row]
            if task.submission.streams:
                events += self._event(task, running.tokens, running.logprobs, None)
        if ended:
            now = time.monotonic()
            seconds, self._last_end = (now - self._last_end) / len(ended), now
            self._row_seconds += (seconds - self._row_seconds) / 8
            self.ended, self.failures = self.ended + len(ended), 0
        if events:
            self._deliver(events)

    def _event(
        self,
        task: _Task,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        completion: Completion | None,
    ) -> Delivery:
        """Return the event of the tokens that have not been sent; none if nothing is new or wanted."""
        first, task.sent = task.sent, max(task.sent, len(tokens))
        if task.submission.cancelled or (completion is None and task.sent == first):
            return []
        new = Event(task.index, tuple(tokens[first:]), tuple((logprobs or ())[first:]), completion)
        return [(task.submission, new)]

    def _fail(self, tasks: Sequence[_Task], error: str) -> None:
        """Send an error in place of answers."""
        self.failed += len(tasks)
        done = Completion((), FinishReason.ERROR, None, error=error)
        if events := [event for task in tasks for event in self._event(task, (), (), done)]:
            self._deliver(events)
