"""One model, loaded, with its loop: calls become rows, rows' completions become answers."""

from __future__ import annotations

import math
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from actors.answers import Prompt
from actors.engine.constraints.reasoning import AfterReasoning
from actors.engine.errors import UserError
from actors.engine.online.loop import OnlineLoop
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Completion, Request
from actors.generator import Generator
from actors.openai_requests import CompletionRequest
from actors.serving.bodies import Call
from actors.serving.texts import AnswerStream, TextStream
from actors.tool_calls import checked_tools, form_of

MOST_SPEEDS = 64  # whose schedules are kept
# (tokenizer, a body's messages, checked tools) -> `ControlTokens.prompt`
Render = Callable[[Any, Any, Sequence[Mapping[str, Any]]], tuple[str, int]]


@dataclass(frozen=True)
class ModelSettings:
    """The served model: its name, its engine's settings, and the length of its queue.

    Args:
        name: The model's name in requests.
        generator: Arguments of `Generator`; its `sampling` holds the defaults of a body's keys.
        max_waiting: Largest number of answers in the queue; above it a request is refused with status 429.
        events_per_second: Most events of streamed answers, but for their first and last; see `OnlineLoop`.
    """

    name: str
    generator: Mapping[str, Any]
    max_waiting: int = 256
    events_per_second: float = math.inf


@dataclass(frozen=True)
class Prepared:
    """A call as rows of the engine.

    Args:
        rows: The answers to be, those of one prompt one behind another.
        prompts: Its prompts.
        samples: Answers to each prompt.
    """

    call: Call
    rows: Sequence[Request]
    prompts: Sequence[Prompt]
    samples: int

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of row `index`."""
        return self.prompts[index // self.samples]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)


class ServedModel:
    """A model that answers calls of many clients; `prepare` is called by one thread at a time.

    Args:
        settings: Which model, and its limits.
        render: Writes a chat's messages as a prompt, or raises UserError; None: transformers' chat template.

    Raises:
        UserError: Settings, checkpoint or device that do not fit, in one line.
    """

    def __init__(self, settings: ModelSettings, render: Render | None = None) -> None:
        self.name, self._render = settings.name, render
        self.generator = Generator(
            **{**settings.generator, "row_logprobs": True, "strip": False, "cumulative_logprob": False}
        )
        self.tokenizer, self._builder = self.generator.tokenizer, self.generator.builder
        self.loop = OnlineLoop(
            self.generator.engine,
            cache_bytes=self.generator.cache_bytes,
            max_rows=self.generator.max_batch,
            max_waiting=settings.max_waiting,
            events_per_second=settings.events_per_second,
        )
        self._schedules: dict[float, Schedule] = {}

    def prepare(self, call: Call) -> Prepared:
        """The call's rows. Raises UserError for one that cannot be answered."""
        schedule = None if call.speed is None else self._schedule(call.speed)
        rows: list[Request] = []
        prompts = [self._prompt(number, request) for number, request in enumerate(call.prompts)]
        for prompt in prompts:
            try:
                samples = self._builder.requests(prompt)
            except UserError as error:
                raise UserError(_as_in_bodies(str(error))) from None
            rows += [replace(sample, schedule=schedule) for sample in samples]
        return Prepared(call, rows, prompts, len(rows) // len(prompts))

    def _prompt(self, number: int, request: CompletionRequest) -> Prompt:
        value: Any = request.prompt
        tools = checked_tools(request.tools)
        form = request.checked_form(tools, self.tokenizer)
        if value is None and self._render is not None:
            ids = self._builder.chat_ids(*self._render(self.tokenizer, request.messages, tools))
            prompt = Prompt(ids, "", 0, None if ids else "prompt has no tokens", tools=bool(tools))
        elif value is None:
            if not isinstance(request.messages, list) or not all(isinstance(one, Mapping) for one in request.messages):
                raise UserError("messages must be a list of objects with role and content")
            prompt = self._builder.prompt(request.messages, tools=tools)
        else:
            prompt = self._builder.prompt(value)
        # with a seed, equal requests have equal answers; without, each has random numbers of its own
        source = "seed" if "seed" in request.sampling else f"{uuid.uuid4()}-{secrets.randbits(64)}"
        return replace(prompt, source=source, row=number, sampling=request.sampling, output_format=form)

    def _schedule(self, speed: float) -> Schedule:
        if speed not in self._schedules:
            schedule = self.generator.schedule_at(speed)
            if len(self._schedules) >= MOST_SPEEDS:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[speed] = schedule
        return self._schedules[speed]

    def answer_stream(self, prepared: Prepared, index: int) -> AnswerStream:
        """For the parts of a row's answer."""
        row, builder = prepared.rows[index], self._builder
        thinks_first, decode = isinstance(row.constraint, AfterReasoning), self.decode
        if row.constraint is not None and not thinks_first:
            decode = partial(row.constraint.text, label=None)
        ends, start = row.sampling.all_stop_ids(builder.stop_ids), builder.answer_start(row.prompt_ids)
        text = TextStream(decode, row.sampling.stop, ends, start)
        calls = form_of(self.tokenizer) if prepared.prompt_of(index).tools else None
        begun = builder.begins_thinking(row)
        return AnswerStream(text, builder.reasoning, begun=begun, has_form=thinks_first, calls=calls)

    def answer(self, prepared: Prepared, index: int, completion: Completion) -> dict[str, Any]:
        """A row's answer with the fields that `completion_body` reads. The completion has tokens."""
        answer = self.generator.completed(prepared.prompt_of(index), 0, index, prepared.rows[index], completion)
        return {**vars(answer), "tool_calls": [call.to_dict() for call in answer.tool_calls or ()]}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """The text of one token, special ones included."""
        return self._builder.token_text(token)


def _as_in_bodies(error: str) -> str:
    """A message about sampling parameters, with the names that bodies have for them."""
    renamed = error.replace("max_new_tokens", "max_tokens").replace("min_new_tokens", "min_tokens")
    return renamed.removeprefix("sampling: ")
