"""Events on their way from the engine's thread to a client's coroutine."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.online.submissions import Event
from actors.engine.types import Completion, FinishReason
from actors.serving.mailbox import ClientGone, Mailbox, Post

EVENTS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3), st.booleans()), max_size=20)


@given(EVENTS)
def test_every_token_comes_once_and_in_order_however_slow_the_reader(steps: list[tuple[int, list[int], bool]]) -> None:
    async def read() -> dict[int, list[int]]:
        mailbox = Mailbox(Post(asyncio.get_running_loop()))
        got: dict[int, list[int]] = {}
        for index, tokens, is_read in steps:
            mailbox(Event(index, tuple(tokens)))
            if is_read:
                for event in await mailbox.take():
                    got.setdefault(event.index, []).extend(event.tokens)
        done = Completion((1,), FinishReason.STOP, None)
        mailbox(Event(0, (1,), completion=done))
        *others, last = sorted(await mailbox.take(), key=lambda event: event.completion is not None)
        assert last.completion == done and not any(other.completion for other in others)
        for event in (*others, last):
            got.setdefault(event.index, []).extend(event.tokens)
        return got

    sent: dict[int, list[int]] = {}
    for index, tokens, _ in [*steps, (0, [1], True)]:
        sent.setdefault(index, []).extend(tokens)
    assert asyncio.run(read()) == sent


def test_a_client_that_has_gone_waits_for_nothing() -> None:
    async def read() -> None:
        mailbox = Mailbox(Post(asyncio.get_running_loop()))
        asyncio.get_running_loop().call_later(0.01, mailbox.leave)
        await mailbox.take()

    with pytest.raises(ClientGone):
        asyncio.run(read())
