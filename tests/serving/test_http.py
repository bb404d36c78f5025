"""The server over real sockets: by OpenAI's client, by clients that go away, by raw requests and any bodies."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import openai
import pytest
import torch
from cli_command import wait_until
from http_server import Running, running
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

from actors.engine.errors import UserError
from actors.generator import Generator
from actors.serving.http import Limits, create_app
from actors.serving.model import ServedModel
from pipeline.serve import render

PROMPT = "name[Alimentum], area[city centre]"
CHAT: Any = [{"role": "user", "content": PROMPT}]
LABELS = ["cheap", "French", "riverside"]


@pytest.fixture(scope="module")
def generator(chat_checkpoint: Path) -> Generator:
    """The bulk path, for the same text."""
    return Generator(str(chat_checkpoint), dtype="float32", sampling={"max_new_tokens": 12}, strip=False)


def test_a_completion_is_that_of_the_bulk_path(client: openai.OpenAI, generator: Generator) -> None:
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    bulk = generator({"prompt": [PROMPT]})
    assert done.choices[0].text == bulk["generated_text"][0]
    assert done.choices[0].finish_reason == bulk["finish_reason"][0]
    assert done.usage is not None and done.usage.prompt_tokens == bulk["prompt_tokens"][0]
    assert done.usage.completion_tokens == bulk["generated_tokens"][0]


def test_clients_of_different_speeds_share_the_engine(served: Running, generator: Generator) -> None:
    async def ask() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none")

        async def one(number: int) -> str:
            how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            how["extra_body"] = {"speed": 1 + number % 3}
            if number % 2:
                return str((await client.completions.create(**how)).choices[0].text)
            stream = await client.completions.create(**how, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return list(await asyncio.gather(*(one(number) for number in range(18))))

    got = asyncio.run(ask())
    speeds = [generator.at(generator.schedule_at(speed)) for speed in (1, 2, 3)]
    want = [at_speed({"prompt": [PROMPT]})["generated_text"][0] for at_speed in speeds]
    assert got == [want[number % 3] for number in range(18)]


def test_speeds_that_the_checkpoint_was_not_trained_for_are_refused(
    generator: Generator, chat_checkpoint: Path, tmp_path: Path
) -> None:
    assert generator.schedule_at(1).is_full_depth and generator.schedule_at(2) is generator.schedule
    assert generator.schedule_at(3).depths[0] < generator.schedule.depths[0]
    with pytest.raises(UserError, match="speedup"):
        generator.schedule_at(0.5)
    plain = shutil.copytree(chat_checkpoint, tmp_path / "plain")
    (plain / "skipdecode.json").unlink()
    untrained = Generator(str(plain), dtype="float32")
    assert untrained.schedule_at(1) is untrained.schedule
    with pytest.raises(UserError, match="speed = 2: the model is not adapted"):
        untrained.schedule_at(2)


def test_a_chat_streams_the_text_that_it_answers_whole(client: openai.OpenAI) -> None:
    how: Any = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 30, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**how)
    parts: dict[int, str] = {0: "", 1: ""}
    finish: dict[int, str | None] = {}
    usage = None
    for chunk in client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason or finish.get(choice.index)
    assert [parts[0], parts[1]] == [choice.message.content for choice in whole.choices]
    assert [finish[0], finish[1]] == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage and parts[0] != parts[1]


def test_text_streams_with_stop_strings_and_logprobs(client: openai.OpenAI) -> None:
    how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 3, "logprobs": 2}
    free = client.completions.create(**how)
    stop = free.choices[0].text[5:8]
    whole = client.completions.create(**how, stop=[stop, "zzzz"]).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**how, stop=[stop, "zzzz"], stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text == free.choices[0].text.partition(stop)[0]
    assert whole.logprobs is not None
    listed = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs or []]
    assert listed == whole.logprobs.token_logprobs
    offsets = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.text_offset or []]
    assert offsets == whole.logprobs.text_offset
    assert all(chunk.finish_reason is None for chunk in chunks[:-1]) and chunks[-1].finish_reason == "stop"


def test_several_prompts_of_text_and_ids_are_answered_in_order(client: openai.OpenAI, served: Running) -> None:
    how: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    texts = [PROMPT, "The Eagle"]
    ids = [served.model.tokenizer(text)["input_ids"] for text in texts]
    done = client.completions.create(prompt=texts, **how)
    alone = [client.completions.create(prompt=prompt, **how).choices[0].text for prompt in (ids[0], texts[1])]
    assert [choice.text for choice in done.choices] == alone
    assert done.usage is not None and done.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize(("form", "text"), [({"regex": "x{3}"}, "xxx"), ({"json": {"const": 17}}, "17")])
def test_an_answer_has_the_form_that_vllms_key_names(client: openai.OpenAI, form: dict[str, Any], text: str) -> None:
    how: Any = {"model": "tiny", "temperature": 0, "extra_body": {"structured_outputs": form}}
    assert client.completions.create(prompt=PROMPT, **how).choices[0].text == text
    assert client.chat.completions.create(messages=CHAT, **how).choices[0].message.content == text


@pytest.mark.parametrize("key", ["choices", "guided_choice", "structured_outputs"])
def test_an_answer_is_one_of_the_labels_that_the_request_names(client: openai.OpenAI, key: str) -> None:
    body = {key: {"choice": LABELS} if key == "structured_outputs" else LABELS}
    how: Any = {"model": "tiny", "temperature": 0, "extra_body": body}
    [text] = client.completions.create(prompt=PROMPT, **how).choices
    [chat] = client.chat.completions.create(messages=CHAT, **how).choices
    assert text.text in LABELS and chat.message.content in LABELS and chat.finish_reason == "stop"
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **how))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.message.content


def test_models_health_and_metrics(client: openai.OpenAI, served: Running, http: httpx2.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "skipdecode"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("other/name")
    assert http.get(f"{served.url}/health").text == "ok"
    list(client.completions.create(model="tiny", prompt=PROMPT, stream=True))
    text = http.get(f"{served.url}/metrics").text
    counted = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line[0] != "#"}
    assert counted['skipdecode_requests_total{endpoint="/v1/completions",status="200"}'] >= 1
    assert counted["skipdecode_generated_tokens_total"] > 0
    assert 0 < counted["skipdecode_layer_steps_total"] < counted["skipdecode_full_layer_steps_total"]
    assert counted["skipdecode_rows_in_flight"] == 0


TEXT_REFUSED: list[tuple[Any, int, str]] = [
    ({"model": "other"}, 404, "the served model is 'tiny'"),
    ({"speeed": 1}, 400, "did you mean speed?"),
    ({"max_tokens": -1}, 400, "max_tokens = -1: must be at least 1"),
    ({"speed": 0.5}, 400, "speed = 0.5: Input should be greater than or equal to 1"),
    ({"speed": True}, 400, "speed = True"),
    ({"stream": "yes"}, 400, "stream = 'yes': Input should be a valid boolean"),
    ({"stream_options": {"include_usage": True}}, 400, "stream: true"),
    ({"echo": True, "logprobs": 1}, 400, "echo is not supported: prompts are neither repeated nor scored"),
    ({"choices": "a"}, 400, "choices = 'a': Input should be a valid list"),
    ({"choices": []}, 400, "at least 1 item"),
    ({"choices": ["a", "a"]}, 400, "choices: "),
    ({"choices": ["a"], "guided_choice": ["b"]}, 400, "give only one of these: choices, guided_choice"),
    ({"choices": ["a", "b"], "stop": "."}, 400, "choices"),
    ({"structured_outputs": {"regex": "a+", "choice": ["a"]}}, 400, "needs exactly one of choice, json, regex"),
    ({"structured_outputs": {"regex": "("}}, 400, "regex"),
    ({"structured_outputs": {"json": {"anyOf": 5}}}, 400, "json_schema: not a JSON Schema"),
    ({"prompt": ["a"] * 300}, 400, "at most 256"),
    ({"n": 1000}, 400, "queues at most 256"),
    ({"top_k": 2**63, "temperature": 1}, 400, "top_k = 9223372036854775808: must be 0 (all) to 2147483647"),
    ({"prompt": [1, 2, 10**6]}, 400, "vocabulary"),
    ({"prompt": [5] * 64}, 400, "context of 64"),
    ({"prompt": None}, 400, "prompt is missing"),
]
CHAT_REFUSED: list[tuple[Any, int, str]] = [
    ({"messages": "hello"}, 400, "messages: not JSON"),
    ({"tools": [{}]}, 400, "tool 1 must be"),
    ({"response_format": {"type": "xml"}}, 400, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": 5}}}},
        400,
        "not a JSON Schema",
    ),
    ({"response_format": {"type": "json_object"}, "choices": ["a", "b"]}, 400, "cannot be combined with"),
]
REFUSED: list[tuple[str, Any, int, str]] = [
    *(("/v1/completions", {"prompt": "a", **body}, status, says) for body, status, says in TEXT_REFUSED),
    *(("/v1/chat/completions", {"messages": CHAT, **body}, status, says) for body, status, says in CHAT_REFUSED),
    ("/v1/completions", [1], 400, "JSON object"),
    ("/v1/embeddings", {"input": "a"}, 404, "not found"),
    *(
        ("/v1/completions", raw, 400, "not JSON")
        for raw in (b"", b"{", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b"\xff\xfe")
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_have_openais_shape(
    served: Running, http: httpx2.Client, path: str, body: Any, status: int, says: str
) -> None:
    reply = http.post(f"{served.url}{path}", content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert says in error["message"] and error["type"] and "\n" not in error["message"]


def _slow(step: Any) -> Any:
    def slowly(**how: Any) -> Any:
        time.sleep(0.05)
        return step(**how)

    return slowly


def test_a_key_a_size_and_a_time_bound_requests(chat_checkpoint: Path, http: httpx2.Client) -> None:
    limits = Limits(body_bytes=2000, key_sha256=hashlib.sha256(b"secret").hexdigest())
    key = {"Authorization": "Bearer secret"}
    with running(chat_checkpoint, limits, max_batch=1) as server:
        url = f"{server.url}/v1/completions"
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}):
            assert http.post(url, json={"prompt": "a"}, headers=headers).status_code == 401
            assert http.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        assert http.get(f"{server.url}/health").status_code == 200
        assert http.post(url, json={"prompt": "a"}, headers=key).status_code == 200
        # as Ray Serve's proxy passes a request under another route_prefix
        below = TestClient(create_app(server.model, limits), root_path="/llm")
        assert below.post("/llm/v1/completions", json={"prompt": "a"}).status_code == 401
        assert below.get("/llm/health").status_code == 200
        assert http.post(url, json={"prompt": "a" * 3000}, headers=key).status_code == 413
    with running(chat_checkpoint, replace(limits, timeout_seconds=0.5), max_batch=1) as server:
        url = f"{server.url}/v1/completions"
        server.model.loop.engine.step = _slow(server.model.loop.engine.step)  # type: ignore[method-assign]
        late = http.post(url, json={"prompt": "a", "max_tokens": 40, "ignore_eos": True}, headers=key)
        assert late.status_code == 504 and "0.5 s" in late.json()["error"]["message"]
        body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "stream": True}
        events = http.post(url, json=body, headers=key).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "timeout"
        assert events[-2] == "data: [DONE]"
        server.wait_idle()


def test_a_full_queue_is_429_with_retry_after(chat_checkpoint: Path, http: httpx2.Client) -> None:
    with running(chat_checkpoint, max_waiting=2, max_batch=1) as server:
        server.model.loop.engine.step = _slow(server.model.loop.engine.step)  # type: ignore[method-assign]
        body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: http.post(f"{server.url}/v1/completions", json=body), range(8)))
        assert {reply.status_code for reply in replies} == {200, 429}
        refused = [reply for reply in replies if reply.status_code == 429]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        patient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=5)
        assert patient.completions.create(model="tiny", prompt="a", max_tokens=4).choices


def test_a_request_while_the_server_closes_is_a_503_that_says_so(chat_checkpoint: Path) -> None:
    app = create_app(ServedModel("tiny", {"checkpoint": str(chat_checkpoint), "dtype": "float32"}, render), Limits())
    with TestClient(app) as client:
        pass
    reply = client.post("/v1/completions", json={"prompt": "a"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the server stops")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows(served: Running, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = served.model.loop
    before = loop.cancelled
    monkeypatch.setattr(loop.engine, "step", _slow(loop.engine.step))

    async def leave() -> None:
        async with httpx2.AsyncClient() as client:
            body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": stream, "n": 3}
            asking = asyncio.ensure_future(client.post(f"{served.url}/v1/completions", json=body))
            while len(loop.engine.rows) < 3:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    served.wait_idle()
    assert loop.cancelled - before == 3
    assert not loop.engine.rows


def test_a_failure_of_the_engine_is_a_500_without_its_text(chat_checkpoint: Path, http: httpx2.Client) -> None:
    with running(chat_checkpoint) as server:

        def broken(**how: Any) -> Any:
            raise KeyError("secret of the server")

        server.model.loop.engine.step = broken  # type: ignore[method-assign]
        for _ in range(3):
            reply = http.post(f"{server.url}/v1/completions", json={"prompt": "a", "ignore_eos": True})
            assert reply.status_code == 500 and "secret" not in reply.text
            assert reply.json()["error"]["type"] == "server_error"
        assert http.get(f"{server.url}/health").status_code == 503


def test_a_form_that_fails_while_it_is_answered_is_a_400_that_says_so(served: Running, http: httpx2.Client) -> None:
    schema = {"type": "object", "properties": {str(number): {"type": "null"} for number in range(600)}}
    body = {"prompt": "a", "structured_outputs": {"json": schema}}
    reply = http.post(f"{served.url}/v1/completions", json=body)
    assert reply.status_code == 400 and "json_schema: Parser Error" in reply.json()["error"]["message"]
    streamed = http.post(f"{served.url}/v1/completions", json={**body, "stream": True})
    assert streamed.status_code == 200 and "json_schema: Parser Error" in streamed.text


def test_logits_that_are_not_numbers_are_a_500_that_says_so(
    chat_checkpoint: Path, tmp_path: Path, http: httpx2.Client
) -> None:
    folder = shutil.copytree(chat_checkpoint, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][3, 3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with running(folder) as server:
        for more in ({}, {"temperature": 1.0}, {"logprobs": 1}):
            reply = http.post(f"{server.url}/v1/completions", json={"prompt": "a", **more})
            assert reply.status_code == 500 and "logits are not numbers" in reply.json()["error"]["message"]
        assert http.get(f"{server.url}/health").status_code == 200


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
    served.wait_idle()


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

    def nothing_is_left() -> bool:
        gc.collect()
        return all(count <= objects[name] for name, count in _held().items())

    wait_until(nothing_is_left)  # responses end a little after their rows
    assert threading.active_count() <= threads + 1
    assert http.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 200


def _held() -> dict[str, int]:
    """Count the living objects of requests."""
    names = ("Submission", "ServedRow", "Chunks", "Row", "AnswerStream", "Call")
    kinds = [type(one).__name__ for one in gc.get_objects()]
    return {name: kinds.count(name) for name in names}
