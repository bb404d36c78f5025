"""Where an actor runs: answer some of the job's rows at several speeds, and time every pass and step."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.answers import Prompt
from actors.engine.schedules.schedule import Schedule
from pipeline.estimate.costs import KeptPrefix, pass_terms, step_terms
from pipeline.generate.answer_checks import texts_of
from pipeline.generate.settings import fetched

if TYPE_CHECKING:
    from actors.engine.protocol import Ended, EngineProtocol
    from actors.engine.types import Request
    from actors.generator import Generator

WARM_UP_ROWS = 8
EXACT, LOOKUP = "exact", "exact: lookup"  # speeds: exact mode as the job has it; with prompt lookup alone


@dataclass(frozen=True)
class Answered:
    """A sampled request: tokens of its prompt, its limit, tokens of its answer."""

    prompt_tokens: int
    limit: int
    tokens: int


@dataclass(frozen=True)
class Chunk:
    """Rows that one call answered.

    Args:
        rows: Of each request, its number in the actor's sample.
        answered: The requests.
        seconds: Of the call.
        prompts: Token ids of each request.
        texts: The answers.
    """

    rows: list[int]
    answered: list[Answered]
    seconds: float
    prompts: list[Sequence[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass
class SpeedSample:
    """Measurements at one speed. passes, steps: terms and then seconds; see `costs`. chunks: without the warm-up."""

    passes: list[list[float]] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass(frozen=True)
class ActorSample:
    """What one actor measured.

    loaded: s since 1970 when its model was ready. token_bytes, context, grows: see `EngineShape`.
    """

    loaded: float
    token_bytes: int
    context: int
    grows: bool
    speeds: dict[str, SpeedSample]


class RecordingEngine:
    """An engine that notes terms and seconds of each pass and step; in all else the engine within."""

    def __init__(self, engine: EngineProtocol) -> None:
        self.engine = engine
        self.sample = SpeedSample()
        self._prefix = KeptPrefix()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """See `EngineProtocol`."""
        lengths = [len(ids) for ids in {tuple(request.prompt_ids) for request in requests}]
        new = self._prefix.is_new(prefix)
        terms = pass_terms(self.engine.schedule, lengths, len(prefix), len(requests), new_prefix=new)
        began = time.perf_counter()
        tickets = self.engine.admit(requests, prefix)
        self.sample.passes.append([*terms, time.perf_counter() - began])
        return tickets

    def step(self, *, last: bool = False) -> Ended:
        """See `EngineProtocol`."""
        rows = [row for row in self.engine.rows if row.finish is None]
        began = time.perf_counter()
        ended = self.engine.step(last=last)
        if rows:
            # positions have moved on by one
            positions = np.array([max(row.position - 1, 0) for row in rows], float)
            contexts = positions + 1 + np.array([len(row.request.prompt_ids) for row in rows], float)
            terms = step_terms(self.engine.schedule, positions, contexts)
            self.sample.steps.append([*terms, time.perf_counter() - began])
        return ended


def measure_actor(
    prompts: Sequence[Prompt],
    generator: Mapping[str, Any],
    prefix: Sequence[int],
    schedules: Mapping[str, Schedule],
    seconds: float,
) -> ActorSample:
    """Answer as many of the prompts as the time allows, at each speed.

    Args:
        prompts: rows of the sample that this actor answers.
        generator: arguments of `Generator`, checkpoint and speed adapter as `fetch` takes them; the adapter is merged
            for schedules that skip.
        prefix: token ids with which the prompts begin.
        schedules: by speed; those at full depth follow each other. EXACT is exact mode with the generator's `drafts`.
        seconds: for all speeds, after the first model is loaded; a first small batch of a speed may take longer.
    """
    from actors.generator import Generator

    settings = fetched(generator)
    loaded, deadline = 0.0, 0.0
    samples: dict[str, SpeedSample] = {}
    left, one = len(schedules), None
    has_adapter = settings.get("speed_adapter") is not None
    for (is_merged, drafts), group in itertools.groupby(
        schedules, key=lambda name: (has_adapter and not schedules[name].is_full_depth, name == EXACT)
    ):
        names = list(group)
        changes = {} if drafts else {"speed_adapter": settings["speed_adapter"] if is_merged else None, "drafts": None}
        one = None  # two models do not share the memory
        gc.collect()
        one = Generator(**{**settings, **changes})
        loaded = loaded or time.time()
        deadline = deadline or time.monotonic() + seconds
        until = time.monotonic() + max(0.0, (deadline - time.monotonic()) * len(names) / left)
        scheduled = {name: _scheduled(one, name, schedules[name]) for name in names}
        runs = {name: _SpeedRun(this, prompts, prefix) for name, this in scheduled.items() if this is not None}
        _in_turn(list(runs.values()), until)
        samples |= {name: run.engine.sample for name, run in runs.items()}
        left -= len(names)
    assert one is not None
    samples = {name: samples.get(name, SpeedSample()) for name in schedules}
    engine = one.engine
    return ActorSample(loaded, engine.token_bytes, engine.decoder.context_length, engine.grows, samples)


def _scheduled(generator: Generator, name: str, schedule: Schedule) -> Generator | None:
    """The generator at one speed; None for exact mode where it would draft nothing."""
    if name == EXACT:
        return generator
    return generator.exact() if name == LOOKUP else generator.at(schedule)


def _in_turn(runs: list[_SpeedRun], until: float) -> None:
    """A batch of each speed, then the next batch of each: a drift of the machine affects all speeds."""
    while runs:
        runs = [run for run in runs if run.next_batch((until - time.monotonic()) / len(runs))]


class _SpeedRun:
    """The rows of one actor at one speed, after a small batch that is not timed."""

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], prefix: Sequence[int]) -> None:
        self.engine, self.prompts, self.prefix = RecordingEngine(generator.engine), prompts, prefix
        self.generator = generator.with_engine(self.engine)
        first = range(min(WARM_UP_ROWS, len(prompts)))
        warm_up = self._answer(first)
        self.engine.sample = SpeedSample()
        self._answer(first)  # a pass of another size, else its costs are not told apart
        # refilled slots are measured too
        self.size = generator.max_batch * (2 if generator.scheduler == "refill" else 1)
        self.row_seconds = warm_up.seconds / len(first)
        self.place = 0

    def next_batch(self, seconds: float) -> bool:
        """Answer a full batch, or a smaller one if the first must be; False if rows or seconds are used up."""
        size = min(self.size, len(self.prompts) - self.place)
        fits = int(seconds / self.row_seconds)
        if size == 0 or (fits < size and self.engine.sample.chunks):
            return False
        rows = range(self.place, self.place + min(size, max(fits, WARM_UP_ROWS)))
        chunk = self._answer(rows)
        self.engine.sample.chunks.append(chunk)
        self.row_seconds, self.place = chunk.seconds / len(rows), rows.stop
        return True

    def _answer(self, rows: Sequence[int]) -> Chunk:
        began = time.perf_counter()
        answers = self.generator.answer([self.prompts[row] for row in rows], self.prefix)
        seconds = time.perf_counter() - began
        good = [(rows[answer.row], answer) for answer in answers if answer.generated_tokens]
        limits = {row: self.generator.token_limit(self.prompts[row]) for row, _ in good}
        answered = [Answered(answer.prompt_tokens, limits[row], answer.generated_tokens) for row, answer in good]
        prompts = [self.prompts[row].ids for row, _ in good]
        return Chunk([row for row, _ in good], answered, seconds, prompts, texts_of(answers))
