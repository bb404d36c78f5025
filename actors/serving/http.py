"""The ASGI application: routes, the API key, limits of requests, and errors in OpenAI's form."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.engine.errors import UserError
from actors.engine.online.submissions import QueueFull
from actors.openai_requests import CHAT, ENDPOINTS
from actors.serving.calls import Calls
from actors.serving.errors import ApiError, api_error
from actors.serving.mailbox import ClientGone
from actors.serving.metrics import Metrics
from actors.serving.model import ServedModel
from actors.serving.openapi import chat_schema, text_schema

SHORT_BYTES = 2048  # of a body whose prompt is prepared at once
GONE = 499  # status of a request whose client has gone; nobody reads it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Bounds of requests.

    Args:
        timeout_seconds: After which a request ends with status 504.
        body_bytes: Most bytes of a body; above it status 413.
        key_sha256: Digest of the API key; None: no key is asked for.
    """

    timeout_seconds: float = 600.0
    body_bytes: int = 8 * 2**20
    key_sha256: str | None = None


def create_app(model: ServedModel, limits: Limits) -> ASGIApp:
    """Return the application over a model. It starts the model's loop, and closes it at the end."""
    metrics = Metrics(model.loop)
    calls = Calls(model, metrics, limits.timeout_seconds)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        model.loop.start()
        try:
            yield
        finally:
            calls.close()
            model.loop.close()

    app = FastAPI(title="skipdecode", lifespan=lifespan, redirect_slashes=False)

    async def answer(request: Request, url: str) -> Any:
        began, status = time.perf_counter(), 500
        try:
            raw = await read_body(request, limits.body_bytes)
            done = await calls.answer(url, parse_json(raw), request.receive, is_short=len(raw) <= SHORT_BYTES)
            status = 200
            if not isinstance(done, dict):
                return _Streamed(done)
            metrics.seconds.observe(time.perf_counter() - began)
            return JSONResponse(done)
        except (ClientGone, ClientDisconnect):
            status = GONE
            return Response(status_code=GONE)
        except (ApiError, QueueFull, UserError) as error:
            refusal = api_error(error)
            status = refusal.status
            return refusal.response()
        finally:
            metrics.requests.labels(url, str(status)).inc()

    def add(url: str, schema: dict[str, Any]) -> None:
        async def endpoint(request: Request) -> Any:
            return await answer(request, url)

        content = {"application/json": {"schema": schema}}
        app.post(url, openapi_extra={"requestBody": {"required": True, "content": content}}, summary=url)(endpoint)

    for url in ENDPOINTS:
        add(url, chat_schema() if url == CHAT else text_schema())

    shown = {"id": model.name, "object": "model", "created": created, "owned_by": "skipdecode"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [shown]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        if name != model.name:
            return ApiError(404, f"model {name!r} is not served here", "model_not_found").response()
        return shown

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("ok") if model.loop.healthy else PlainTextResponse("the engine fails", 503)

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return ApiError(500, f"the server failed: {type(error).__name__}").response()

    return app if limits.key_sha256 is None else _asks_for_key(app, limits.key_sha256)


def _asks_for_key(app: ASGIApp, key_sha256: str) -> ASGIApp:
    """Return the application behind a check of the API key under /v1."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or not str(scope.get("path", "")).startswith("/v1")
        if is_open or _has_key(scope, key_sha256):
            await app(scope, receive, send)
        else:
            await ApiError(401, "the API key is missing or wrong", "invalid_api_key").response()(scope, receive, send)

    return guarded


def _has_key(scope: Scope, key_sha256: str) -> bool:
    """Compared by digests in constant time: neither length nor prefix of the key shows in the time taken."""
    given = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, key = given.partition(b" ")
    digest = hashlib.sha256(key.strip()).hexdigest()
    return hmac.compare_digest(digest, key_sha256) and kind.lower() == b"bearer"


class _Streamed(Response):
    """A response that an ASGI application sends itself."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._stream = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream(scope, receive, send)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """A body. Raises ApiError for one that is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes", "request_too_large")
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """The values of a JSON body. Raises ApiError if it is none."""
    try:
        values = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\ud" in raw.lower():  # JSON allows half a character, a tokenizer does not
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
