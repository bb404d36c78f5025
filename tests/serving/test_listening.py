"""An application that listens itself, as a replica alone on its machine does."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from http_server import listening, settings

from actors.serving.http import Limits, create_app
from actors.serving.listening import Address
from actors.serving.model import ServedModel

BODY = {"prompt": "name[Zizzi]", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
STEP_SECONDS = 0.1


@pytest.mark.parametrize("grace_seconds", [15, 1])
def test_requests_in_flight_are_answered_within_the_grace_when_it_stops(
    chat_checkpoint: Path, grace_seconds: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    own, model = f"http://127.0.0.1:{port}", ServedModel(settings(chat_checkpoint))
    app = create_app(model, Limits(), listen=Address("127.0.0.1", port, grace_seconds))
    began = 0.0

    def stream() -> list[bytes]:
        lines = []
        with httpx2.stream("POST", f"{own}/v1/completions", json={**BODY, "stream": True}) as reply:
            try:
                for line in reply.iter_lines():
                    lines.append(line)
            except httpx2.RemoteProtocolError:  # cut off
                pass
        return lines

    with ThreadPoolExecutor(1) as pool:
        with listening(app) as other:
            answers = [httpx2.post(f"{url}/v1/completions", json=BODY).json() for url in (own, other)]
            assert answers[0]["choices"] == answers[1]["choices"]
            model.loop.engine.step = _slow(model.loop.engine.step)  # type: ignore[method-assign]
            streamed = pool.submit(stream)
            while not model.loop.in_flight:
                time.sleep(0.01)
            began = time.monotonic()
        lines = streamed.result(20)
    is_whole = grace_seconds > BODY["max_tokens"] * STEP_SECONDS  # type: ignore[operator]
    assert ("data: [DONE]" in lines) == is_whole
    if is_whole:
        parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == answers[0]["choices"][0]["text"]
    else:
        assert time.monotonic() - began < BODY["max_tokens"] * STEP_SECONDS  # type: ignore[operator]
    assert not model.loop.in_flight
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{own}/health")


def _slow(step: Any) -> Any:
    def slowly(**how: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return step(**how)

    return slowly
