"""Requests of many clients answered by one engine in a thread of its own: rows in, tokens out after each step.

    submit(requests)    from any thread: rows wait in a bounded queue
    turn()              in the loop's thread: cancelled rows leave, waiting rows are admitted or rows in flight step

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
from itertools import islice

from actors.engine.build import current_device
from actors.engine.engine import Ended, Engine
from actors.engine.errors import UserError, alone_error, free_memory, is_out_of_memory
from actors.engine.loop import REFILL_SHARE
from actors.engine.space import Slots
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
        self._deliver: Callable[[Delivery], object] = hand_out
        self._slots = Slots(engine, cache_bytes)
        self._limit = max_rows  # of rows in flight; lower after memory has run out
        self._waiting: deque[_Task] = deque()
        self._flying: dict[int, _Task] = {}  # by ticket
        self._changed = threading.Condition()  # guards _waiting, _closed and the submissions' `cancelled`
        self._closed = self._has_cancelled = False
        self._step_first = False  # whether a step comes before the next admission
        self._waited = 0  # steps that waiting rows have let pass since the last admission
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
            needed = self._slots.bytes_alone(request)
            if needed > self.cache_bytes:
                raise UserError(
                    f"{len(request.prompt_ids)} prompt and up to {request.sampling.max_new_tokens} new tokens need "
                    f"{needed} bytes of cache, this server has {self.cache_bytes}: lower max_tokens"
                )
        if len(requests) > self.max_waiting:
            raise UserError(f"{len(requests)} answers at once; this server queues at most {self.max_waiting}")
        submission = Submission(len(requests), streams)
        with self._changed:
            if self._closed or len(self._waiting) + len(requests) > self.max_waiting:
                raise QueueFull(min(60.0, max(1.0, self._row_seconds * len(self._waiting))))
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
        """Rows in the queue."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Rows in flight."""
        return len(self._flying)

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
        self._fail([*self._take_back(()), *self._waiting], "the server stops")
        self._waiting.clear()

    # in the loop's thread

    def _run(self) -> None:
        with current_device(self.engine.decoder.device):
            while not self._closed:
                if not self.turn():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed or self._waiting)

    def turn(self) -> bool:
        """Let cancelled rows leave, then admit rows or make a step; return whether there were rows."""
        self._drop_cancelled()
        if not (self._waiting or self._flying):
            return False
        tasks: list[_Task] = []
        ran_out = False
        try:
            tasks = self._admissible()
            ended = self._admit(tasks) if tasks else self.engine.step()
        except Exception as error:
            ran_out = isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)
            if not ran_out:
                log.exception("a step of the engine failed")
                self.failures += 1
                # the error's text may hold what no client should see
                self._fail(self._take_back(tasks), f"the server failed: {type(error).__name__}")
        else:
            self._send(ended)
        if ran_out:  # the error is gone: its traceback held tensors
            self._after_out_of_memory(self._take_back(tasks))
        return True

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        with self._changed:
            self._has_cancelled = False
            rows = len(self._waiting) + len(self._flying)
            self._waiting = deque(task for task in self._waiting if not task.submission.cancelled)
        tickets = {ticket for ticket, task in self._flying.items() if task.submission.cancelled}
        self.engine.cancel(tickets)
        self._flying = {ticket: task for ticket, task in self._flying.items() if ticket not in tickets}
        self.cancelled += rows - len(self._waiting) - len(self._flying)

    def _admissible(self) -> list[_Task]:
        """Take the first waiting rows that are admitted now, with at most `PASS_TOKENS` prompt tokens.

        A prefill of one row costs as much as one of a few: beside many rows in flight, few waiting rows wait for
        others, `PATIENCE` steps at most.
        """
        busy = len(self._flying)
        if busy and self._step_first:
            self._step_first = False
            return []
        with self._changed:
            first = list(islice(self._waiting, max(0, self._limit - busy)))
        if first and len(first) < math.ceil(busy / REFILL_SHARE) and self._waited < PATIENCE:
            self._waited += 1
            return []
        requests = [task.request for task in first]
        count = self._slots.fit(requests[: self._pass_size(requests)], self._limit)
        with self._changed:
            return [self._waiting.popleft() for _ in range(count)]

    def _pass_size(self, requests: Sequence[Request]) -> int:
        """Return how many of the first requests share a prefill: the same layers over few enough prompt tokens."""
        layers = [(request.schedule or self.engine.schedule).prompt_layers for request in requests]
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        for count, request in enumerate(requests):
            prompt = tuple(request.prompt_ids)
            tokens += 0 if prompt in prompts else len(prompt)
            prompts.add(prompt)
            if count and (tokens > PASS_TOKENS or layers[count] != layers[0]):
                return count
        return len(requests)

    def _admit(self, tasks: Sequence[_Task]) -> Ended:
        tickets = self.engine.admit([task.request for task in tasks])
        self._flying.update(zip(tickets, tasks, strict=True))
        self._step_first, self._waited = True, 0
        return self.engine.retire()

    def _send(self, ended: Ended) -> None:
        """Send the answers of rows that have ended, and the new tokens of rows in flight that stream."""
        events: Delivery = []
        for ticket, completion in ended:
            events += self._event(self._flying.pop(ticket), completion.token_ids, completion.logprobs, completion)
        if ended:
            now = time.monotonic()
            seconds, self._last_end = (now - self._last_end) / len(ended), now
            self._row_seconds += (seconds - self._row_seconds) / 8
            self.ended, self.failures = self.ended + len(ended), 0
            self._limit = min(self.max_rows, self._limit + len(ended))
        for row in self.engine.rows:
            task = self._flying[row.ticket]
            if task.submission.streams:
                events += self._event(task, row.tokens, row.logprobs, None)
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

    def _after_out_of_memory(self, tasks: Sequence[_Task]) -> None:
        """Let the rows wait again, first of all; half as many of them run together. A row that ran alone fails."""
        self.engine.stats.out_of_memory += 1
        self.engine.release_memory()
        free_memory()
        if len(tasks) == 1:
            request = tasks[0].request
            limit = request.new_tokens_limit(self.engine.decoder.context_length)
            self._fail(tasks, alone_error(len(request.prompt_ids), limit))
            return
        self._limit = max(1, len(tasks) // 2)
        with self._changed:
            self._waiting.extendleft(reversed(tasks))

    def _take_back(self, newcomers: Sequence[_Task]) -> list[_Task]:
        """Drop all rows in flight; return them, oldest first, and the newcomers that had not been admitted."""
        tasks = [self._flying[ticket] for ticket in sorted(self._flying)]
        tasks += [task for task in newcomers if task not in tasks]
        self.engine.close()
        self._flying.clear()
        self._slots.closed()
        self._step_first = False
        return tasks
