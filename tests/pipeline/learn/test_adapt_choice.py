"""The choice of a speed and the break-even, as laws over whatever may be measured."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.job import JobConfig
from pipeline.learn.adapt import choice
from pipeline.learn.adapt.choice import BreakEven, choose, nearest, working_actors
from pipeline.learn.evaluate.results import Line, Score

METRIC = "agreement_exact"
seconds = st.floats(1e-6, 1e4)


@st.composite
def lines(draw: st.DrawFn) -> list[Line]:
    """The job's own checkpoint, then the tuned one at 1x and at one to six speed-ups."""
    nominals: list[float | None] = [None, 1.0, *draw(st.lists(st.floats(1.01, 9), min_size=1, max_size=6, unique=True))]
    found = []
    for nominal in nominals:
        loss = draw(st.floats(-5, 50))
        quality = Score(100 - loss, loss, loss + draw(st.sampled_from([0.0, 1.0, 7.5])))
        found.append(
            Line(str(nominal), nominal, "full", nominal, draw(st.sampled_from([0.1, 0.2, 0.3])), {METRIC: quality})
        )
    return found


@given(lines(), st.floats(0.1, 60))
def test_the_choice_is_the_fastest_of_those_within_the_tolerance(measured: list[Line], tolerance: float) -> None:
    within = {
        line.nominal: line
        for line in measured
        if (line.nominal or 1) > 1 and line.scores[METRIC].loss_high <= tolerance
    }
    chosen = choose(METRIC, tolerance, measured, {})
    if chosen is None:
        assert not within
        return
    assert within[chosen.nominal] == chosen
    for other in within.values():
        assert chosen.seconds < other.seconds or (
            chosen.seconds == other.seconds and (chosen.layer_ratio or 1) >= (other.layer_ratio or 1)
        )


@given(lines())
def test_the_nearest_tolerance_admits_a_speed_and_a_smaller_one_none(measured: list[Line]) -> None:
    least = nearest(METRIC, measured, {}).scores[METRIC].loss_high
    assert choose(METRIC, least, measured, {}) is not None
    assert choose(METRIC, least - 1e-6, measured, {}) is None


def test_a_line_that_is_no_better_than_chance_is_never_chosen() -> None:
    line = Line("2x", 2.0, "full", 2.0, 0.1, {METRIC: Score(88.0, 12.0, 14.0)})
    better = Line("3x", 3.0, "full", 3.0, 0.2, {METRIC: Score(88.1, 11.9, 15.0)})
    chance = {METRIC: Score(88.0, 12.0, 14.0)}
    assert choose(METRIC, 20, [line], chance) is None
    assert choose(METRIC, 20, [line, better], chance) is nearest(METRIC, [line, better], chance) is better


@given(seconds, seconds, seconds, st.integers(1, 10**7), st.floats(1, 64))
def test_from_the_break_even_on_time_is_saved_and_before_it_is_not(
    cost: float, full: float, fast: float, rows: int, actors: float
) -> None:
    account = BreakEven(cost, full, fast, rows, actors)
    if fast >= full:
        assert account.at_rows is None and account.saved <= 0
        return
    assert account.at_rows is not None
    slack = 1e-9 * (cost + rows * full)
    assert account.saved >= -slack if rows >= account.at_rows else account.saved <= slack
    at = account.at_rows
    if at < 1e12:
        assert BreakEven(cost, full, fast, at, actors).saved >= -1e-9 * (cost + at * full)
        assert BreakEven(cost, full, fast, at - 1, actors).saved <= 1e-9 * (cost + at * full)


@pytest.mark.parametrize(
    ("fast", "rows", "actors", "said"),
    [
        (0.1, 10_000, 1, "1,000 rows; this job has 10,000 rows: 33.3 min become 18.3 min"),
        (0.1, 999, 1, "1,000 rows; this job has 999 rows, so for this job alone adaptation does not pay"),
        (0.1, 10_000, 4, "4,000 rows; this job has 10,000 rows: 8.3 min become 5.8 min"),  # a row saves a quarter of it
        (0.2, 10**9, 1, "never: 3x saves no time"),
    ],
)
def test_the_sentences_of_the_break_even(fast: float, rows: int, actors: int, said: str) -> None:
    account = BreakEven(100, 0.2, fast, rows, actors)
    text = account.sentences("3x")
    assert text[1].startswith(f"break-even: {said}")
    assert ("saved" in text[1]) == (rows >= (account.at_rows or math.inf))
    assert text[2].startswith(f"(assumed: {actors} actor") and "its own" in text[2]


@pytest.mark.parametrize(
    ("actors", "gpus", "threads", "cores", "devices", "at_once"),
    [
        (4, 0, 2, 8, 0, 4),
        (4, 0, 2, 4, 0, 2),
        (4, 0, 8, 4, 0, 1),
        (4, 0, 2, None, None, 4),
        (4, 1, 1, 2, 4, 4),
        (4, 0.5, 1, 2, 4, 2),  # two take turns on each GPU
        (8, 2, 1, 2, 4, 2),
        (8, 0.5, 1, None, None, 4),
        (1, 0.25, 1, 2, 1, 1),
    ],
)
def test_actors_count_where_they_have_hardware_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    actors: int,
    gpus: float,
    threads: int,
    cores: int | None,
    devices: int | None,
    at_once: float,
) -> None:
    monkeypatch.setattr(choice, "on_cluster", lambda: cores is None)
    monkeypatch.setattr(choice, "process_cpus", lambda: cores or 1)
    monkeypatch.setattr(choice.torch.cuda, "device_count", lambda: devices or 0)
    values = {"input": {"path": "in"}, "output": {"path": "out"}, "model": {"path": "m"}}
    config = JobConfig.model_validate({**values, "actors": {"count": actors, "gpus": float(gpus)}})
    assert working_actors(config, threads) == at_once


@given(lines())
def test_measurements_survive_the_record(measured: list[Line]) -> None:
    for line in measured:
        assert Line.of(json.loads(json.dumps(asdict(line)))) == line


def test_measurements_of_an_earlier_version_are_read() -> None:
    """They have neither names nor intervals of values."""
    old = {"nominal": 2.0, "prompt": "first", "layer_ratio": 1.9, "seconds": 0.1}
    line = Line.of({**old, "scores": {METRIC: {"value": 98.0, "loss": 2.0, "loss_high": 3.0}}})
    assert line == Line("2x prompt=first", 2.0, "first", 1.9, 0.1, {METRIC: Score(98.0, 2.0, 3.0)})
