"""Bodies of any kind never give status 500, and requests whose clients leave keep nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from typing import Any

import aiohttp
import httpx2
import pytest
from http_server import Running
from hypothesis import given, settings
from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(-3, 70), st.integers(), st.floats(), st.sampled_from([0, 1, -1, 1e308, 2**63, 2**64, 0.0, -0.0, 1e-9])
)
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["", " ", "\x00", "😀", "</s>", "a" * 500, "[INST]", "{{ 7 }}"])
)
ANY = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
LISTS = st.lists(TEXTS, max_size=3)
SCHEMAS = st.builds(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, ANY)
ROLES = st.one_of(st.sampled_from(["system", "user", "assistant", "tool"]), ANY)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(TEXTS, st.lists(NUMBERS, max_size=4), LISTS),
    "messages": st.lists(st.fixed_dictionaries({"role": ROLES, "content": ANY}), max_size=3),
    "response_format": st.one_of(st.sampled_from([{"type": "json_object"}, {"type": "text"}]), SCHEMAS),
    "model": st.just("tiny"),
    "stop": LISTS,
    "choices": LISTS,
    "guided_choice": LISTS,
    "structured_outputs": st.dictionaries(st.sampled_from(["choice", "json", "regex"]), st.one_of(LISTS, TEXTS, ANY)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "echo": st.booleans(),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.lists(NUMBERS, max_size=3),
    **dict.fromkeys(("tools", "tool_choice", "logit_bias", "suffix", "user", "top_logprobs"), ANY),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens", "n", "seed", "logprobs", "best_of"), NUMBERS),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"), NUMBERS),
    **dict.fromkeys(("frequency_penalty", "speed"), NUMBERS),
}
BODIES = st.lists(st.sampled_from(sorted(LIKELY)), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.one_of(LIKELY[name], ANY) for name in [*names, "prompt", "messages"]})
)


@settings(max_examples=100)
@given(path=st.sampled_from(["completions", "chat/completions"]), body=BODIES, which=st.integers(0, 3))
def test_no_body_gives_a_500(served: Running, http: httpx2.Client, path: str, body: dict[str, Any], which: int) -> None:
    if which:
        body.pop("messages" if path == "completions" else "prompt", None)
    try:
        reply = http.post(f"{served.url}/v1/{path}", json=body)
    except ValueError:  # numbers that JSON lacks
        return
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
    if reply.status_code != 200:
        message = reply.json()["error"]["message"]
        assert message and "\n" not in message
    assert served.model.loop.healthy and '"server_error"' not in reply.text


@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["completions", "chat/completions", "models", "nothing"]))
def test_no_bytes_give_a_500(served: Running, http: httpx2.Client, raw: bytes, path: str) -> None:
    assert http.post(f"{served.url}/v1/{path}", content=raw).status_code in (400, 404, 405)


def _leave(served: Running, requests: int, at_once: int) -> None:
    """Send requests whose clients close their connections at a random moment."""
    rng = random.Random(1)

    async def one(session: aiohttp.ClientSession, number: int, places: asyncio.Semaphore) -> None:
        body = {"prompt": "name[Zizzi]", "max_tokens": 40, "ignore_eos": True, "stream": number % 2 == 0}
        async with places:
            try:
                async with asyncio.timeout(rng.choice([0.002, 0.01, 0.03, 0.1])):
                    url = f"{served.url}/v1/completions"
                    async with session.post(url, json={**body, "n": 1 + number % 2}) as reply:
                        async for _ in reply.content:
                            pass
            except TimeoutError:
                pass

    async def all_of_them() -> None:
        places = asyncio.Semaphore(at_once)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(one(session, number, places) for number in range(requests)))

    asyncio.run(all_of_them())
    served.wait_idle(60)


@pytest.mark.parametrize("requests", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_whose_clients_leave_keep_nothing(served: Running, http: httpx2.Client, requests: int) -> None:
    _leave(served, 20, 10)
    gc.collect()
    objects, threads = _held(), threading.active_count()
    before = served.model.loop.cancelled
    _leave(served, requests, 50)
    gc.collect()
    assert served.model.loop.cancelled > before  # how many depends on the machine
    assert not served.model.loop.engine.rows
    until = time.monotonic() + 20
    while left := {name: count for name, count in _held().items() if count > objects[name]}:
        assert time.monotonic() < until, left  # responses end a little after their rows
        time.sleep(0.05)
        gc.collect()
    assert threading.active_count() <= threads + 1
    assert http.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def _held() -> dict[str, int]:
    """Count the living objects of requests."""
    names = ("Submission", "ServedRow", "Chunks", "Row", "AnswerStream", "Call")
    kinds = [type(one).__name__ for one in gc.get_objects()]
    return {name: kinds.count(name) for name in names}
