"""Implements OpenAI's HTTP interface: routes, the API key, limits on requests, answers and server-sent events.

Source: https://platform.openai.com/docs/api-reference. This package imports neither ray nor `pipeline`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.engine.errors import UserError, flat
from actors.engine.types import NOT_NUMBERS, Completion, FinishReason
from actors.openai_answers import completion_body, error_body, shown_logprobs, usage
from actors.openai_requests import CHAT, ENDPOINTS
from actors.serving.loop import ClientGone, Closed, Event, OnlineLoop, QueueFull, Submission, wake
from actors.serving.model import Call, ServedModel

HEALTH, METRICS = "/health", "/metrics"  # paths that require no API key
GONE = 499  # status if the client has closed its connection; only the metrics show this status
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits on requests."""

    timeout_seconds: float = 600.0  # time after which a request ends with status 504
    body_bytes: int = 8 * 2**20  # largest body in bytes; a larger one gets status 413
    key_sha256: str | None = None  # SHA-256 digest of the API key, in hex; None: no key is required


class ApiError(Exception):
    """An HTTP response with an error status. message: one line for people. code: error code for programs."""

    def __init__(
        self, status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.body = status, dict(headers or {}), error_body(message, status, code)

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)


def create_app(model: ServedModel, limits: Limits) -> ASGIApp:
    """Return an ASGI application that serves `model`. Its lifespan starts and closes the model's loop."""
    metrics = Metrics(model.loop)
    # `ServedModel.call` may take long, so it runs outside the event loop; it allows only one thread
    preparing = ThreadPoolExecutor(1, "prepare")
    shown = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "skipdecode"}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        running = asyncio.get_running_loop()
        model.loop.start(lambda submissions: running.call_soon_threadsafe(wake, submissions))
        try:
            yield
        finally:
            model.loop.close()

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [shown]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(shown) if name == model.name else _unknown_model(name, model.name).response()

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok") if model.loop.healthy else PlainTextResponse("the engine keeps failing", 503)

    async def metrics_text(_: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    async def not_found(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    answering = [Route(url, Completions(url, model, limits, metrics, preparing), methods=["POST"]) for url in ENDPOINTS]
    app = Starlette(
        routes=[
            *answering,
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route(HEALTH, health),
            Route(METRICS, metrics_text),
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: not_found},
    )
    app.router.redirect_slashes = False

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")).rstrip("/"))
        is_open = scope["type"] != "http" or path in (HEALTH, METRICS)
        if is_open or limits.key_sha256 is None or _has_key(scope, limits.key_sha256):
            await app(scope, receive, send)
        else:
            await ApiError(401, "the API key is missing or wrong", "invalid_api_key").response()(scope, receive, send)

    return guarded


def _has_key(scope: Scope, key_sha256: str) -> bool:
    """Return whether a request has the API key. Compares in constant time, against timing attacks."""
    kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    digest = hashlib.sha256(key.strip()).hexdigest()
    return hmac.compare_digest(digest, key_sha256) and kind.lower() == b"bearer"


class Completions:
    """The ASGI application of one endpoint. url: one of `ENDPOINTS`."""

    def __init__(
        self, url: str, model: ServedModel, limits: Limits, metrics: Metrics, preparing: ThreadPoolExecutor
    ) -> None:
        self._url, self._model, self._limits, self._metrics, self._preparing = url, model, limits, metrics, preparing
        self._fingerprint = f"fp_{uuid.uuid4().hex[:10]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_body(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        status, streaming = GONE, False
        submission: Submission | None = None
        gone: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                raw = await _read_body(Request(scope, receive), self._limits.body_bytes)
                try:
                    body = from_json(raw, allow_inf_nan=False)
                except ValueError as error:
                    raise ApiError(400, f"the body is not JSON: {flat(error)[:200]}") from None
                running = asyncio.get_running_loop()
                call = await running.run_in_executor(self._preparing, self._model.call, self._url, body)
                if call.model not in (None, self._model.name):
                    raise _unknown_model(call.model, self._model.name)
                submission = self._model.loop.submit(call.rows, streams=call.stream)
                gone = asyncio.ensure_future(_gone(receive))
                gone.add_done_callback(lambda _: submission.leave())
                if call.stream:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
                    streaming = True
                    await self._stream(call, submission, send_body)
                else:
                    await JSONResponse(await self._answered(call, submission))(scope, receive, send)
            status = 200
        except Exception as error:
            refusal = self._refusal(error)
            status = refusal.status
            if not streaming:
                await refusal.response()(scope, receive, send)
            elif status != GONE:
                await send_body(_event(refusal.body))
        finally:
            if gone is not None:
                gone.cancel()
            if submission is not None and submission.left:
                self._model.loop.cancel(submission)
            self._metrics.requests.labels(self._url, str(status)).inc()
        if streaming and status != GONE:
            await send_body(DONE, more=False)

    async def _answered(self, call: Call, submission: Submission) -> dict[str, Any]:
        """Wait until all rows have ended; return the response body."""
        answers: dict[int, dict[str, Any]] = {}
        while submission.left:
            for event in await submission.take():
                assert event.completion is not None
                answers[event.index] = finished(self._model, call, event.index, event.completion)
        return completion_body(
            self._url,
            [answers[index] for index in sorted(answers)],
            key=uuid.uuid4().hex[:24],
            created=int(time.time()),
            model=self._model.name,
            job=self._fingerprint,
            prompt_tokens=call.prompt_tokens,
        )

    async def _stream(self, call: Call, submission: Submission, send_body: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the tokens of all rows as they are generated."""
        chunks = Chunks(self._url, self._model, call)
        while submission.left:
            body = b"".join(chunk for event in await submission.take() for chunk in chunks.of(event))
            try:
                await send_body(body)
            except OSError:  # the connection is closed
                raise ClientGone from None
        if call.usage:
            await send_body(chunks.usage())

    def _refusal(self, error: Exception) -> ApiError:
        """Convert an exception to an `ApiError`. Log an unexpected exception."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TimeoutError):
            seconds = self._limits.timeout_seconds
            return ApiError(
                504, f"not answered within {seconds:g} s: send fewer prompts or lower max_tokens", "timeout"
            )
        if isinstance(error, ClientGone | ClientDisconnect):
            return ApiError(GONE, "the client has closed its connection")
        if isinstance(error, QueueFull):
            return ApiError(429, f"{error}: try again in 1 s", "rate_limit_exceeded", {"Retry-After": "1"})
        if isinstance(error, Closed):
            return ApiError(503, str(error))
        if isinstance(error, UserError):
            return ApiError(400, str(error))
        log.error("POST %s failed", self._url, exc_info=error)
        return ApiError(500, f"the server failed: {type(error).__name__}")


def finished(model: ServedModel, call: Call, index: int, completion: Completion) -> dict[str, Any]:
    """Convert the completion of row `index` to an answer. Raises ApiError if the row has no answer."""
    error = str(completion.error)
    if completion.finish_reason == FinishReason.ERROR:
        is_failure = error == NOT_NUMBERS or error.startswith("the server failed")
        # 400: the row has tokens, so the error concerns the requested format. 503: out of memory, or the server stops
        raise ApiError(500 if is_failure else 400 if completion.token_ids else 503, error)
    return vars(model.generator.completed(call.prompts[index], 0, index, call.rows[index], completion))


class Chunks:
    """Converts the output of a streamed call to server-sent events."""

    def __init__(self, url: str, model: ServedModel, call: Call) -> None:
        self._url, self._is_chat, self._key = url, url == CHAT, uuid.uuid4().hex[:24]
        self._model, self._call = model, call
        self._frame: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{self._key}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": model.name,
            **({"usage": None} if call.usage else {}),
        }
        self._texts = [model.answer_stream(call, index) for index in range(len(call.rows))]
        # for each row that has sent an event: number of characters in the tokens that had log-probabilities
        self._sent: dict[int, int] = {}
        self._tokens = 0  # number of tokens of all answers that have ended

    def of(self, event: Event) -> Iterator[bytes]:
        """Convert a row's new output to server-sent events. Raises ApiError if the row has ended without an answer."""
        index, done, finish = event.index, None, None
        text, thinking = self._texts[index].push(event.tokens)
        if event.completion is not None:
            done = finished(self._model, self._call, index, event.completion)
            finish = done["finish_reason"]
            rest = self._texts[index].finish(done["generated_text"], done["reasoning"])
            text, thinking = text + rest[0], thinking + rest[1]
            self._tokens += done["generated_tokens"]
        if index not in self._sent and self._is_chat:
            yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        offset, logprobs = self._sent.setdefault(index, 0), None
        if self._call.rows[index].sampling.logprobs is not None:
            logprobs = [token.to_dict(self._model.token_text) for token in event.logprobs]
            self._sent[index] += sum(len(token["token"]) for token in logprobs)
        if not (text or thinking or done is not None or logprobs):
            return
        thought = {"reasoning_content": thinking} if thinking else {}
        delta: dict[str, Any] = {**({"content": text} if text else {}), **thought}
        content = {"delta": delta} if self._is_chat else {"text": text, **thought}
        yield self._chunk(index, content, shown_logprobs(self._url, logprobs, offset), finish)

    def usage(self) -> bytes:
        """Return the last server-sent event of a stream, which holds the token counts."""
        return _event({**self._frame, "choices": [], "usage": usage(self._call.prompt_tokens, self._tokens)})

    def _chunk(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}
        return _event({**self._frame, "choices": [choice]})


class Metrics(Collector):
    """Prometheus metrics of a replica's requests and loop."""

    def __init__(self, loop: OnlineLoop) -> None:
        self._loop, self.registry = loop, CollectorRegistry()
        self.requests = Counter(
            "skipdecode_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self.registry
        )
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the loop's counts as Prometheus metrics."""
        loop, stats = self._loop, self._loop.engine.stats
        for kind, name, text, value in (
            (GaugeMetricFamily, "rows_waiting", "Rows that wait to begin.", loop.waiting),
            (GaugeMetricFamily, "rows_in_flight", "Rows being answered.", len(loop.engine.rows)),
            (GaugeMetricFamily, "cache_bytes", "Bytes of the KV cache.", loop.engine.executor.used_bytes()),
            (GaugeMetricFamily, "cache_bytes_limit", "Maximum bytes of the KV cache.", loop.cache_bytes),
            (CounterMetricFamily, "ended", "Rows answered.", loop.ended),
            (CounterMetricFamily, "cancelled", "Rows cancelled.", loop.cancelled),
            (CounterMetricFamily, "failed", "Rows that could not be answered.", loop.failed),
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            (CounterMetricFamily, "generated_tokens", "Tokens generated for ended rows.", stats.generated_tokens),
            (CounterMetricFamily, "layer_steps", "Layers run, summed over decode steps.", stats.layer_steps),
            (CounterMetricFamily, "full_layer_steps", "Layers that full depth would run.", stats.full_layer_steps),
            (CounterMetricFamily, "out_of_memory", "How often memory ran out.", stats.out_of_memory),
        ):
            yield kind(f"skipdecode_{name}", text, value=value)


async def _read_body(request: Request, most_bytes: int) -> bytes:
    """Return a request's body. Raises ApiError if it is larger than `most_bytes`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes", "request_too_large")
    return bytes(body)


async def _gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _unknown_model(name: str | None, served: str) -> ApiError:
    return ApiError(404, f"model {name!r} is not served here; the served model is {served!r}", "model_not_found")


def _event(values: Mapping[str, Any]) -> bytes:
    """Format `values` as a server-sent event with JSON data."""
    return f"data: {json.dumps(values, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
