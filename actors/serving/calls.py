"""A call from its body to its response: submitted to the loop, awaited or streamed, cancelled if its client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.types import Receive, Scope, Send

from actors.engine.online.submissions import Event, Submission
from actors.engine.types import NOT_NUMBERS, Completion, FinishReason
from actors.openai_answers import completion_body
from actors.serving.bodies import Call, read_call
from actors.serving.chunks import DONE, Chunks, event
from actors.serving.errors import ApiError
from actors.serving.mailbox import ClientGone, Mailbox, Post
from actors.serving.metrics import Metrics
from actors.serving.model import Prepared, ServedModel

log = logging.getLogger(__name__)


class Calls:
    """Answers calls with one model, in one event loop.

    Args:
        model: The model, whose loop runs.
        metrics: Counts the calls.
        timeout_seconds: After which a call ends with status 504.
    """

    def __init__(self, model: ServedModel, metrics: Metrics, timeout_seconds: float) -> None:
        self._model, self._metrics, self._timeout = model, metrics, timeout_seconds
        self._created = int(time.time())
        self._fingerprint = f"fp_{uuid.uuid4().hex[:10]}"
        self._preparing = ThreadPoolExecutor(1, "prepare")  # long prompts and grammars must not hold up the others
        self._one_prepares = threading.Lock()
        self._post: Post | None = None

    async def answer(self, url: str, body: Any, receive: Receive, *, is_short: bool) -> dict[str, Any] | CallStream:
        """The response's body, or the stream of it. Raises ApiError, UserError, QueueFull; ClientGone.

        is_short: The body is short, so that a change of threads would take longer than reading its prompt.
        """
        self._post = self._post or Post(asyncio.get_running_loop())
        call = read_call(url, body)
        if call.model not in (None, self._model.name):
            raise ApiError(404, f"model {call.model!r} is not served here; {self._model.name!r} is", "model_not_found")
        prepared = await self._prepared(call, is_short)
        if call.echo:
            return await self._echo(prepared, receive)
        if call.stream:
            mailbox = Mailbox(self._post)
            submission = self._model.loop.submit(prepared.rows, mailbox, streams=True)
            return CallStream(self, prepared, submission, mailbox, uuid.uuid4().hex[:24])
        return self._body(prepared, await self._answers(prepared, receive))

    async def _prepared(self, call: Call, is_short: bool) -> Prepared:
        """The call's rows; in the thread that prepares, unless they are ready sooner without."""
        prompt, *others = call.prompts
        simple = not (others or prompt.output_format or prompt.tools or "n" in prompt.sampling)
        if is_short and simple and self._one_prepares.acquire(blocking=False):
            try:
                return self._model.prepare(call)
            finally:
                self._one_prepares.release()

        def prepare() -> Prepared:
            with self._one_prepares:
                return self._model.prepare(call)

        return await asyncio.get_running_loop().run_in_executor(self._preparing, prepare)

    async def _answers(self, prepared: Prepared, receive: Receive) -> list[dict[str, Any]]:
        """The whole answers of all rows, in their order."""
        assert self._post is not None
        mailbox = Mailbox(self._post)
        submission = self._model.loop.submit(prepared.rows, mailbox, streams=False)
        answers: dict[int, dict[str, Any]] = {}
        async with (
            self.ending(submission, len(prepared.rows)) as ended,
            contextlib.aclosing(self.events(mailbox, receive)) as events,
        ):
            async for one in events:
                assert one.completion is not None
                answers[one.index] = self.finished(prepared, one.index, one.completion)
                if ended(one):
                    break
        return [answers[index] for index in sorted(answers)]

    async def _echo(self, prepared: Prepared, receive: Receive) -> dict[str, Any]:
        """The answers behind their prompts."""
        choices = await self._answers(prepared, receive)
        for choice in choices:
            number = choice["sample_index"] // prepared.samples
            prompt = prepared.call.prompts[number].prompt
            text = prompt if isinstance(prompt, str) else self._model.decode(prepared.prompts[number].ids)
            choice["generated_text"] = text + choice["generated_text"]
        return self._body(prepared, choices)

    def _body(self, prepared: Prepared, answers: list[dict[str, Any]]) -> dict[str, Any]:
        return completion_body(
            prepared.call.url,
            answers,
            key=uuid.uuid4().hex[:24],
            created=int(time.time()),
            model=self._model.name,
            job=self._fingerprint,
            prompt_tokens=prepared.prompt_tokens,
        )

    @contextlib.asynccontextmanager
    async def ending(self, submission: Submission, rows: int) -> AsyncIterator[Any]:
        """Bounds the time of a call; however it ends, rows that have not ended are cancelled.

        Gives a function that counts an event and says whether it was the last. Raises ApiError after the timeout.
        """
        left = rows

        def ended(one: Event) -> bool:
            nonlocal left
            left -= one.completion is not None
            return left == 0

        try:
            async with asyncio.timeout(self._timeout):
                yield ended
        except TimeoutError:
            raise _too_late(self._timeout) from None
        finally:
            if left:
                self._model.loop.cancel(submission)

    async def events(self, mailbox: Mailbox, receive: Receive) -> AsyncGenerator[Event, None]:
        """The events of a submission. Raises ClientGone."""
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda _: mailbox.leave())
        try:
            while True:
                for one in await mailbox.take():
                    yield one
        finally:
            gone.cancel()

    def finished(self, prepared: Prepared, index: int, completion: Completion) -> dict[str, Any]:
        """The answer of a row; raises ApiError if it has none."""
        error = str(completion.error)
        if error == NOT_NUMBERS:
            raise ApiError(500, error)
        if completion.finish_reason == FinishReason.ERROR and not completion.token_ids:
            raise ApiError(500 if error.startswith("the server failed") else 503, error)
        return self._model.answer(prepared, index, completion)

    def chunks(self, prepared: Prepared, key: str) -> Chunks:
        """The chunks of a call."""
        call, model = prepared.call, self._model
        return Chunks(call.url, key=key, created=int(time.time()), model=model.name, usage=call.usage)

    def close(self) -> None:
        """End the thread that prepares."""
        self._preparing.shutdown(wait=False, cancel_futures=True)


