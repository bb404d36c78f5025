"""A replica that listens itself: no proxy's process stands between it and its clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp


@dataclass(frozen=True)
class Address:
    """Where to listen.

    Args:
        host: Address of this machine, or localhost.
        port: Its successor may listen there too, while a replica that stops answers its last requests.
        grace_seconds: For requests in flight when the replica stops.
    """

    host: str
    port: int
    grace_seconds: int


@asynccontextmanager
async def listening(app: ASGIApp, address: Address) -> AsyncIterator[None]:
    """Answer requests there during the block, in this event loop. Raises OSError if nobody can listen there."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.create_server((address.host, address.port), family=family, reuse_port=True)
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=address.grace_seconds,
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
