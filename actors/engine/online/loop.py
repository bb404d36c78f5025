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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from actors.engine.build import current_device
from actors.engine.errors import UserError
from actors.engine.flight import REFILL_SHARE
from actors.engine.online.delivery import Delivery, Totals
from actors.engine.online.queue import WaitingQueue
from actors.engine.online.submissions import Event, Submission, Task
from actors.engine.out_of_memory import alone_error, free_memory, is_out_of_memory
from actors.engine.protocol import Ended, EngineProtocol
from actors.engine.space import space_of
from actors.engine.types import Request

PASS_TOKENS = 2048  # of prompts computed between two steps: rows in flight wait meanwhile
PATIENCE = 4  # steps that a waiting row lets pass, so that others are admitted with it
SWITCH_SECONDS = 1e-4  # after which a thread of Python makes room for another
FAILURES = 3  # turns that fail, with no row answered between them, before the loop counts as broken
T = TypeVar("T")
log = logging.getLogger(__name__)


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
        self.cache_bytes = cache_bytes
        self.failures = 0  # turns that have failed since a row ended
        self._space = space_of(engine, cache_bytes, max_rows)
        self._limit = max_rows  # lower after memory has run out
        self._queue = WaitingQueue(max_waiting)
        self._flying: dict[int, Task] = {}  # by ticket
        self._delivery = Delivery(engine, events_per_second, self._queue.cancel)
        self._step_first = False  # whether a step comes before the next admission
        self._waited = 0  # steps that waiting rows have let pass since the last admission
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
        self._queue.add([Task(request, submission, index) for index, request in enumerate(requests)])
        return submission

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the loop's thread, between two turns; rows in flight wait meanwhile.

        Raises:
            QueueFull: As many calls wait as rows may.
        """
        return self._queue.call(function)

    def cancel(self, submission: Submission) -> None:
        """Its rows leave with the next turn; `receive` is not called any more after that."""
        self._queue.cancel(submission)

    @property
    def totals(self) -> Totals:
        """Counts since the loop began."""
        return self._delivery.totals

    @property
    def waiting(self) -> int:
        """Rows in the queue."""
        return len(self._queue)

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
        self._queue.close()
        if self._thread is not None:
            self._thread.join()
        self._delivery.fail([*self._flying.values(), *self._queue.empty()], "the server stops")
        self.engine.close()
        self._flying.clear()

    # in the loop's thread

    def _run(self) -> None:
        with current_device(self.engine.decoder.device):
            while self._queue.wait(self._flying):
                self.turn()

    def turn(self) -> bool:
        """Let cancelled rows leave, then admit waiting rows or make a step; whether there was anything to do."""
        self._drop_cancelled()
        called = self._queue.make_call()
        if not (self._queue or self._flying):
            return called
        tasks: Sequence[Task] = ()
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

    def _drop_cancelled(self) -> None:
        if not self._queue.cancelled:
            return
        self.totals.cancelled += self._queue.drop_cancelled()
        tickets = [ticket for ticket, task in self._flying.items() if task.submission.cancelled]
        if tickets:
            self.engine.cancel(tickets)
            for ticket in tickets:
                del self._flying[ticket]
            self.totals.cancelled += len(tickets)

    def _admissible(self) -> list[Task]:
        """The first waiting rows that are admitted now, at most `PASS_TOKENS` of prompts.

        A pass of one row costs as much as one of a few: beside many rows in flight, few waiting rows wait for others,
        but for `PATIENCE` steps at most.
        """
        engine, busy = self.engine, len(self._flying)
        if busy and self._step_first:
            self._step_first = False
            return []
        ready = min(self._limit - busy, len(self._queue))
        if ready < 1:
            return []
        if ready < math.ceil(busy / REFILL_SHARE) and self._waited < PATIENCE:
            self._waited += 1
            return []
        first = self._queue.first(ready)
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

    def _admit(self, tasks: Sequence[Task]) -> Ended:
        tickets = self.engine.admit([task.request for task in tasks])
        self._queue.take(len(tasks))
        self._flying.update(zip(tickets, tasks, strict=True))
        self.totals.prompt_tokens += sum(len(task.request.prompt_ids) for task in tasks if not task.sent)
        self._step_first, self._waited = not self.engine.stepped, 0
        return self.engine.retire()

    def _requeue(self, tickets: Sequence[int]) -> None:
        """Rows whose pages others needed wait first of all; they sample the same tokens again."""
        self._queue.put_back([self._flying.pop(ticket) for ticket in reversed(tickets)])

    def _deliver(self, ended: Ended) -> None:
        now = time.monotonic()
        if ended:
            self.failures = 0
        for ticket, completion in ended:
            task = self._flying.pop(ticket, None)
            if task is not None:
                self._queue.row_ended(now)
                self._delivery.end(task, completion)
        if self._limit < self.max_rows:
            self._limit = min(self.max_rows, self._limit + len(ended))
        self._delivery.stream(self._flying, now)

    def _after_out_of_memory(self, newcomers: Sequence[Task]) -> None:
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
            self._delivery.fail(tasks, alone_error(len(request.prompt_ids), limit))
            return
        self._limit = max(1, len(tasks) // 2)
        self._queue.put_back(tasks)

    def _after_failure(self, newcomers: Sequence[Task], error: str) -> None:
        """The rows in flight and the newcomers, one of which may have caused it, get an error."""
        self.failures += 1
        self._delivery.fail(self._take_back(newcomers), f"the server failed: {error}")

    def _take_back(self, newcomers: Sequence[Task]) -> list[Task]:
        """The rows in flight, oldest first, and the newcomers, which do not wait any more."""
        tasks = [self._flying[ticket] for ticket in sorted(self._flying)]
        tasks += self._queue.take_those(newcomers)  # those that have not been admitted
        self._reset()
        return tasks

    def _reset(self) -> None:
        """Drop the rows in flight; the next ones begin with a new cache."""
        self.engine.close()
        self._flying.clear()
        self._space.closed()
        self._step_first = False
