"""Answers and wall clocks of several schedules over the same rows in the same batches, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from actors.generator import Generator
from pipeline.runtime.announce import RowProgress, announce


@dataclass
class TimedRun:
    """Answers of a line, and their times. seconds, decode_seconds: one number for each timed round."""

    answers: list[Answer]
    stats: EngineStats
    seconds: list[float]
    decode_seconds: list[float]


def common_batch(generator: Generator, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Return the maximum rows of a batch at which all schedules form the batches of full depth, which needs most.

    generator: the model at full depth. new_tokens: maximum tokens of an answer. Raises UserError if a row's
    cache alone is over the budget.
    """
    engine, longest = generator.engine, max(prompts, key=lambda prompt: len(prompt.ids))
    length, shortest = len(longest.ids), min(len(prompt.ids) for prompt in prompts)

    def row_bytes(prompt_tokens: int) -> int:
        """Return a row's cache in a batch with the longest prompt, if its answer fills the rest of the context."""
        return engine.row_bytes(length, max(1, min(new_tokens, engine.decoder.context_length - prompt_tokens)))

    if row_bytes(length) > generator.cache_bytes:
        raise UserError(
            f"{longest.source}: row {longest.row}: needs {row_bytes(length)} bytes of cache at full depth, "
            f"the budget is {generator.cache_bytes}; raise cache_bytes"
        )
    fitting = generator.cache_bytes // max(1, row_bytes(shortest))  # an answer of one token keeps no cache
    return max(1, min(generator.max_batch, fitting))


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt], stage: str = "answering") -> TimedRun:
    """Answer all rows once, and announce the number of rows done under the name `stage`.

    Raises UserError for a row that cannot be answered, or if memory ran out.
    """
    scheduled = generator.at(schedule)  # on a CPU without buffers of an earlier run
    progress = RowProgress(stage, len(prompts))
    began = time.perf_counter()
    answers = scheduled.answer(prompts, on_batch=progress)
    seconds = time.perf_counter() - began
    bad = next((row for row in answers if row.error is not None), None)
    if bad is not None:
        raise UserError(f"{prompts[bad.row].source}: row {prompts[bad.row].row}: {bad.error}")
    stats = scheduled.take_stats()
    if stats.out_of_memory:  # the batches were cut again, so that times are not comparable
        raise UserError(f"memory ran out in {stats.out_of_memory} batches, nothing can be timed: lower max_batch")
    return TimedRun(answers, stats, [seconds], [stats.decode_seconds])


def time_in_turn(
    lines: Mapping[str, tuple[Generator, Schedule]], prompts: Sequence[Prompt], rounds: int
) -> dict[str, TimedRun]:
    """Answer all rows under every line, `rounds` times: one line after the other, so that a drift affects all.

    Every line warms up first on its largest batch; or in a whole round if there are several rounds, and on a
    GPU, as each new shape costs time there. Answers and counts are the last round's.
    """
    whole = rounds > 1 or any(generator.device.type == "cuda" for generator, _ in lines.values())
    longest = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    for name, (generator, schedule) in lines.items():
        announce(f"warming up {name}")
        answer(generator, schedule, prompts if whole else longest[: generator.max_batch])
    runs: dict[str, TimedRun] = {}
    for number in range(1, rounds + 1):
        for name, line in lines.items():
            stage = f"{name}, round {number} of {rounds}"
            announce(f"answering {len(prompts):,} rows at {stage}")
            run, last = answer(*line, prompts, stage), runs.get(name)
            if last is not None:
                run.seconds[:0] = last.seconds
                run.decode_seconds[:0] = last.decode_seconds
            runs[name] = run
    return runs
