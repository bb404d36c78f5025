"""What clients submit, and what they get of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from actors.engine.types import Completion, Request, TokenLogprob


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
class Task:
    """A row that waits or is in flight. sent: its tokens that `receive` has got."""

    request: Request
    submission: Submission
    index: int
    sent: int = 0
