"""Bodies of requests to a server: what a batch file's requests may say, and what only a server can do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.engine.errors import UserError
from actors.openai_requests import CHAT, CompletionRequest, read_request

MOST_PROMPTS = 256  # of one request


@dataclass(frozen=True)
class Call:
    """A request's body.

    Args:
        url: One of `ENDPOINTS`.
        prompts: One a prompt; they have the same parameters.
        model: The name that the body gives; None for none.
        stream: Send tokens as they are sampled.
        usage: Send the counts of tokens after the last of them.
        speed: Nominal speed-up; None for the server's.
        echo: Give the prompt back before the answer.
    """

    url: str
    prompts: Sequence[CompletionRequest]
    model: str | None
    stream: bool
    usage: bool
    speed: float | None
    echo: bool


def read_call(url: str, body: Any) -> Call:
    """The call in a body. Raises UserError that names the key that is unknown, unsupported or wrong."""
    if not isinstance(body, Mapping):
        raise UserError("the body must be a JSON object")
    rest = {name: value for name, value in body.items() if value is not None}
    stream = _flag(rest, "stream")
    options = rest.pop("stream_options", {})
    if not isinstance(options, Mapping) or not set(options) <= {"include_usage"}:
        raise UserError("body: stream_options may have include_usage alone")
    usage = _flag(dict(options), "include_usage")
    if usage and not stream:
        raise UserError("body: stream_options needs stream: true")
    speed = _speed(rest.pop("speed", None))
    echo = _flag(rest, "echo") if url != CHAT else False
    if echo and "logprobs" in rest:
        raise UserError("body: echo with logprobs is not supported: vLLM's server scores prompts")
    if echo and stream:
        raise UserError("body: echo does not go with stream: true")
    bodies = [rest] if url == CHAT else [{**rest, "prompt": prompt} for prompt in _prompts(rest.pop("prompt", None))]
    prompts = [read_request(url, each) for each in bodies]
    return Call(url, prompts, rest.get("model"), stream, usage, speed, echo)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"body: {name} = {value!r}: must be true or false")
    return bool(value)


def _speed(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf:
        raise UserError(f"body: speed = {value!r}: must be a number of at least 1")
    return float(value)


def _prompts(value: Any) -> list[Any]:
    """A body's `prompt` as a list: it is one text, one list of token ids, or a list of either."""
    if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
        if len(value) > MOST_PROMPTS:
            raise UserError(f"body: prompt has {len(value)} prompts, at most {MOST_PROMPTS} fit one request")
        return value
    return [value]
