"""Requests of many threads answered by one engine, one token a step: what a server needs of it.

    submit(requests, receive)    from any thread: rows wait in a bounded queue
    turn()                       cancelled rows leave, waiting rows are admitted, rows in flight make a step

`start` calls `turn` in a thread of its own for as long as there are rows. Rows in flight and their caches are those of
`scheduler`'s refill: ragged depth, each row at its own position and speed. A row's tokens do not depend on its
neighbours, on when it was admitted, or on rows that leave.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from actors.engine.build import current_device
from actors.engine.errors import UserError
from actors.engine.flight import REFILL_SHARE
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.protocol import Ended, EngineProtocol
from actors.engine.space import space_of
from actors.engine.types import Completion, FinishReason, Request, TokenLogprob

PASS_TOKENS = 2048  # of prompts computed between two steps: rows in flight wait meanwhile
PATIENCE = 4  # steps that a waiting row lets pass, so that others are admitted with it
SWITCH_SECONDS = 1e-4  # after which a thread of Python makes room for another
FAILURES = 3  # turns that fail, with no row answered between them, before the loop counts as broken
T = TypeVar("T")
log = logging.getLogger(__name__)


class QueueFull(Exception):
    """The queue holds as many rows as it may. retry_after: seconds until it has space, estimated."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Event:
    """News of one row.

    Args:
        index: Number of the request among those submitted together.
        tokens: New tokens; of a submission that does not stream, all of them at the end.
        logprobs: Of these tokens, if the request asks for them.
        completion: The answer, with the last event. An error without tokens: the row could not be answered.
    """

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = None

    def and_then(self, later: Event) -> Event:
        """Both as one; `later` is the same row's."""
        return Event(self.index, self.tokens + later.tokens, self.logprobs + later.logprobs, later.completion)


@dataclass(eq=False)
class Submission:
    """Requests that were submitted together. cancelled: none of its rows is wanted any more."""

    receive: Callable[[Event], None]
    streams: bool
    cancelled: bool = False


@dataclass(eq=False)
class _Task:
    """A row that waits or is in flight. sent: its tokens that `receive` has got."""

    request: Request
    submission: Submission
    index: int
    sent: int = 0


@dataclass
class Totals:
    """Counts since the loop began."""

    ended: int = field(default=0, metadata={"unit": "rows answered"})
    cancelled: int = field(default=0, metadata={"unit": "rows cancelled"})
    failed: int = field(default=0, metadata={"unit": "rows that could not be answered"})
    prompt_tokens: int = field(default=0, metadata={"unit": "tokens of admitted prompts"})
    generated_tokens: int = field(default=0, metadata={"unit": "tokens of rows answered"})
    layer_steps: int = field(default=0, metadata={"unit": "layers run over decode steps of rows answered"})
    full_layer_steps: int = field(default=0, metadata={"unit": "layers that full depth would have run"})
    out_of_memory: int = field(default=0, metadata={"unit": "times that memory ran out"})


