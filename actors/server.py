"""Ray Serve deployment of the HTTP interface: a replica holds one engine. The only module of `actors` that imports ray.

    serve.run(Server.bind(load, Limits()))

`load` gives a replica its `ModelSettings`, on the replica's node. Ray Serve's autoscaling counts requests, those that
wait in a replica's own queue included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve._private import replica
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.serving.errors import ApiError
from actors.serving.http import Limits, create_app
from actors.serving.listening import Address
from actors.serving.model import ModelSettings, Render, ServedModel


@serve.deployment
@serve.ingress()
class Server:
    """One replica.

    Args:
        load: Gives the model's settings; called on the replica's node, where it may fetch the checkpoint.
        limits: Bounds of requests.
        render: See `ServedModel`.
        batches: Deployment whose method `handle` answers /v1/files and /v1/batches; None: nobody does.
        upload_bytes: Most bytes of a body that goes there.
        listen: Where the replica listens itself, a single one; None: Ray Serve's proxies send it requests.
    """

    def __init__(
        self,
        load: Callable[[], ModelSettings],
        limits: Limits,
        render: Render | None = None,
        batches: DeploymentHandle[Any] | None = None,
        upload_bytes: int = 0,
        listen: Address | None = None,
    ) -> None:
        stay_on_loopback()
        self._limits, self._listen = limits, listen
        self._batches = None if batches is None else forward(batches, upload_bytes)
        self._model = ServedModel(load(), render)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._model, self._limits, self._batches, self._listen)

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine fails."""
        if not self._model.loop.healthy:
            raise RuntimeError("the engine fails")


def stay_on_loopback() -> None:
    """Call this while a replica is made: on a Ray of the loopback alone, its calls come from there alone.

    A replica takes calls of other deployments, as pickles, on every address of the machine, whatever the node's own is.
    """
    names = vars(replica)
    add_port = names["add_port_to_grpc_server"]
    if get_node_ip_address().startswith("127."):

        def on_loopback(server: Any, address: str) -> int:
            port: int = add_port(server, address.replace("[::]", "127.0.0.1"))
            return port

        names["add_port_to_grpc_server"] = on_loopback


def forward(handle: DeploymentHandle[Any], most_bytes: int) -> ASGIApp:
    """An application that a deployment's method `handle` answers, bodies whole."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most_bytes:
                refusal = ApiError(413, f"the upload is larger than {most_bytes} bytes", "request_too_large")
                await refusal.response()(scope, receive, send)
                return
            parts.append(part)
        plain = {name: scope[name] for name in ("method", "path", "query_string", "headers")}
        status, headers, body = await handle.handle.remote(plain, b"".join(parts))
        response = Response(body, status)
        response.raw_headers = headers
        await response(scope, receive, send)

    return app


async def call_app(app: ASGIApp, plain: dict[str, Any], body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body with which an application answers what `forward` sends."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "raw_path": plain["path"].encode(),
        **plain,
    }
    sent: list[Any] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not unread:
            await asyncio.Event().wait()  # a response that listens for a disconnect is cancelled when it is complete
        return unread.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    parts = [message.get("body", b"") for message in sent if message["type"] == "http.response.body"]
    return sent[0]["status"], [(bytes(name), bytes(value)) for name, value in sent[0]["headers"]], b"".join(parts)
