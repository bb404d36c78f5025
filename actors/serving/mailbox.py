"""Events from the engine's thread to the coroutines of an event loop: one wake-up a step, however many rows."""

from __future__ import annotations

import asyncio
from collections import deque

from actors.engine.online.submissions import Event


class ClientGone(Exception):
    """The client has closed its connection."""


class Post:
    """Carries events to the mailboxes of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Mailbox, Event]] = deque()
        self._on_its_way = False  # whether `_deliver` has been scheduled; set by the engine's thread alone

    def send(self, mailbox: Mailbox, event: Event) -> None:
        """In the engine's thread. Raises RuntimeError if the event loop is closed."""
        self._letters.append((mailbox, event))
        if not self._on_its_way:
            self._on_its_way = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._on_its_way = False  # before the letters are read: a later one schedules another delivery
        while self._letters:
            mailbox, event = self._letters.popleft()
            mailbox.put(event)


class Mailbox:
    """The events of one submission. What comes before it is emptied is one event a row: a slow reader gets fewer,
    larger ones.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._events: dict[int, Event] = {}  # by row
        self._ready = asyncio.Event()
        self._is_left = False

    def __call__(self, event: Event) -> None:
        """What a submission's `receive` is, in the engine's thread."""
        self._post.send(self, event)

    def put(self, event: Event) -> None:
        """In the event loop."""
        before = self._events.get(event.index)
        self._events[event.index] = event if before is None else before.and_then(event)
        self._ready.set()

    def leave(self) -> None:
        """The client has gone: `take` raises ClientGone."""
        self._is_left = True
        self._ready.set()

    async def take(self) -> list[Event]:
        """Wait for events; at most one of each row."""
        await self._ready.wait()
        self._ready.clear()
        if self._is_left:
            raise ClientGone
        events, self._events = list(self._events.values()), {}
        return events
