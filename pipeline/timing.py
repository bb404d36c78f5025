"""Answers and wall clocks of several schedules over the same rows in the same batches, timed in turn."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track

from actors.engine.engine import Engine
from actors.engine.schedule import Schedule
from actors.engine.types import EngineStats
from actors.generator import Answer, Generator, Prompt


@dataclass
class Run:
    """What a line answered, and how long it took. seconds, decode_seconds: one entry for each timed round."""

    answers: list[Answer] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The answers' texts, one a row."""
        return [one.generated_text or "" for one in self.answers]

    @property
    def median_seconds(self) -> float:
        """Of the whole run."""
        return statistics.median(self.seconds)

    @property
    def median_decode_seconds(self) -> float:
        """Of the decode steps alone."""
        return statistics.median(self.decode_seconds)


def at_schedule(generator: Generator, schedule: Schedule) -> Generator:
    """The same model, held once, under another schedule."""
    other = copy.copy(generator)
    other.schedule = schedule
    other.engine = Engine(generator.engine.decoder, schedule, generator.engine.stop_ids)
    return other


def common_batch(generator: Generator, prompts: Sequence[Prompt]) -> int:
    """Rows a batch at most, so that full depth, which needs the most cache, cuts the rows as every schedule does.

    generator: at full depth. ValueError names a row whose cache alone is over the budget.
    """
    engine = generator.engine
    longest = max(range(len(prompts)), key=lambda row: len(prompts[row].ids))
    new = generator.sampling.max_new_tokens
    if generator.choices is not None:
        new = max(len(generator.tokenizer(one, add_special_tokens=False)["input_ids"]) for one in generator.choices) + 1
    length = len(prompts[longest].ids)
    needed = engine.row_bytes(length, max(1, min(new, engine.decoder.context_length - length)))
    if needed > generator.cache_bytes:
        raise ValueError(
            f"{prompts[longest].source}: row {prompts[longest].row}: needs {needed} bytes of cache at full depth, "
            f"the budget is {generator.cache_bytes}"
        )
    return min(generator.max_batch, generator.cache_bytes // needed)


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt]) -> Run:
    """Answer all rows once. ValueError names a row that cannot be answered."""
    fresh = at_schedule(generator, schedule)  # no buffers of a run before, of its own or another line's
    began = time.perf_counter()
    answers = fresh.answer(prompts)
    seconds = time.perf_counter() - began
    bad = next((one for one in answers if one.error is not None), None)
    if bad is not None:
        raise ValueError(f"{prompts[bad.row].source}: row {prompts[bad.row].row}: {bad.error}")
    stats = fresh.take_stats()
    return Run(answers, stats, [seconds], [stats.decode_seconds])


def time_in_turn(
    lines: Mapping[str, tuple[Generator, Schedule]], prompts: Sequence[Prompt], rounds: int
) -> dict[str, Run]:
    """Answer all rows under every line, `rounds` times: one line after the other, so that a drift hits all.

    Of several rounds one more is run, the first, which only warms up; before a single one, two rows do. Answers
    and counts are the last round's.
    """
    runs = {name: Run() for name in lines}
    warm_up = rounds > 1
    turns = [(number, name) for number in range(rounds + warm_up) for name in lines]
    console = Console(stderr=True)
    if not warm_up:
        for generator, schedule in lines.values():
            answer(generator, schedule, prompts[:2])
    for number, name in track(turns, "answering", console=console, transient=True, disable=not console.is_terminal):
        generator, schedule = lines[name]
        found = answer(generator, schedule, prompts)
        if number >= warm_up:
            found.seconds = [*runs[name].seconds, *found.seconds]
            found.decode_seconds = [*runs[name].decode_seconds, *found.decode_seconds]
        else:
            found.seconds, found.decode_seconds = [], []
        runs[name] = found
    return runs
