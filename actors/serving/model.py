"""Serves a loaded model: converts request bodies to rows of the engine, and completions to answers."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from actors.answers import Prompt
from actors.engine.constraints.output_format import OutputFormat
from actors.engine.constraints.reasoning import AfterReasoning
from actors.engine.errors import UserError, flat
from actors.engine.types import Request
from actors.generator import Generator
from actors.openai_requests import CHAT, TEXT, CompletionRequest, read_request
from actors.serving.loop import OnlineLoop
from actors.serving.texts import AnswerStream

MAX_PROMPTS = 256  # maximum number of prompts in one request
# (tokenizer, messages of a body) -> result of `ControlTokens.prompt`
Render = Callable[[Any, Any], tuple[str, int]]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class _StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    choice: list[str] | None = Field(None, min_length=1)
    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None


class _ServerKeys(BaseModel):
    """Keys that a server accepts, but a batch file does not. `guided_choice` and `structured_outputs` are vLLM's."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    speed: float | None = Field(None, ge=1)
    choices: list[str] | None = Field(None, min_length=1)
    guided_choice: list[str] | None = Field(None, min_length=1)
    structured_outputs: _StructuredOutputs | None = None

    def labels_and_form(self) -> tuple[list[str] | None, OutputFormat | None]:
        """Return the labels to choose an answer from, and the format in `structured_outputs`; None for a missing one.

        Raises UserError if several keys give labels, or if `structured_outputs` does not hold exactly one key.
        """
        form = {} if self.structured_outputs is None else self.structured_outputs.model_dump(exclude_none=True)
        if self.structured_outputs is not None and len(form) != 1:
            raise UserError("body: structured_outputs needs exactly one of choice, json, regex")
        given = [one for one in (self.choices, self.guided_choice, form.pop("choice", None)) if one is not None]
        if len(given) > 1:
            raise UserError("body: give only one of these: choices, guided_choice, structured_outputs")
        return given[0] if given else None, OutputFormat.of(form) if form else None


@dataclass(frozen=True)
class Call:
    """A parsed request body. Each answer that it asks for is one row of the engine."""

    model: str | None  # the model's name in the body
    stream: bool  # whether tokens are sent as they are sampled
    usage: bool  # whether token counts are sent after the last token
    rows: Sequence[Request]
    prompts: Sequence[Prompt]  # the prompt of each row
    prompt_tokens: int  # number of tokens of all prompts, each counted once


class ServedModel:
    """A loaded model that answers many clients. Only one thread at a time may use `call`.

    Args:
        name: The model's name in requests.
        generator: Arguments of `Generator`. Its `sampling` holds defaults for keys that a body leaves out.
        render: Renders a chat as a prompt, or raises UserError.
        max_waiting: Maximum number of rows in the queue; further requests get status 429.

    Raises:
        UserError: The settings, the checkpoint or the device cannot be used. The message is one line.
    """

    def __init__(self, name: str, generator: Mapping[str, Any], render: Render, max_waiting: int = 256) -> None:
        self.name, self._render = name, render
        own = {"row_logprobs": True, "strip": False, "cumulative_logprob": False}
        self.generator = Generator(**{**generator, **own})
        self.tokenizer, self._builder = self.generator.tokenizer, self.generator.builder
        self.token_text = self._builder.token_text
        self.loop = OnlineLoop(
            self.generator.engine,
            cache_bytes=self.generator.cache_bytes,
            max_rows=self.generator.max_batch,
            max_waiting=max_waiting,
        )
        self._schedule_at = lru_cache(64)(self.generator.schedule_at)

    def call(self, url: str, body: Any) -> Call:
        """Convert a request's body to a `Call`. Raises a UserError that names a wrong or unsupported key."""
        if not isinstance(body, Mapping):
            raise UserError("body: must be a JSON object")
        rest = {name: value for name, value in body.items() if value is not None}
        own = {name: rest.pop(name) for name in _ServerKeys.model_fields if name in rest}
        try:
            keys = _ServerKeys.model_validate(own)
        except ValidationError as problem:
            error = problem.errors()[0]
            name, given = ".".join(map(str, error["loc"])), reprlib.repr(error["input"])
            raise UserError(f"body: {name} = {given}: {flat(error['msg'])}") from None
        if keys.stream_options.include_usage and not keys.stream:
            raise UserError("body: stream_options needs stream: true")
        if url == TEXT and rest.get("echo") is True:
            raise UserError("body: echo is not supported: prompts are neither repeated nor scored; vLLM can score them")
        bodies = (
            [rest] if url == CHAT else [{**rest, "prompt": prompt} for prompt in _prompts(rest.pop("prompt", None))]
        )
        requests = [read_request(url, each, _ServerKeys.model_fields) for each in bodies]
        schedule, (labels, form) = None if keys.speed is None else self._schedule_at(keys.speed), keys.labels_and_form()
        if form is not None:
            if any(request.output_format is not None for request in requests):
                raise UserError("body: structured_outputs cannot be combined with response_format")
            requests = [replace(request, output_format=form) for request in requests]
        prompts = [self._prompt(number, request, labels) for number, request in enumerate(requests)]
        rows: list[Request] = []
        owners: list[Prompt] = []
        for prompt in prompts:
            try:
                samples = self._builder.requests(prompt)
            except UserError as error:  # use the names of the keys in request bodies
                named = str(error).replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
                raise UserError(named.removeprefix("sampling: ")) from None
            rows += [replace(sample, schedule=schedule) for sample in samples]
            owners += [prompt] * len(samples)
        tokens = sum(len(prompt.ids) for prompt in prompts)
        return Call(rest.get("model"), keys.stream, keys.stream_options.include_usage, rows, owners, tokens)

    def _prompt(self, number: int, request: CompletionRequest, labels: list[str] | None) -> Prompt:
        form = request.output_format
        if labels is not None and form is not None:
            raise UserError("body: choices cannot be combined with response_format")
        if request.prompt is None:
            ids = self._builder.chat_ids(*self._render(self.tokenizer, request.messages))
            prompt = Prompt(ids, "", 0, None if ids else "prompt has no tokens")
        else:
            prompt = self._builder.prompt(request.prompt)
        # with a seed, equal requests get equal answers; without a seed, each request gets other random numbers
        seed = request.sampling.get("seed", self._builder.sampling.seed)
        source = secrets.token_hex(16) if seed is None else "seed"
        return replace(prompt, source=source, row=number, sampling=request.sampling, output_format=form, choices=labels)

    def answer_stream(self, call: Call, index: int) -> AnswerStream:
        """Return the `AnswerStream` of row `index`."""
        row, builder, prompt = call.rows[index], self._builder, call.prompts[index]
        thinks_first, constraint = isinstance(row.constraint, AfterReasoning), row.constraint
        has_label = prompt.choices is not None or (builder.choices is not None and prompt.output_format is None)
        read = builder.decode
        if constraint is not None and not (thinks_first or has_label):
            read = partial(constraint.text, label=None)
        return AnswerStream(
            read,
            row.ending,
            row.sampling.all_stop_ids(builder.stop_ids),
            marks=builder.reasoning,
            begun=builder.begins_thinking(row),
            text_at_end=thinks_first or has_label,
        )


def _prompts(value: Any) -> list[Any]:
    """Return the prompts of a body as a list. value: the body's `prompt`, which is one prompt or a list of prompts."""
    if isinstance(value, list) and value and all(isinstance(each, str | list) for each in value):
        if len(value) > MAX_PROMPTS:
            raise UserError(f"body: prompt has {len(value)} prompts; a request may have at most {MAX_PROMPTS}")
        return value
    return [value]
