"""Times the answers of several schedules on the same rows and batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import EngineStats
from actors.generator import Generator
from actors.settings import EngineSettings
from pipeline.checkpoints.resolve import ResolvedCheckpoint, fetch
from pipeline.config.job import JobConfig
from pipeline.learn.score.lines import Line
from pipeline.learn.speeds import Variant
from pipeline.messages import LEAST_TIMED, counted
from pipeline.runtime.announce import RowProgress, announce

GREEDY = {"temperature": 0.0, "n": 1, "logprobs": None}  # sampled answers differ even without a loss of quality


def greedy_settings(config: JobConfig, folder: Path, adapter: Path | None, **own: Any) -> EngineSettings:
    """Return settings that answer as the job does, but greedily and at any schedule. own: the caller's settings."""
    return EngineSettings(
        str(folder),
        speed_adapter=None if adapter is None else str(adapter),
        unadapted=True,
        sampling={**config.sampling.model_dump(exclude={"seed"}), **GREEDY},
        choices=config.choices,
        dtype=config.model.dtype,
        threads=config.actors.threads,
        max_batch=config.rows_in_flight,
        **own,
    )


@dataclass
class TimedRun:
    """Answers of a line, and for each timed round the time of the whole run (`seconds`) and of its decode steps."""

    answers: list[Answer]
    stats: EngineStats
    seconds: list[float]
    decode_seconds: list[float]


def common_batch(generator: Generator, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Return how many rows fit the KV cache at full depth, at most max_batch. All schedules use this batch size.

    generator: at full depth. new_tokens: maximum tokens of an answer. Raises UserError if one row alone does not fit.
    """
    engine, longest = generator.engine, max(prompts, key=lambda prompt: len(prompt.ids))
    length, shortest = len(longest.ids), min(len(prompt.ids) for prompt in prompts)

    def row_bytes(prompt_tokens: int) -> int:
        """Return the maximum cache size of a row with `prompt_tokens` tokens, padded to the longest prompt."""
        return engine.row_bytes(length, max(1, min(new_tokens, engine.decoder.context_length - prompt_tokens)))

    if row_bytes(length) > generator.settings.cache_bytes:
        raise UserError(
            f"{longest.source}: row {longest.row}: needs {row_bytes(length)} bytes of cache at full depth, "
            f"but actors.cache_bytes is {generator.settings.cache_bytes}; raise it"
        )
    fitting = generator.settings.cache_bytes // max(1, row_bytes(shortest))  # 0 bytes if answers have only one token
    return max(1, min(generator.settings.max_batch, fitting))


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt], stage: str = "answering") -> TimedRun:
    """Answer all rows once. Progress lines begin with `stage`.

    Raises UserError if a row cannot be answered, or if memory runs out.
    """
    scheduled = generator.at(schedule)  # on a CPU this drops the buffers of earlier runs
    progress = RowProgress(stage, len(prompts))
    began = time.perf_counter()
    answers = scheduled.answer(prompts, on_batch=progress)
    seconds = time.perf_counter() - began
    bad = next((row for row in answers if row.error is not None), None)
    if bad is not None:
        raise UserError(f"{prompts[bad.row].source}: row {prompts[bad.row].row}: {bad.error}")
    stats = scheduled.take_stats()
    if stats.out_of_memory:  # batches without enough memory were split, so their times cannot be compared
        times = counted(stats.out_of_memory, "time")
        raise UserError(f"memory ran out {times}, so the measured times are wrong: lower actors.max_batch")
    return TimedRun(answers, stats, [seconds], [stats.decode_seconds])


def time_in_turn(
    lines: Mapping[str, tuple[Generator, Schedule]], prompts: Sequence[Prompt], rounds: int
) -> dict[str, TimedRun]:
    """Answer all rows with every line in turn, `rounds` times, so that a drift of the machine affects all lines.

    Each line first warms up on its largest batch. With several rounds, or on a GPU (where each new shape costs time), a
    line warms up on all rows. Returns line -> answers and counts of the last round, and times of all rounds.
    """
    whole = rounds > 1 or any(generator.device.type == "cuda" for generator, _ in lines.values())
    longest = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    for name, (generator, schedule) in lines.items():
        announce(f"warming up {name}")
        answer(generator, schedule, prompts if whole else longest[: generator.settings.max_batch])
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


def timed_in_vllm(
    config: JobConfig,
    model: ResolvedCheckpoint,
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    lines: Sequence[Line],
    rounds: int,
) -> list[Line]:
    """Return the lines of `variants` with their times in vLLM, which runs one schedule after the other.

    vLLM loads the model again for most schedules, so lines do not take turns. Another model gets the times of 1x.
    """
    schedules = {variant.name: variant.spec.build(model.checkpoint.num_layers) for variant in variants}
    settings = greedy_settings(
        config,
        fetch(model.source),
        None if model.adapter is None else fetch(model.adapter),
        schedule=min(schedules.values(), key=lambda schedule: schedule.depths[-1]),
        device=config.model.device,
        vllm=config.model.vllm or {},
        cache_bytes=config.actors.cache_bytes or 0,
    )
    generator, timed = Generator(settings), dict[str, TimedRun]()
    for name, schedule in schedules.items():
        generator = generator.at(schedule)
        announce(f"answering {len(prompts):,} rows at {name} in vLLM")
        answer(generator, schedule, prompts)  # loads the model, and warms up
        each = [answer(generator, schedule, prompts, name) for _ in range(rounds)]
        seconds, decode = (
            [value for run in each for value in getattr(run, one)] for one in ("seconds", "decode_seconds")
        )
        timed[name] = TimedRun(each[-1].answers, each[-1].stats, seconds, decode)
    generator.engine.close()
    base, found = timed[variants[0].name], list[Line]()
    for line in lines:
        run = timed.get(line.name, base)
        found.append(
            replace(
                line,
                seconds=median(run.seconds),
                decode_seconds=median(run.decode_seconds),
                tokens_per_second=run.stats.generated_tokens / median(run.seconds),
                timed_seconds=sum(run.seconds),
                wall_clock=clock_speedup(base.seconds, run.seconds),
                decode_wall_clock=clock_speedup(base.decode_seconds, run.decode_seconds),
            )
        )
    return found


def clock_speedup(base: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the ratio of the medians of two lists of times; None if one list's sum is less than `LEAST_TIMED`."""
    return median(base) / median(seconds) if min(sum(base), sum(seconds)) >= LEAST_TIMED else None
