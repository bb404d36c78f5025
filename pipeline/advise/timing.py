"""Times some of a job's rows at several speeds, in an actor's process."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from actors.answers import Prompt
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from actors.settings import EngineSettings
from pipeline.answer.answer_checks import texts_of
from pipeline.answer.settings import fetched

SAMPLE_SHARE, LEAST_SECONDS = 0.1, 2.0  # maximum share of the job's time in the sample; seconds that are always allowed
WARM_UP_ROWS, WARM_UP_SHARE = 8, 1 / 80  # maximum number and share of the job's rows in the first call, a warm-up
GROWTH = 2  # ratio of a call's rows to those of the call before it, until batches are full or the time is used
MOST_CALLS = 4  # maximum number of calls of equal size at each speed
BATCH_GAIN, MOST_GAIN = 2.0, 8.0  # seconds per row of a small batch ÷ those of a full one: assumed at first, at most


@dataclass(frozen=True)
class TimedCall:
    """Measurements of one call of a `Generator`. own_seconds: of the call with these rows at the job's own speed."""

    rows: int
    seconds: float
    own_seconds: float
    stats: EngineStats
    texts: list[str]


@dataclass(frozen=True)
class Sample:
    """What an actor has measured.

    loaded: time at which the first model was ready, s since 1970. calls: by speed; those at the own speed have the same
    number of rows. gain: seconds per row of full batches ÷ those of these calls; 1 if they had full batches.
    """

    loaded: float
    calls: dict[str, list[TimedCall]]
    gain: float


def by_model(settings: EngineSettings, speeds: Mapping[str, Schedule]) -> list[dict[str, Schedule]]:
    """Return the speeds in groups, one for each model that is loaded.

    1x needs a model without the merged speed adapter. A vLLM engine in which every token runs the same layers holds no
    others (see `actors.vllm.engine`).
    """
    groups: dict[Any, dict[str, Schedule]] = {}
    for name, schedule in speeds.items():
        one_depth = settings.vllm is not None and schedule.is_uniform
        without = settings.speed_adapter is not None and schedule.is_full_depth
        groups.setdefault(schedule.prompt_layers if one_depth else without, {})[name] = schedule
    return list(groups.values())


def time_speeds(
    given: Sequence[Prompt],
    settings: EngineSettings,
    speeds: Mapping[str, Schedule],
    size: int,
    seconds: float,
    rows: float,
) -> Sample:
    """Answer rows at each speed, and time the calls. Other speeds answer the same rows as the job's own speed.

    Args:
        given: Prompts of the rows. If time runs out, some of them are not answered.
        settings: Settings of the engine, in which checkpoint and speed adapter are sources for `fetch`.
        speeds: Speed -> schedule. The first one is the job's own. 1x comes next, others only if time is left.
        size: Maximum number of rows in a call.
        seconds: Time limit for all speeds, without the time to load models. The first call may exceed it.
        rows: Number of rows that the busiest actor answers in the job; see `SAMPLE_SHARE`.
    """
    from actors.generator import Generator

    settings, loaded = fetched(settings), 0.0
    sampler, groups = _Sampler(given, speeds, size, settings.max_batch, seconds, rows), by_model(settings, speeds)
    for number, group in enumerate(groups, 1):
        names = sorted(group, key=lambda name: name not in (sampler.own, "1x"))
        if number > 1 and not any(map(sampler.fitting, names)):
            continue  # without loading this model
        first = next(iter(group.values()))
        adapter = None if first.is_full_depth else settings.speed_adapter
        one = Generator(replace(settings, speed_adapter=adapter, schedule=first))
        generators = {name: one.at(group[name]) for name in names}
        if number == 1:
            loaded = time.time()
            sampler.grow(generators[sampler.own])
        else:
            sampler.call(generators[names[0]], sampler.warm_up)
        sampler.rotate(generators, 1.0 if "1x" in group or sampler.calls["1x"] else sampler.share)
        if number < len(groups):  # free this model, because two may not fit into memory
            one.engine.close()
            del one, generators
            gc.collect()
    return Sample(loaded, sampler.calls, sampler.gain)


def time_in_parts(
    generators: Mapping[str, Any], given: Sequence[Prompt], size: int, seconds: float
) -> tuple[int, dict[str, float]]:
    """Answer the same rows with each generator, `size` rows at a time and by turns, until each has taken `seconds`.

    The first part is answered once more before, to warm up. After the last row come the first ones again. Return the
    number of rows, and the seconds of each generator.
    """
    parts = [given[start : start + size] for start in range(0, len(given), size)]
    answered, spent = 0, dict.fromkeys(generators, 0.0)
    for generator in generators.values():
        generator.answer(parts[0])
    for part in cycle(parts):
        for name, generator in generators.items():
            began = time.perf_counter()
            generator.answer(part)
            spent[name] += time.perf_counter() - began
        answered += len(part)
        if min(spent.values()) >= seconds:
            break
    return answered, spent


