"""Requests to a server of this process, without sockets and without Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from ray import serve
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from actors.openai_requests import TEXT
from pipeline.config.load import validated
from pipeline.config.serve import ServeConfig
from pipeline.plan.hardware import Hardware
from pipeline.serve import PlannedServer, Server, plan_server


def planned(**values: Any) -> PlannedServer:
    return plan_server(validated(ServeConfig, values, "serve.yaml"), Hardware())


class Served:
    """A server and the event loop in which it answers."""

    def __init__(self, server: Server, running: asyncio.Runner) -> None:
        self.server, self._running = server, running

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self.server(Request(scope, receive)))(scope, receive, send)

    async def send(self, *requests: dict[str, Any]) -> list[httpx2.Response]:
        """Send requests at the same time. Each is a POST of a completion unless it says otherwise."""
        transport = httpx2.ASGITransport(self._app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            sent = [client.request(**{"method": "POST", "url": TEXT, **request}) for request in requests]
            return await asyncio.gather(*sent)

    def ask(self, *requests: dict[str, Any]) -> list[httpx2.Response]:
        return self._running.run(self.send(*requests))


@contextmanager
def served(plan: PlannedServer) -> Iterator[Served]:
    replica = SimpleNamespace(_deployment_config=SimpleNamespace(max_ongoing_requests=1000))  # what Ray's batches ask
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as running:
        patch.setattr(serve, "get_replica_context", lambda: replica)
        yield Served(Server(plan), running)
