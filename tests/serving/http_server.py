"""A server of the tiny checkpoint in this process, on a free port of loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from cli_command import HANGING_SECONDS, wait_until
from starlette.types import ASGIApp

from actors.serving.http import Limits, create_app
from actors.serving.model import ServedModel
from pipeline.serve import render

SAMPLING = {"max_new_tokens": 16, "temperature": 1.0}


@dataclass
class Running:
    """url: of the server, without /v1."""

    url: str
    model: ServedModel

    def wait_idle(self) -> None:
        """Until no row waits or is in flight."""
        wait_until(lambda: not (self.model.loop.waiting or self.model.loop.engine.rows), every=0.01)


@contextmanager
def running(
    checkpoint: Path, limits: Limits | None = None, max_waiting: int = 256, **generator: Any
) -> Iterator[Running]:
    """A server for the block. generator: arguments of `Generator`."""
    arguments = {"checkpoint": str(checkpoint), "dtype": "float32", "sampling": SAMPLING, "max_batch": 8}
    model = ServedModel("tiny", {**arguments, **generator}, render, max_waiting)
    with listening(create_app(model, limits or Limits())) as url:
        yield Running(url, model)


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Runs an application; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="auto"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(HANGING_SECONDS)
        listener.close()
