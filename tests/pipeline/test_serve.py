"""`skipdecode serve`: requests are answered as the lines of a batch file, in this process and on Ray Serve."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
from cli_command import HANGING_SECONDS
from in_process import job_values, run_in_process
from input_files import write_values
from leaks import assert_listens_here_alone, listening
from ray import serve
from served import Served, planned, served
from typer.testing import CliRunner

from actors.openai_requests import CHAT, TEXT
from pipeline import serve as server
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import validated
from pipeline.config.serve import ServeConfig

PROMPT = "name[Zizzi], priceRange[cheap]"
CHATS = [{"role": "user", "content": "alpha"}]
FORM = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}
BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": PROMPT, "max_tokens": 6}),
    (TEXT, {"prompt": "cheap", "max_tokens": 3, "n": 2, "logprobs": 2, "temperature": 1.0, "top_k": 1}),
    (CHAT, {"messages": CHATS, "max_tokens": 4, "logprobs": True, "top_logprobs": 1}),
    (CHAT, {"messages": CHATS, "max_tokens": 40, "response_format": FORM}),
    (TEXT, {"prompt": "cheap", "stream": True}),
    (TEXT, {"prompt": "cheap", "speed": 2}),
    (TEXT, {"prompt": ["cheap", "pub"]}),
    (TEXT, {"prompt": "alpha " * 200}),
    (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
    (CHAT, {"messages": CHATS, "tools": [{"type": "function", "function": {"name": "f"}}]}),
]


@pytest.fixture(scope="module")
def tiny(chat_checkpoint: Path) -> Iterator[Served]:
    model = {"path": str(chat_checkpoint), "dtype": "float32"}
    with served(planned(model=model, name="tiny", sampling={"max_new_tokens": 8}, actors={"max_batch": 8})) as found:
        yield found


def test_requests_have_the_answers_and_refusals_of_a_batch_file(
    tiny: Served, chat_checkpoint: Path, tmp_path: Path
) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(BODIES)
    ]
    write_values(tmp_path / "in.jsonl", lines)
    values = job_values(tmp_path / "in.jsonl", tmp_path / "out", chat_checkpoint, sampling={"max_new_tokens": 8})
    source = {"path": str(tmp_path / "in.jsonl"), "format": "openai_batch"}
    run_in_process(JobConfig.model_validate({**values, "input": source}))
    files = [tmp_path / "out" / name for name in ("results.jsonl", "errors.jsonl")]
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    wanted = {line["custom_id"]: line["response"] for line in found}
    replies = tiny.ask(*({"url": url, "json": body} for url, body in BODIES))
    changing = ("id", "created", "model", "system_fingerprint")
    assert len(wanted) == len(BODIES)
    for number, reply in enumerate(replies):
        want = wanted[str(number)]
        ours, theirs = (
            {key: body[key] for key in body if key not in changing} for body in (reply.json(), want["body"])
        )
        assert (reply.status_code, ours) == (want["status_code"], theirs)
    assert [reply.status_code for reply in replies] == [200] * 4 + [400] * 6
    assert replies[0].json()["model"] == "tiny"
    assert "stream = True" in replies[4].text and "speed is not supported" in replies[5].text


def test_other_paths_methods_and_bodies(tiny: Served) -> None:
    replies = tiny.ask(
        {"method": "GET", "url": "/v1/models"},
        {"method": "GET", "url": "/health"},
        {"method": "GET"},
        {"url": "/v1/embeddings"},
        {"content": b"{"},
        {"content": b"\xff"},
        {"content": b"[]"},
    )
    assert [reply.status_code for reply in replies] == [200, 200, 405, 404, 400, 400, 400]
    assert [model["id"] for model in replies[0].json()["data"]] == ["tiny"]
    assert all(reply.json()["error"]["message"] for reply in replies[2:])


def test_equal_requests_with_a_seed_have_equal_answers(tiny: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    with_seed, without = {"json": {**body, "seed": 3}}, {"json": body}
    texts = [reply.json()["choices"][0]["text"] for reply in tiny.ask(with_seed, without, with_seed, without)]
    assert texts[0] == texts[2] and texts[1] != texts[3]


def test_health_answers_during_a_batch_and_waiting_requests_share_the_next(
    tiny: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    may_end, answers = threading.Event(), tiny.server.answers

    def held(requests: Any) -> Any:
        sizes.append(len(requests))
        assert may_end.wait(HANGING_SECONDS)
        return answers(requests)

    async def requests() -> list[int]:
        body = {"json": {"prompt": PROMPT, "max_tokens": 2}}
        first = asyncio.create_task(tiny.send(body))
        while not sizes and not first.done():
            await asyncio.sleep(0.01)
        rest = asyncio.create_task(tiny.send(body, body))
        [health] = await tiny.send({"method": "GET", "url": "/health"})
        assert not first.done()
        await asyncio.sleep(0.1)  # the two requests are in the queue of the batches
        may_end.set()
        return [health.status_code, *(reply.status_code for reply in (*await first, *await rest))]

    monkeypatch.setattr(tiny.server, "answers", held)
    assert tiny._running.run(requests()) == [200] * 4
    assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--model CHECKPOINT"),
        (("--model", "no/such/folder"), "no such checkpoint folder"),
        (("configs/demo.yaml",), "this is a job file"),
        (("{file}", "--set", "model.engine=vllm"), "model.engine"),
        (("{file}", "--set", "actors.count=2"), "actors: "),
        (("{file}", "--set", "schedule.speedup=0.5"), "speedup = 0.5"),
        (("{file}", "--set", "model.weights=int8", "--set", "actors.gpus=1"), "model.weights"),
        (("{file}", "--set", "actors.cache_bytes=99999999999999"), "do not fit in this machine's"),
        (("{file}", "--port", "{used}"), "cannot listen on 127.0.0.1:"),
        (("{file}", "--set", "host=192.0.2.1"), "change host or port"),
    ],
)
def test_refusals_are_one_line_before_a_model_is_loaded(
    checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {{path: {checkpoint}}}\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        # not a port that the system may give to a connection meanwhile
        ports = () if "--port" in arguments else ("--port", str(random.randrange(20_000, 30_000)))
        filled = [one.format(file=file, used=used.getsockname()[1]) for one in arguments]
        done = CliRunner().invoke(app, ["serve", *filled, *ports])
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert says in line


def test_the_schedule_of_the_checkpoint_is_named(chat_checkpoint: Path) -> None:
    for schedule, speed in (({}, "2x"), ({"speedup": 1}, "1x"), ({"depths": [3, 1]}, "the configured depths")):
        plan = planned(model={"path": str(chat_checkpoint)}, schedule={**schedule, "unadapted": True})
        assert plan.schedule.name == speed


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def asked(url: str) -> dict[str, Any]:
    """What the official client gets, or the error."""
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12}
        chat: Any = client.chat.completions.create(model="tiny", messages=CHATS, max_tokens=3, n=2, temperature=1)  # type: ignore
        with pytest.raises(openai.BadRequestError, match="stream = True"):
            client.completions.create(**how, stream=True)
        return {
            "models": [model.id for model in client.models.list()],
            "text": client.completions.create(**how).choices[0].text,
            "chats": len(chat.choices),
        }
    except Exception as error:
        return {"error": repr(error)}


def test_the_server_runs_on_ray_serve_until_a_signal(
    own_ray: None, tiny: Served, chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = {}
    config = validated(
        ServeConfig,
        {
            "model": {"path": str(chat_checkpoint), "dtype": "float32"},
            "name": "tiny",
            "port": free_port(),
            "actors": {"threads": 1},
        },
        "serve.yaml",
    )

    said, url = list[str](), f"http://127.0.0.1:{config.port}"

    def wait(seconds: float) -> None:
        """As time.sleep, until it serves."""
        if any(f" as 'tiny' at 2x on {url}/v1" in line for line in said):
            found.update(asked(url))
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)

    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=wait)
    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(server, "announce", said.append)
    server.run_server(config, verbose=False)
    [alone] = tiny.ask({"json": {"prompt": PROMPT, "max_tokens": 12}})
    assert found == {"models": ["tiny"], "text": alone.json()["choices"][0]["text"], "chats": 2}
    assert not serve.status().applications


@pytest.mark.slow
@pytest.mark.ray
def test_the_command_listens_on_loopback_replaces_a_dead_replica_and_stops(
    chat_checkpoint: Path, tmp_path: Path
) -> None:
    port, file = free_port(), tmp_path / "serve.yaml"
    file.write_text(f"model: {{path: {chat_checkpoint}, dtype: float32}}\nname: tiny\nport: {port}\n")
    command = [sys.executable, "-m", "pipeline", "serve", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = [next(line for line in process.stderr if line.startswith("serving"))]
    try:
        before = asked(f"http://127.0.0.1:{port}")
        assert before["models"] == ["tiny"]
        # a replica takes calls of other replicas on every address: Ray Serve has no setting for it, SECURITY.md says so
        assert_listens_here_alone({port for port in listening(process.pid) if not port[0].startswith("ray::Serve")})
        others = psutil.Process(process.pid).children(recursive=True)
        [replica] = [one for one in others if "ServeReplica" in " ".join(one.cmdline())]
        replica.kill()
        replica.wait(HANGING_SECONDS)
        server._wait_for_http("127.0.0.1", port)
        assert asked(f"http://127.0.0.1:{port}") == before
    finally:
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=HANGING_SECONDS)
        said.append(errors)
    assert process.returncode == 0, said
    assert "stopping" in said[1] and "graceful_shutdown" not in printed + said[1]