class _Sampler:
    """Times calls as long as they fit into `limit`. For the arguments see `time_speeds`; full: rows of a full batch."""

    def __init__(
        self,
        given: Sequence[Prompt],
        speeds: Mapping[str, Schedule],
        size: int,
        full: int,
        seconds: float,
        rows: float,
    ) -> None:
        self.given, self.size, self.full, self.rows = given, min(size, len(given)), min(full, size), rows
        self.own = next(iter(speeds))
        nominal = {name: schedule.speedup or 1.0 for name, schedule in speeds.items()}
        self.cost = {name: nominal[self.own] / nominal[name] for name in speeds}  # assumed, relative to the own speed's
        self.warm_up = max(1, min(WARM_UP_ROWS, int(WARM_UP_SHARE * rows), self.size))
        self.calls = {name: list[TimedCall]() for name in speeds}
        self.grown = list[TimedCall]()  # calls at the own speed, each larger than the one before it
        self.seconds = self.limit = seconds
        # of the limit: for calls before 1x is timed, so that both can have the same rows
        self.share = 1 / sum(self.cost[name] for name in {self.own, "1x"} & self.cost.keys())
        self.spent, self.gain = 0.0, 1.0

    def call(self, generator: Any, rows: int, part: int = 0, own_seconds: float | None = None) -> TimedCall:
        """Time a call with `rows` rows that are spread over the whole input. Another `part` has other rows."""
        asked = self.given[part :: max(1, len(self.given) // rows)][:rows]
        generator.take_stats()
        began = time.perf_counter()
        texts = texts_of(generator.answer(asked))
        seconds = time.perf_counter() - began
        self.spent += seconds
        return TimedCall(rows, seconds, seconds if own_seconds is None else own_seconds, generator.take_stats(), texts)

    def grow(self, generator: Any) -> None:
        """Time growing calls at the own speed until batches are full, or a larger call would leave no time for 1x."""
        rows = self.warm_up
        while True:
            self.grown.append(last := self.call(generator, rows))
            second, further = last.seconds / last.rows, last.seconds / last.rows  # s per row; s per further row
            self.gain = 1.0 if rows >= self.full else 1 / BATCH_GAIN
            if len(self.grown) > 1:  # as if seconds were linear in rows
                before = self.grown[-2]
                further = (last.seconds - before.seconds) / (last.rows - before.rows)
                further = min(second, max(further, second / MOST_GAIN))
                self.gain = (further + (second - further) * min(1.0, rows / self.full)) / second
            self.limit = min(self.seconds, max(LEAST_SECONDS, SAMPLE_SHARE * self.rows * second * self.gain))
            larger = min(GROWTH * rows, self.size)
            allowed = self.limit * (self.share if len(self.grown) > 1 else 1.0)  # two calls, to know the gain
            if larger <= rows or self.spent + last.seconds + further * (larger - rows) > allowed:
                break
            rows = larger
        self.calls[self.own].append(last)
        self.grown = self.grown[1:] or self.grown  # without the warm-up

    def fitting(self, name: str, share: float = 1.0) -> TimedCall | None:
        """Return the largest call at the own speed whose rows another speed can answer in the time that is left."""
        left = share * self.limit - self.spent
        return next((call for call in reversed(self.grown) if self.cost[name] * call.seconds <= left), None)

    def rotate(self, generators: Mapping[str, Any], share: float) -> None:
        """Time calls at all speeds in rotation, so that changes of the machine's speed affect all of them equally.

        share: how much of the limit these calls and those before them may take.
        """
        for name, generator in generators.items():
            if name != self.own and (call := self.fitting(name, share)) is not None:
                self.calls[name].append(self.call(generator, call.rows, 0, call.seconds))
        rows, of_own = self.grown[-1].rows, self.calls[self.own]
        for part in range(1, min(MOST_CALLS, len(self.given) // rows)):
            for name, generator in generators.items():
                calls = self.calls[name]
                fits = len(calls) == part and self.spent + calls[-1].seconds <= share * self.limit
                if fits and calls[-1].rows == rows and (name == self.own or len(of_own) > part):
                    beside = None if name == self.own else of_own[part].seconds
                    calls.append(self.call(generator, rows, part, beside))
