"""The order of timed runs, the rounds that count, and the batch that fits every line."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.answers import Prompt
from actors.engine.scheduler import plan_batches
from pipeline.learn.evaluate import run as timing
from pipeline.learn.evaluate.run import TimedRun, common_batch, time_in_turn

PROMPTS = [Prompt([1] * length, "f", row) for row, length in enumerate((3, 9, 5, 9, 1))]


@pytest.mark.parametrize(
    ("rounds", "device", "warm_ups"), [(1, "cpu", 2), (2, "cpu", 5), (1, "cuda", 5), (2, "cuda", 5)]
)
def test_lines_warm_up_and_take_turns(rounds: int, device: str, warm_ups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a warm-up of few rows, these are the longest: the batch that comes first and needs the most."""
    asked: list[tuple[str, list[int]]] = []

    def answer(generator: Any, schedule: Any, prompts: list[Prompt], stage: str = "") -> TimedRun:
        asked.append((schedule, [one.row for one in prompts]))
        number: Any = len(asked)
        return TimedRun([number], number, [number], [number / 2])

    monkeypatch.setattr(timing, "answer", answer)
    generator = SimpleNamespace(max_batch=2, device=SimpleNamespace(type=device))
    lines: Any = {"1x": (generator, "1x"), "2x": (generator, "2x")}
    runs = time_in_turn(lines, PROMPTS, rounds)
    assert [name for name, _ in asked] == ["1x", "2x"] * (rounds + 1)
    assert [len(rows) for _, rows in asked] == [warm_ups] * 2 + [5] * (2 * rounds)
    if warm_ups == 2:
        assert asked[0][1] == asked[1][1] == [1, 3]
    assert runs["1x"].seconds == [2 * (1 + one) + 1 for one in range(rounds)]
    assert runs["2x"].decode_seconds == [2 + one for one in range(rounds)]
    last: Any = 2 * (rounds + 1)
    assert (runs["2x"].answers, runs["2x"].stats) == ([last], last)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    new=st.integers(1, 40),
    budget=st.integers(1, 300),
    most=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_every_full_batch_fits_the_budget(lengths: list[int], new: int, budget: int, most: int) -> None:
    """A row of a short prompt may have the room that the longest one's lacks, and both may share a batch."""
    context = 32

    def row_bytes(prompt: int, answer: int) -> int:
        return prompt + answer - 1 if answer > 1 else 0  # as no decode step reads it

    limits = [min(new, context - length) for length in lengths]
    engine = SimpleNamespace(row_bytes=row_bytes, decoder=SimpleNamespace(context_length=context))
    generator: Any = SimpleNamespace(engine=engine, cache_bytes=budget, max_batch=most)
    prompts = [Prompt([1] * length, "f", row) for row, length in enumerate(lengths)]
    if max(map(row_bytes, lengths, limits)) > budget:
        with pytest.raises(ValueError, match=r"f: row \d+: needs \d+ bytes of cache at full depth"):
            common_batch(generator, prompts, new)
        return
    batch = common_batch(generator, prompts, new)
    assert 1 <= batch <= most
    cut = plan_batches(lengths, limits, row_bytes=row_bytes, budget_bytes=budget, max_rows=batch)
    assert len(cut) == math.ceil(len(lengths) / batch)  # by their number alone, as any schedule cuts them
    random.Random(0).shuffle(prompts)
    assert common_batch(generator, prompts, new) == batch
