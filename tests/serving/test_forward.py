"""Requests that one deployment passes on to another are answered as the application itself would."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
from http_server import listening
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from actors.server import call_app, forward


class Handle:
    """A deployment's handle, without Ray."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        self.handle = self

    async def remote(self, plain: dict[str, Any], body: bytes) -> Any:
        return await asyncio.wait_for(call_app(self.app, plain, body), 10)


def test_files_bodies_and_refusals_pass(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"x" * 300_000)

    async def content(request: Request) -> Response:
        return FileResponse(file, headers={"x-own": "yes"})

    async def echo(request: Request) -> Response:
        body = await request.body()
        return JSONResponse(
            {"body": body.decode(), "query": request.query_params["a"], "key": request.headers["x-key"]}, 201
        )

    app = Starlette(routes=[Route("/file", content), Route("/echo", echo, methods=["POST"])])
    with listening(forward(Handle(app), 1000)) as url:  # type: ignore[arg-type]
        got = httpx2.get(f"{url}/file")
        assert got.content == file.read_bytes() and got.headers["x-own"] == "yes"
        made = httpx2.post(f"{url}/echo?a=b", content=b"text", headers={"x-key": "k"})
        assert (made.status_code, made.json()) == (201, {"body": "text", "query": "b", "key": "k"})
        assert httpx2.post(f"{url}/echo?a=b", content=b"x" * 1001).status_code == 413
        assert httpx2.get(f"{url}/nothing").status_code == 404