class OnlineLoop:
    """Answers requests as they come.

    Args:
        engine: Has no rows in flight; nobody else uses it.
        cache_bytes: Bytes of key/value cache of the rows in flight.
        max_rows: Most rows in flight.
        max_waiting: Most rows in the queue.
        events_per_second: Most events with tokens of rows in flight; where there would be more, tokens of a row share
            one. A row's first token and its completion are sent at once, and not counted.
    """

    def __init__(
        self,
        engine: EngineProtocol,
        *,
        cache_bytes: int,
        max_rows: int,
        max_waiting: int,
        events_per_second: float = math.inf,
    ) -> None:
        self.engine, self.max_rows, self.max_waiting = engine, max_rows, max_waiting
        self.cache_bytes, self.events_per_second = cache_bytes, events_per_second
        self.totals = Totals()
        self.failures = 0  # turns that have failed since a row ended
        self._space = space_of(engine, cache_bytes, max_rows)
        self._limit = max_rows  # lower after memory has run out
        self._waiting: deque[_Task] = deque()
        self._flying: dict[int, _Task] = {}  # by ticket
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._cancelled = False  # whether a submission has been cancelled since the last turn
        self._step_first = False  # whether a step comes before the next admission
        self._waited = 0  # steps that waiting rows have let pass since the last admission
        self._ends: deque[float] = deque(maxlen=32)  # when the last rows ended
        self._send_at = 0.0  # when tokens of all rows in flight are sent again
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    # from any thread

    def submit(self, requests: Sequence[Request], receive: Callable[[Event], None], *, streams: bool) -> Submission:
        """Queue rows. `receive` is called with their events, in the loop's thread.

        Args:
            requests: At least one.
            receive: Must return at once; what it raises cancels the submission.
            streams: Whether it gets tokens as they are sampled, or only the answers.

        Raises:
            UserError: A request that can never run.
            QueueFull: The queue has no space for all of them.
        """
        decoder = self.engine.decoder
        for request in requests:
            needed = self._space.bytes_alone(request, request.new_tokens_limit(decoder.context_length))
            if needed > self.cache_bytes:
                raise UserError(
                    f"{len(request.prompt_ids)} prompt and up to {request.sampling.max_new_tokens} new tokens need "
                    f"{needed} bytes of cache, this server has {self.cache_bytes}: lower max_tokens"
                )
        if len(requests) > self.max_waiting:
            raise UserError(f"{len(requests)} answers at once; this server queues at most {self.max_waiting}")
        submission = Submission(receive, streams)
        with self._changed:
            if self._closed:
                raise QueueFull(1.0)
            if len(self._waiting) + len(requests) > self.max_waiting:
                raise QueueFull(self._retry_after())
            self._waiting += [_Task(request, submission, index) for index, request in enumerate(requests)]
            self._changed.notify()
        return submission

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the loop's thread, between two turns; rows in flight wait meanwhile.

        Raises:
            QueueFull: As many calls wait as rows may.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closed or len(self._calls) >= self.max_waiting:
                raise QueueFull(self._retry_after())
            self._calls.append((future, function))
            self._changed.notify()
        return future

    def cancel(self, submission: Submission) -> None:
        """Its rows leave with the next turn; `receive` is not called any more after that."""
        with self._changed:
            submission.cancelled = self._cancelled = True
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
        return self.failures < FAILURES and not (self._thread is not None and not self._thread.is_alive())

    def start(self) -> None:
        """Answer in a thread of its own, until `close`.

        Python then passes its lock on every 0.1 ms: the thread gives it back for each kernel, and would wait 5 ms for
        it behind the threads that serve clients.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current turn; rows that have not ended get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._fail([*self._flying.values(), *self._waiting], "the server stops")
        for future, _ in self._calls:
            future.cancel()
        self.engine.close()
        self._flying.clear()
        self._waiting.clear()

    def _retry_after(self) -> float:
        """Seconds in which rows as many as wait have ended, at the rate of the last ones; at least 1."""
        if len(self._ends) < 2:
            return 1.0
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(60.0, max(1.0, each * len(self._waiting)))

    # in the loop's thread

    def _run(self) -> None:
        with current_device(self.engine.decoder.device):
            while True:
                with self._changed:
                    while not (self._closed or self._waiting or self._flying or self._calls):
                        self._changed.wait()
                    if self._closed:
                        return
                self.turn()

    def turn(self) -> bool:
        """Let cancelled rows leave, then admit waiting rows or make a step; whether there was anything to do."""
        self._drop_cancelled()
        called = self._make_call()
        if not (self._waiting or self._flying):
            return called
        tasks: Sequence[_Task] = ()
        try:
            tasks = self._admissible()
            ended = self._admit(tasks) if tasks else self.engine.step()
            self._requeue(self.engine.take_preempted())
            self._deliver(ended)
        except Exception as error:
            if not (isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error)):
                log.exception("a step of the engine failed")
                self._after_failure(tasks, type(error).__name__)  # its text may hold what no client should see
                return True
            ran_out = True
        else:
            ran_out = False
        if ran_out:  # the error is gone: its traceback held tensors
            self._after_out_of_memory(tasks)
        return True

    def _make_call(self) -> bool:
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

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        with self._changed:
            self._cancelled = False
            kept = [task for task in self._waiting if not task.submission.cancelled]
            self.totals.cancelled += len(self._waiting) - len(kept)
            self._waiting = deque(kept)
        tickets = [ticket for ticket, task in self._flying.items() if task.submission.cancelled]
        if tickets:
            self.engine.cancel(tickets)
            for ticket in tickets:
                del self._flying[ticket]
            self.totals.cancelled += len(tickets)

    def _admissible(self) -> list[_Task]:
        """The first waiting rows that are admitted now, at most `PASS_TOKENS` of prompts.

        A pass of one row costs as much as one of a few: beside many rows in flight, few waiting rows wait for others,
        but for `PATIENCE` steps at most.
        """
        engine, busy = self.engine, len(self._flying)
        if busy and self._step_first:
            self._step_first = False
            return []
        ready = min(self._limit - busy, len(self._waiting))
        if ready < 1:
            return []
        if ready < math.ceil(busy / REFILL_SHARE) and self._waited < PATIENCE:
            self._waited += 1
            return []
        with self._changed:
            first = list(islice(self._waiting, ready))
        requests = [task.request for task in first]
        count = self._pass_size(requests)
        count = self._space.fit(requests[:count], self._limit)
        if busy:
            count = min(count, engine.first_pass(requests[:count], ())) if count else 0
        return first[: count if busy else max(1, count)]

    def _pass_size(self, requests: Sequence[Request]) -> int:
        """How many of the first requests share a pass: the same layers over their prompts, and not too many tokens."""
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
        with self._changed:
            for _ in tasks:
                self._waiting.popleft()
        self._flying.update(zip(tickets, tasks, strict=True))
        self.totals.prompt_tokens += sum(len(task.request.prompt_ids) for task in tasks if not task.sent)
        self._step_first, self._waited = not self.engine.stepped, 0
        return self.engine.retire()

    def _requeue(self, tickets: Sequence[int]) -> None:
        """Rows whose pages others needed wait first of all; they sample the same tokens again."""
        with self._changed:
            self._waiting.extendleft(self._flying.pop(ticket) for ticket in tickets)

    def _deliver(self, ended: Ended) -> None:
        now = time.monotonic()
        if ended:
            self.failures = 0
        for ticket, completion in ended:
            task = self._flying.pop(ticket, None)
            if task is not None:
                self._ends.append(now)
                self._count(task, completion)
                self._send(task, completion.token_ids, completion.logprobs, completion)
        if self._limit < self.max_rows:
            self._limit = min(self.max_rows, self._limit + len(ended))
        self._stream(now)

    def _stream(self, now: float) -> None:
        """Send the tokens of the rows in flight whose time has come."""
        is_time = now >= self._send_at
        tasks = {
            ticket: task
            for ticket, task in self._flying.items()
            if task.submission.streams and (is_time or not task.sent)
        }
        generated = self.engine.generated() if tasks else {}
        if generated and is_time:
            self._send_at = now + len(tasks) / self.events_per_second
        for row in self.engine.rows if generated else ():
            task, tokens = tasks.get(row.ticket), generated.get(row.ticket, ())
            if task is not None and len(tokens) > task.sent:
                self._send(task, tokens, row.logprobs, None)

    def _count(self, task: _Task, completion: Completion) -> None:
        totals, steps = self.totals, len(completion.token_ids) - 1
        schedule = task.request.schedule or self.engine.schedule
        totals.ended += 1
        totals.generated_tokens += len(completion.token_ids)
        totals.layer_steps += schedule.layer_steps(steps)
        totals.full_layer_steps += schedule.num_layers * max(0, steps)

    def _send(
        self,
        task: _Task,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        completion: Completion | None,
    ) -> None:
        """Send the tokens that `receive` has not got."""
        submission, first = task.submission, task.sent
        if submission.cancelled:
            return
        task.sent = max(first, len(tokens))
        try:
            submission.receive(Event(task.index, tuple(tokens[first:]), tuple((logprobs or ())[first:]), completion))
        except Exception:
            log.exception("a receiver failed; its rows are cancelled")
            self.cancel(submission)

    def _after_out_of_memory(self, newcomers: Sequence[_Task]) -> None:
        """The rows in flight and the newcomers wait again, first of all; half as many of them run together.

        An error ends a row that ran alone.
        """
        self.totals.out_of_memory += 1
        tasks = self._take_back(newcomers)
        reduced = self.engine.release_memory()
        free_memory()
        if len(tasks) == 1 and not reduced:
            request = tasks[0].request
            limit = request.new_tokens_limit(self.engine.decoder.context_length)
            self._fail(tasks, alone_error(len(request.prompt_ids), limit))
            return
        self._limit = max(1, len(tasks) // 2)
        with self._changed:
            self._waiting.extendleft(reversed(tasks))

    def _after_failure(self, newcomers: Sequence[_Task], error: str) -> None:
        """The rows in flight and the newcomers, one of which may have caused it, get an error."""
        self.failures += 1
        self._fail(self._take_back(newcomers), f"the server failed: {error}")

    def _take_back(self, newcomers: Sequence[_Task]) -> list[_Task]:
        """The rows in flight, oldest first, and the newcomers, which do not wait any more."""
        tasks = [self._flying[ticket] for ticket in sorted(self._flying)]
        with self._changed:
            while newcomers and self._waiting and self._waiting[0] in newcomers:  # else they have been admitted
                tasks.append(self._waiting.popleft())
        self._reset()
        return tasks

    def _reset(self) -> None:
        """Drop the rows in flight; the next ones begin with a new cache."""
        self.engine.close()
        self._flying.clear()
        self._space.closed()
        self._step_first = False

    def _fail(self, tasks: Sequence[_Task], error: str) -> None:
        for task in tasks:
            self.totals.failed += 1
            self._send(task, (), (), Completion((), FinishReason.ERROR, None, error=error))
