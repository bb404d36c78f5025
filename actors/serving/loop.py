"""Answers requests of many clients with the engine's loop, in a separate thread. New tokens are sent after each step.

    submit(requests)    called in any thread: adds rows (one per answer) to a queue of limited length
    turn()              called in the loop's thread: drops cancelled rows, adds waiting rows to the engine, runs a step

A row's tokens do not depend on other rows, or on when the row was admitted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from actors.engine.build import current_device
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.loop import REFILL_SHARE, Call, Loop
from actors.engine.types import Completion, FinishReason, Request, TokenLogprob

PASS_TOKENS = 2048  # maximum number of prompt tokens in one prefill; rows in flight wait during a prefill
PATIENCE = 4  # maximum number of decode steps for which waiting rows are held back, so that more rows share a prefill
SWITCH_SECONDS = 1e-4  # Python's switch interval between threads, see `OnlineLoop.start`
MAX_FAILURES = 3  # the loop is unhealthy after this many failed steps since a row was last answered
STOPS = "the server stops"
log = logging.getLogger(__name__)


class QueueFull(Exception):
    """Raised if the queue has no space for the rows of a request."""


class Closed(Exception):
    """Raised if the loop takes no more requests, because the server stops."""


class ClientGone(Exception):
    """Raised if the client has closed its connection."""


@dataclass(frozen=True)
class Event:
    """New output of one row. Without streaming, there is one event with all tokens."""

    index: int  # index of the row in its submission
    tokens: Sequence[int]  # tokens sampled since the row's previous event
    logprobs: Sequence[TokenLogprob]  # log-probabilities of `tokens`, if the request asks for them
    # set only in the row's last event. A completion with an error and without tokens means that there is no answer
    completion: Completion | None


@dataclass(eq=False)
class ServedRow:
    """A request and its tokens so far. The loop's thread adds tokens, and the reader takes them."""

    request: Request
    submission: Submission
    index: int
    tokens: Sequence[int] = ()  # the engine's own list, which grows; the first `count` tokens may be read
    logprobs: Sequence[TokenLogprob] = ()
    count: int = 0
    completion: Completion | None = None  # set last: a reader that sees it may read the other fields
    taken: int = 0  # number of tokens that the reader has taken
    has_ended: bool = False  # whether the reader has taken the completion

    def put(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Set all tokens so far, and their log-probabilities."""
        self.tokens, self.logprobs, self.count = tokens, logprobs or (), len(tokens)

    def take(self) -> Event | None:
        """Return the row's output since the last call; None if there is none."""
        completion, first = self.completion, self.taken
        tokens = tuple(self.tokens[first : self.count])  # fewer than before if memory ran out: the row starts again
        if self.has_ended or (completion is None and not tokens):
            return None
        self.has_ended, self.taken = completion is not None, first + len(tokens)
        return Event(self.index, tokens, tuple(self.logprobs[first : self.taken]), completion)


@dataclass(eq=False)
class Submission:
    """Requests that a client has submitted together."""

    streams: bool  # whether tokens are sent as they are sampled. If not, they are sent when their row has ended
    cancelled: bool = False  # whether to drop the rows
    rows: list[ServedRow] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    _client_gone: bool = False

    @property
    def left(self) -> int:
        """Number of rows whose last event has not been taken."""
        return sum(not row.has_ended for row in self.rows)

    def leave(self) -> None:
        """Make `take` raise ClientGone, because the client has closed its connection."""
        self._client_gone = True
        self.ready.set()

    async def take(self) -> list[Event]:
        """Wait for new output; return at most one event for each row. Raises ClientGone if `leave` has been called."""
        await self.ready.wait()
        self.ready.clear()
        if self._client_gone:
            raise ClientGone
        return [event for row in self.rows if (event := row.take()) is not None]


def wake(submissions: Iterable[Submission]) -> None:
    """Wake the readers that wait for output of these submissions. Call this in the readers' thread."""
    for submission in submissions:
        submission.ready.set()


class OnlineLoop:
    """Queues requests and answers them with one engine.

    Args:
        engine: An engine without rows in flight; nothing else may use the engine.
        cache_bytes: Bytes of KV cache for the rows in flight.
        max_rows: Maximum number of rows in flight.
        max_waiting: Maximum number of rows in the queue.
    """

    def __init__(self, engine: Engine, *, cache_bytes: int, max_rows: int, max_waiting: int) -> None:
        self.engine, self.max_rows, self.max_waiting, self.cache_bytes = engine, max_rows, max_waiting, cache_bytes
        self.ended = self.cancelled = self.failed = 0  # number of rows with this outcome so far
        self.failures = 0  # failed steps since a row was last answered
        self._loop = Loop(
            engine, budget_bytes=cache_bytes, max_rows=max_rows, share_prefixes=False, scheduler="refill", online=True
        )
        self._wake: Callable[[set[Submission]], object] = wake
        self._waiting: deque[ServedRow] = deque()
        self._rows: dict[tuple[Call, int], ServedRow] = {}  # (call, index in the call) -> row, for the rows in `_loop`
        self._changed = threading.Condition()  # guards _waiting, _closed and the submissions' `cancelled`
        self._closed = self._has_cancelled = False
        self._step_first = False  # whether a decode step must run before the next prefill
        self._waited = 0  # steps for which waiting rows have been held back
        self._thread: threading.Thread | None = None

    # methods for any thread

    def submit(self, requests: Sequence[Request], *, streams: bool) -> Submission:
        """Queue one or more requests.

        Raises:
            UserError: A request can never run.
            QueueFull: The queue has no space for all requests.
            Closed: `close` has been called.
        """
        for request in requests:
            limit = request.new_tokens_limit(self.engine.decoder.context_length)
            needed = self.engine.row_bytes(len(request.prompt_ids), limit, request.schedule)
            if needed > self.cache_bytes:
                raise UserError(
                    f"{len(request.prompt_ids)} prompt tokens and up to {request.sampling.max_new_tokens} new tokens "
                    f"need {needed} bytes of cache, but this server has {self.cache_bytes}: lower max_tokens"
                )
        if len(requests) > self.max_waiting:
            raise UserError(
                f"the request asks for {len(requests)} answers, but this server queues at most {self.max_waiting}: "
                "send fewer prompts, or lower n"
            )
        submission = Submission(streams)
        submission.rows = [ServedRow(request, submission, index) for index, request in enumerate(requests)]
        with self._changed:
            if self._closed:
                raise Closed(STOPS)
            if self.waiting + len(requests) > self.max_waiting:
                raise QueueFull("too many requests are waiting")
            self._waiting += submission.rows
            self._changed.notify()
        return submission

    def cancel(self, submission: Submission) -> None:
        """Drop the submission's rows before the next step."""
        with self._changed:
            submission.cancelled = self._has_cancelled = True
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Number of rows that are not in flight yet."""
        return len(self._waiting) + max(0, len(self._rows) - len(self.engine.rows))

    @property
    def healthy(self) -> bool:
        """False if `MAX_FAILURES` steps have failed since a row was last answered, or if the thread has ended."""
        return self.failures < MAX_FAILURES and (self._thread is None or self._thread.is_alive())

    def start(self, wake: Callable[[set[Submission]], object]) -> None:
        """Answer requests in a new thread until `close`.

        Shorten Python's switch interval too: the new thread releases the GIL in each kernel, and with the default
        interval it would wait up to 5 ms to get the GIL back from the threads that serve clients.

        Args:
            wake: Called in the new thread when there is output. Must call this module's `wake` in the readers' thread.
        """
        sys.setswitchinterval(SWITCH_SECONDS)
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the current step. Rows that have not ended get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._loop.cancel(self._rows.keys())
        self._fail([*self._rows.values(), *self._waiting], STOPS)
        self._rows.clear()
        self._waiting.clear()

    # methods for the loop's thread

    def _run(self) -> None:
        with current_device(self.engine.decoder.device):
            while not self._closed:
                if not self.turn():
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed or self._waiting)

    def turn(self) -> bool:
        """Drop cancelled rows, add waiting rows, and step the engine's loop. Return whether there were rows."""
        self._drop_cancelled()
        self._add()
        if not self._rows:
            return False
        try:
            ended = self._loop.step()
        except Exception as error:
            log.exception("a step of the engine failed")
            self.failures += 1
            failed = [row for row in self._rows if row[0].error is not None]
            # clients get only the type of the error, because its message may hold secrets
            self._fail([self._rows.pop(row) for row in failed], f"the server failed: {type(error).__name__}")
        else:
            self._send(ended)
        return True

    def _drop_cancelled(self) -> None:
        if not self._has_cancelled:
            return
        with self._changed:
            self._has_cancelled = False
            before = len(self._waiting) + len(self._rows)
            self._waiting = deque(row for row in self._waiting if not row.submission.cancelled)
        gone = {key for key, row in self._rows.items() if row.submission.cancelled}
        self._loop.cancel(gone)
        self._rows = {key: row for key, row in self._rows.items() if key not in gone}
        self.cancelled += before - len(self._waiting) - len(self._rows)

    def _add(self) -> None:
        """Move the oldest waiting rows with equal schedules to the engine's loop, up to `PASS_TOKENS` prompt tokens.

        Rows in flight get at least one decode step between two prefills. A prefill of one row takes as long as a
        prefill of a few rows. So while many rows are in flight, a few waiting rows are held back until more rows come,
        for at most `PATIENCE` steps.
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
        rows = [self._waiting.popleft()]
        tokens = len(rows[0].request.prompt_ids)
        with self._changed:
            while self._waiting and len(rows) < self.max_rows:
                request = self._waiting[0].request
                tokens += len(request.prompt_ids)
                if request.schedule is not rows[0].request.schedule or tokens > PASS_TOKENS:
                    break
                rows.append(self._waiting.popleft())
        call = self._loop.add([row.request for row in rows])
        self._rows |= {(call, number): row for number, row in enumerate(rows)}
        self._step_first, self._waited = True, 0

    def _send(self, ended: Sequence[tuple[Call, int, Completion]]) -> None:
        """Pass the completions of ended rows and the new tokens of streamed rows to the readers."""
        news: set[Submission] = set()
        for call, number, completion in ended:
            row = self._rows.pop((call, number))
            row.put(completion.token_ids, completion.logprobs)
            row.completion = completion
            news.add(row.submission)
        for call, number, running in self._loop.running():
            row = self._rows[call, number]
            if row.submission.streams:
                row.put(running.tokens, running.logprobs)
                news.add(row.submission)
        if ended:
            self.ended, self.failures = self.ended + len(ended), 0
        self._wake(news)

    def _fail(self, rows: Sequence[ServedRow], error: str) -> None:
        """End rows with a completion that holds an error, and wake their readers."""
        self.failed += len(rows)
        for row in rows:
            row.completion = Completion((), FinishReason.ERROR, None, error=error)
        self._wake({row.submission for row in rows})
