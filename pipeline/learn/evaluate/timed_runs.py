"""Answers and wall clocks of several schedules over the same rows in the same batches, timed in turn."""

from __future__ import annotations

import statistics
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
    """Answers of a line, and their times. seconds, decode_seconds: one entry for each timed round."""

    answers: list[Answer]
    stats: EngineStats
    seconds: list[float]
    decode_seconds: list[float]

    @property
    def texts(self) -> list[str]:
        """The answers' texts, one a row."""
        return [answer.generated_text or "" for answer in self.answers]

    @property
    def median_seconds(self) -> float:
        """Seconds of the whole run."""
        return statistics.median(self.seconds)

    @property
    def median_decode_seconds(self) -> float:
        """Seconds of the decode steps."""
        return statistics.median(self.decode_seconds)


def common_batch(generator: Generator, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Rows a batch at most, so that full depth, which needs the most cache, forms the same batches as every schedule.

    Args:
        generator: at full depth.
        prompts: all rows.
        new_tokens: of an answer at most, where the context has room.

    Raises:
        UserError: a row's cache alone is over the budget.
    """
    engine = generator.engine
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    length, shortest = len(longest.ids), min(len(prompt.ids) for prompt in prompts)
    context = engine.decoder.context_length

    def row_bytes(prompt_tokens: int) -> int:
        """Cache of a row in a batch with the longest prompt; its answer may fill the rest of the context."""
        return engine.row_bytes(length, max(1, min(new_tokens, context - prompt_tokens)))

    if row_bytes(length) > generator.cache_bytes:
        raise UserError(
            f"{longest.source}: row {longest.row}: needs {row_bytes(length)} bytes of cache at full depth, "
            f"the budget is {generator.cache_bytes}; raise cache_bytes"
        )
    fitting = generator.cache_bytes // max(1, row_bytes(shortest))  # an answer of one token keeps no cache
    return max(1, min(generator.max_batch, fitting))


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt], stage: str = "answering") -> TimedRun:
    """Answer all rows once; the number of rows done is announced under the name `stage`.

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
    lines: Mapping[str, tuple[Generator, Schedule]],
    prompts: Sequence[Prompt],
    rounds: int,
) -> dict[str, TimedRun]:
    """Answer all rows under every line, `rounds` times: one line after the other, so that a drift affects all.

    Every line warms up first: on its largest batch; or in a whole round where there are several rounds, and on a
    GPU, as each new shape costs time there. Answers and counts are the last round's.
    """
    whole_warm_up = rounds > 1 or any(generator.device.type == "cuda" for generator, _ in lines.values())
    warm_ups = int(whole_warm_up)
    if not whole_warm_up:
        longest = sorted(prompts, key=lambda prompt: -len(prompt.ids))
        for name, (generator, schedule) in lines.items():
            announce(f"warming up {name}")
            answer(generator, schedule, longest[: generator.max_batch])
    seconds: dict[str, list[float]] = {name: [] for name in lines}
    decode_seconds: dict[str, list[float]] = {name: [] for name in lines}
    runs: dict[str, TimedRun] = {}
    for number in range(warm_ups + rounds):
        stage = f"warm-up {number + 1}" if number < warm_ups else f"round {number - warm_ups + 1} of {rounds}"
        for name in lines:
            announce(f"answering {len(prompts):,} rows at {name}, {stage}")
            run = answer(*lines[name], prompts, f"{name}, {stage}")
            if number < warm_ups:
                continue
            seconds[name] += run.seconds
            decode_seconds[name] += run.decode_seconds
            runs[name] = TimedRun(run.answers, run.stats, seconds[name], decode_seconds[name])
    return runs
