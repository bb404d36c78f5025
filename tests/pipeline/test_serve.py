"""The application on Ray Serve: replicas, streams, clients that leave; and the command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import psutil
import pytest
from cli_command import HANGING_SECONDS, wait_until
from http_server import listening
from leaks import assert_listens_here_alone
from leaks import listening as ports_of
from ray import serve
from ray.serve import Application
from ray.serve.schema import ReplicaState
from starlette.responses import PlainTextResponse

from actors.engine.errors import UserError
from actors.generator import Generator
from pipeline import serve as server
from pipeline.config.load import validated
from pipeline.config.serve import ServeConfig
from pipeline.estimate import name_of
from pipeline.serve import application, plan_server

PROMPT = "name[Zizzi], priceRange[cheap]"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def tiny_application(checkpoint: Path, replicas: dict[str, Any]) -> Application:
    values = {
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "name": "tiny",
        "replicas": {"max_batch": 4, "threads": 1, **replicas},
    }
    return application(plan_server(validated(ServeConfig, values, "serve"), on_this_machine=True))


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_replicas_are_asked_for_as_the_file_says(chat_checkpoint: Path, count: int) -> None:
    built = tiny_application(chat_checkpoint, {"count": count})
    assert built._bound_deployment.num_replicas == count


def test_a_server_without_a_speed_up_is_not_said_to_run_at_1x(chat_checkpoint: Path) -> None:
    for schedule, speed in (({}, "2x"), ({"speedup": 1}, "1x"), ({"depths": [3, 1]}, "the configured depths")):
        values = {"model": {"path": str(chat_checkpoint)}, "schedule": {**schedule, "unadapted": True}}
        planned = plan_server(validated(ServeConfig, values, "serve"), on_this_machine=False)
        assert name_of(planned.schedule) == speed


def test_a_proxy_of_the_environment_is_not_asked_whether_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(server, "READY_SECONDS", 0.0)
    with listening(PlainTextResponse("ok")) as url:
        server._wait_for_http("127.0.0.1", int(url.rpartition(":")[2]))


@pytest.fixture
def deployed(own_ray: None, chat_checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The tiny checkpoint, `request.param` being the section replicas; gives the URL."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(tiny_application(chat_checkpoint, request.param))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def counted(url: str, name: str) -> float:
    """A figure of /metrics, the largest of the replicas that answer in turn."""
    found = []
    for _ in range(8):
        text = urlopen(f"{url}/metrics").read().decode()
        found += [float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")]
    return max(found)


@pytest.mark.parametrize("deployed", [{"count": 1}, pytest.param({"count": 2}, marks=pytest.mark.slow)], indirect=True)
def test_replicas_answer_stream_and_free_the_rows_of_clients_that_leave(deployed: str, chat_checkpoint: Path) -> None:
    client = openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", max_retries=0)
    generator = Generator(str(chat_checkpoint), dtype="float32", sampling={"max_new_tokens": 12}, strip=False)
    want = generator({"prompt": [PROMPT]})["generated_text"][0]
    how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    assert {client.completions.create(**how).choices[0].text for _ in range(4)} == {want}
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**how, stream=True)) == want
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    assert chat.usage is not None and chat.usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="did you mean"):
        client.completions.create(**how, extra_body={"sped": 2})
    for _ in range(6):
        stream = client.completions.create(**{**how, "max_tokens": 40}, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    names = ("skipdecode_rows_in_flight", "skipdecode_rows_waiting")
    wait_until(lambda: not any(counted(deployed, name) for name in names), every=0.1)
    model, larger = {"path": str(chat_checkpoint)}, {"cache_bytes": 2**50}  # larger than this machine, which plans only
    values = {"model": model, "http": {"port": free_port()}, "replicas": larger}
    with pytest.raises(UserError, match="Ray Serve runs on this cluster already"):
        server.run_server(validated(ServeConfig, values, "serve"), verbose=False)
    assert urlopen(f"{deployed}/health").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("deployed", [{"min": 1, "max": 2, "cpus": 0.5}], indirect=True)
def test_a_replica_is_added_under_load(deployed: str) -> None:
    client = openai.OpenAI(base_url=f"{deployed}/v1", api_key="none", max_retries=0)
    until = time.monotonic() + HANGING_SECONDS
    loaded = threading.Event()

    def replicas() -> int:
        [running] = serve.status().applications["default"].deployments.values()
        return int(running.replica_states.get(ReplicaState.RUNNING, 0))

    def ask(number: int) -> int:
        how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
        count = 0
        while not loaded.is_set():
            assert time.monotonic() < until, "no second replica"
            usage = client.completions.create(**how, n=4).usage
            assert usage is not None and usage.completion_tokens == 80
            count += 1
        return count

    assert replicas() == 1
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, number) for number in range(12)]
        while replicas() < 2 and not any(one.done() for one in asked):
            time.sleep(0.5)
        loaded.set()
        assert all(one.result() > 0 for one in asked)  # none was refused or lost meanwhile
    assert replicas() == 2


@pytest.mark.slow
@pytest.mark.ray
def test_the_command_serves_replaces_a_replica_that_dies_and_stops(chat_checkpoint: Path, tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "serve.yaml"
    file.write_text(
        f"model: {{path: {chat_checkpoint}, dtype: float32}}\nname: tiny\nhttp: {{port: {port}, api_key_env: MY_KEY}}\n"
    )
    command = [sys.executable, "-m", "pipeline", "serve", str(file)]
    environment = {**os.environ, "MY_KEY": "secret", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    said = [next(line for line in process.stderr if line.startswith("serving"))]
    assert f" as 'tiny' at 2x on http://127.0.0.1:{port}/v1" in said[0]
    try:
        url = f"http://127.0.0.1:{port}/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="other").models.list()
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        how: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        direct = client.completions.create(**how).choices[0].text
        assert "".join(part.choices[0].text for part in client.completions.create(**how, stream=True)) == direct
        # a replica takes calls of other replicas on every address: Ray Serve has no setting for it, SECURITY.md says so
        assert_listens_here_alone({port for port in ports_of(process.pid) if not port[0].startswith("ray::Serve")})
        others = psutil.Process(process.pid).children(recursive=True)
        [replica] = [one for one in others if "ServeReplica" in " ".join(one.cmdline())]
        replica.kill()

        def answers() -> bool:
            with suppress(openai.APIConnectionError):
                return client.completions.create(**how).choices[0].text == direct
            return False

        wait_until(answers, every=0.5)
        assert not replica.is_running()
    finally:
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=HANGING_SECONDS)
        said.append(errors)
    assert process.returncode == 0, said
    assert "stopping" in said[1] and "graceful_shutdown" not in printed + said[1] and "secret" not in "".join(said)
