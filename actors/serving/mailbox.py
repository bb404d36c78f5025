"""Events from the engine's thread to the coroutines of an event loop: one wake-up a step, however many rows."""

from __future__ import annotations

import asyncio
from collections import deque

from actors.engine.online import Event


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
            mailbox.events.put_nowait(event)


class Mailbox:
    """The events of one submission."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    def __call__(self, event: Event) -> None:
        """What a submission's `receive` is."""
        self._post.send(self, event)
