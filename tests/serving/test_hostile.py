"""Bodies of any kind never give status 500, and requests whose clients leave keep nothing."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx2
import pytest
from http_server import Running
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.serving.openapi import chat_schema, text_schema

KEYS = sorted({*chat_schema()["properties"], *text_schema()["properties"], "tools", "logit_bias", "suffix", "best_of"})
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
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["system", "user", "assistant", "tool"]), ANY), "content": ANY}
    ),
    max_size=3,
)
FORMS = st.one_of(
    ANY,
    st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
    st.builds(lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, ANY),
)


def valued(name: str) -> st.SearchStrategy[Any]:
    """Values that a key often has, or any."""
    likely: dict[str, st.SearchStrategy[Any]] = {
        "prompt": st.one_of(TEXTS, st.lists(NUMBERS, max_size=4), st.lists(TEXTS, max_size=3)),
        "messages": MESSAGES,
        "response_format": FORMS,
        "model": st.just("tiny"),
        "stop": st.lists(TEXTS, max_size=3),
        "stream": st.booleans(),
        "echo": st.booleans(),
    }
    return st.one_of(likely.get(name, NUMBERS), ANY)


BODIES = st.lists(st.sampled_from(KEYS), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: valued(name) for name in [*names, "prompt", "messages"]})
)


@pytest.fixture(scope="module")
def document(served: Running) -> dict[str, Any]:
    """The server's OpenAPI document."""
    found: dict[str, Any] = httpx2.get(f"{served.url}/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def client() -> Iterator[httpx2.Client]:
    """One for all requests: a new one reads the certificates of this machine."""
    with httpx2.Client(timeout=60) as client:
        yield client


@settings(max_examples=60)
@given(path=st.sampled_from(["completions", "chat/completions"]), body=BODIES, which=st.integers(0, 3))
def test_no_body_gives_a_500(
    served: Running, client: httpx2.Client, path: str, body: dict[str, Any], which: int
) -> None:
    if which:
        body.pop("messages" if path == "completions" else "prompt", None)
    try:
        reply = client.post(f"{served.url}/v1/{path}", json=body)
    except ValueError:  # numbers that JSON lacks
        return
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text, body)
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
    assert served.model.loop.healthy and '"server_error"' not in reply.text


def allowed(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema of the OpenAPI document allows; AssertionError for a keyword that is not known here."""
    kinds = {"title", "description", "type", "enum", "const", "anyOf", "items", "minItems", "minimum", "maximum"}
    assert schema.keys() <= kinds | {"properties", "required", "additionalProperties"}, schema
    if "anyOf" in schema:
        return st.one_of([allowed(one) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    if isinstance(schema["type"], list):
        return st.one_of([allowed({**schema, "type": kind}) for kind in schema["type"]])
    least, most = schema.get("minimum"), schema.get("maximum")
    if schema["type"] == "array":
        return st.lists(allowed(schema["items"]), min_size=schema.get("minItems", 0), max_size=3)
    if schema["type"] == "object":
        parts = {name: allowed(one) for name, one in schema.get("properties", {}).items()}
        required = {name: parts.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=parts)
    return {
        "null": st.none(),
        "boolean": st.booleans(),
        "string": TEXTS,
        "integer": st.integers(least, 5 if most is None else most),
        "number": st.floats(least, most, allow_nan=False, allow_infinity=False),
    }[schema["type"]]


@settings(max_examples=100)
@given(data=st.data(), path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]))
def test_bodies_that_the_openapi_document_allows(
    served: Running, client: httpx2.Client, document: dict[str, Any], path: str, data: st.DataObject
) -> None:
    """One key beside the required ones: no type or key of the document is refused. Many: never a 500."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    values = {name: allowed(one) for name, one in schema["properties"].items()}
    needed = {name: values[name] for name in schema["required"]}
    name = data.draw(st.sampled_from(sorted(values)))
    body = data.draw(st.fixed_dictionaries({**needed, name: values[name]}))
    reply = client.post(f"{served.url}{path}", json={"model": "tiny", "max_tokens": 2, **body})
    assert reply.status_code in (200, 400, 404), (reply.text, body)
    if reply.status_code == 400:
        said = reply.json()["error"]["message"]
        assert not any(wrong in said for wrong in (f"{name} is not supported", "must be text", "must be true")), said
    several = data.draw(allowed(schema))
    reply = client.post(f"{served.url}{path}", json={**several, "max_tokens": 2})
    assert reply.status_code in (200, 400, 404), (reply.text, several)
    assert client.post(f"{served.url}{path}", json={**body, "unknown": 1}).status_code == 400


@settings(max_examples=60)
@given(st.binary(max_size=200), st.sampled_from(["completions", "chat/completions", "models", "nothing", "files"]))
def test_no_bytes_give_a_500(served: Running, client: httpx2.Client, raw: bytes, path: str) -> None:
    reply = client.post(f"{served.url}/v1/{path}", content=raw)
    assert reply.status_code in (400, 404, 405)


def _leave(served: Running, requests: int, at_once: int) -> None:
    """Requests whose clients close their connections at a random moment."""
    rng = random.Random(1)

    async def one(session: aiohttp.ClientSession, number: int, places: asyncio.Semaphore) -> None:
        body = {
            "prompt": "name[Zizzi]",
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            "n": 1 + number % 2,
        }
        async with places:
            try:
                async with asyncio.timeout(rng.choice([0.002, 0.01, 0.03, 0.1])):
                    async with session.post(f"{served.url}/v1/completions", json=body) as reply:
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


@pytest.mark.parametrize("requests", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_whose_clients_leave_keep_nothing(served: Running, requests: int) -> None:
    _leave(served, 20, 10)
    gc.collect()
    objects, threads = _held(), threading.active_count()
    before = served.model.loop.totals.cancelled
    _leave(served, requests, 50)
    gc.collect()
    assert served.model.loop.totals.cancelled > before  # how many depends on the machine
    assert not served.model.loop.engine.rows
    until = time.monotonic() + 20
    while left := {name: count for name, count in _held().items() if count > objects[name]}:
        assert time.monotonic() < until, left  # responses end a little after their rows
        time.sleep(0.05)
        gc.collect()
    assert threading.active_count() <= threads + 1
    assert httpx2.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def _held() -> dict[str, int]:
    """Objects of a request that live."""
    names = ("Submission", "_Task", "Mailbox", "CallStream", "Row", "TextStream", "Prepared")
    kinds = [type(one).__name__ for one in gc.get_objects()]
    return {name: kinds.count(name) for name in names}
