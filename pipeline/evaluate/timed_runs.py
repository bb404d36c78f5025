"""Answers and wall clocks of several schedules over the same rows in the same batches, timed in turn."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import track

from actors.answers import Answer, Prompt
from actors.engine.errors import UserError
from actors.engine.schedule import Schedule
from actors.engine.types import EngineStats
from actors.generator import Generator


@dataclass
class Run:
    """What a line answered, and how long it took. seconds, decode_seconds: one entry for each timed round."""

    answers: list[Answer]
    stats: EngineStats
    seconds: list[float]
    decode_seconds: list[float]

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
    other.engine = generator.engine.at(schedule)
    return other


def common_batch(generator: Generator, prompts: Sequence[Prompt], new_tokens: int) -> int:
    """Rows a batch at most, so that full depth, which needs the most cache, cuts the rows as every schedule does.

    generator: at full depth. new_tokens: of an answer at most, where the context has room. ValueError names a row
    whose cache alone is over the budget.
    """
    engine = generator.engine
    longest = max(prompts, key=lambda one: len(one.ids))
    length, shortest = len(longest.ids), min(len(one.ids) for one in prompts)
    context = engine.decoder.context_length

    def needed(prompt_tokens: int) -> int:
        """Bytes of a row beside the longest prompt, its answer filling the room that its own prompt leaves."""
        return engine.row_bytes(length, max(1, min(new_tokens, context - prompt_tokens)))

    if needed(length) > generator.cache_bytes:
        raise UserError(
            f"{longest.source}: row {longest.row}: needs {needed(length)} bytes of cache at full depth, "
            f"the budget is {generator.cache_bytes}; raise cache_bytes"
        )
    fitting = generator.cache_bytes // max(1, needed(shortest))  # an answer of one token keeps no cache
    return max(1, min(generator.max_batch, fitting))


def answer(generator: Generator, schedule: Schedule, prompts: Sequence[Prompt]) -> Run:
    """Answer all rows once. ValueError names a row that cannot be answered, or says that memory ran out."""
    fresh = at_schedule(generator, schedule)  # on a CPU no buffers of a run before, of its own or another line's
    began = time.perf_counter()
    answers = fresh.answer(prompts)
    seconds = time.perf_counter() - began
    bad = next((one for one in answers if one.error is not None), None)
    if bad is not None:
        raise UserError(f"{prompts[bad.row].source}: row {prompts[bad.row].row}: {bad.error}")
    stats = fresh.take_stats()
    if stats.out_of_memory:  # its time would be that of other batches
        raise UserError(f"memory ran out in {stats.out_of_memory} batches, nothing can be timed: lower max_batch")
    return Run(answers, stats, [seconds], [stats.decode_seconds])


def time_in_turn(
    lines: Mapping[str, tuple[Generator, Schedule]],
    prompts: Sequence[Prompt],
    rounds: int,
    full_depth: str,
    compiled: bool = False,
) -> dict[str, Run]:
    """Answer all rows under every line, `rounds` times: one line after the other, so that a drift hits all.

    Before them every line warms up: on its largest batch, or in a whole round where there are several, on a GPU
    and with `compiled` layers, for each new shape costs time there. Answers and counts are the last round's; of
    token ids only those of the line `full_depth` are kept.
    """
    warm_up = int(rounds > 1 or compiled or any(one.device.type == "cuda" for one, _ in lines.values()))
    warm_up *= max(one.engine.rounds_to_warm for one, _ in lines.values())
    if not warm_up:
        longest = sorted(prompts, key=lambda one: -len(one.ids))
        for generator, schedule in lines.values():
            answer(generator, schedule, longest[: generator.max_batch])
    whole: dict[str, list[float]] = {name: [] for name in lines}
    decode: dict[str, list[float]] = {name: [] for name in lines}
    runs: dict[str, Run] = {}
    turns = [(number, name) for number in range(rounds + warm_up) for name in lines]
    console = Console(stderr=True)
    for number, name in track(turns, "answering", console=console, transient=True, disable=not console.is_terminal):
        found = answer(*lines[name], prompts)
        if number < warm_up:
            continue
        whole[name] += found.seconds
        decode[name] += found.decode_seconds
        if name != full_depth:
            found.answers = [replace(one, token_ids=None) for one in found.answers]
        runs[name] = Run(found.answers, found.stats, whole[name], decode[name])
    return runs