class CallStream:
    """The response of a call that streams; an ASGI application."""

    def __init__(self, calls: Calls, prepared: Prepared, submission: Submission, mailbox: Mailbox, key: str) -> None:
        self._calls, self._prepared, self._submission, self._mailbox = calls, prepared, submission, mailbox
        self._chunks = calls.chunks(prepared, key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async with contextlib.aclosing(self._parts(receive)) as parts:
                async for chunk in parts:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (ClientGone, OSError):  # the connection is closed
            return
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body()), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _parts(self, receive: Receive) -> AsyncGenerator[bytes, None]:
        prepared, calls = self._prepared, self._calls
        metrics, began, last = calls._metrics, time.perf_counter(), None
        streams = [calls._model.answer_stream(prepared, index) for index in range(len(prepared.rows))]
        offsets = [0] * len(streams)
        started: set[int] = set()
        tokens = 0
        async with (
            calls.ending(self._submission, len(streams)) as ended,
            contextlib.aclosing(calls.events(self._mailbox, receive)) as events,
        ):
            async for one in events:
                now = time.perf_counter()
                (metrics.first_token if last is None else metrics.between_tokens).observe(now - (last or began))
                last, index = now, one.index
                done = None if one.completion is None else calls.finished(prepared, index, one.completion)
                part = streams[index].push(one.tokens)
                if done is not None:
                    part += streams[index].finish(
                        done["generated_text"], done["reasoning"], has_calls=bool(done["tool_calls"])
                    )
                    tokens += done["generated_tokens"]
                if index not in started:
                    started.add(index)
                    yield self._chunks.first(index)
                wants = prepared.rows[index].sampling.logprobs is not None
                if part or done is not None or wants:
                    logprobs = [token.to_dict(calls._model.token_text) for token in one.logprobs] if wants else None
                    yield self._chunks.part(index, part, logprobs, offsets[index], done)
                    offsets[index] += len(part.text)
                if ended(one):
                    break
        if prepared.call.usage:
            yield self._chunks.usage(prepared.prompt_tokens, tokens)


def _too_late(seconds: float) -> ApiError:
    return ApiError(504, f"not answered within {seconds:g} s; send fewer tokens", "timeout")


async def _gone(receive: Receive) -> None:
    """Return once the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
