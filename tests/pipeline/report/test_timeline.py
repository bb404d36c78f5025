"""An actor's seconds by part are its run's wall clock, and rates over time hold every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from part_builders import part_stats

from pipeline.commit.runs import JobRun
from pipeline.generate.stats import ShardStats, to_table
from pipeline.input.shards import Shard
from pipeline.report.timeline import PARTS, rate, run_spans, timeline

BEGAN = 1_000_000_000.0


def shard_of(index: int, actor: str, loaded: float, started: float, seconds: float, **changes: object) -> ShardStats:
    """A shard of 10 rows; times are s since BEGAN."""
    values = {
        "actor": actor,
        "loaded": BEGAN + loaded,
        "started": BEGAN + started,
        "finished": BEGAN + started + seconds,
        "generate_seconds": seconds,
        "prefill_seconds": seconds / 4,
        "decode_seconds": seconds / 2,
        "generated_tokens": 100,
        **changes,
    }
    return part_stats(Shard(index, "u", 0, 10), **values)


def test_pauses_restarts_and_stragglers_are_told() -> None:
    shards = [
        shard_of(0, "a", 4.0, 5.0, 10.0),
        shard_of(1, "a", 4.0, 20.0, 10.0),  # after a pause of 5 s
        shard_of(2, "b", 6.0, 6.0, 20.0, rows=20),
        shard_of(3, "b", 28.0, 30.0, 4.0, attempt=2),  # its process died at 26 s
        part_stats(Shard(4, "u", 0, 10), started=0.0, finished=0.0, rebuilt=True),
    ]
    found = timeline([JobRun(BEGAN, BEGAN + 1, 60, 2, BEGAN + 40)], to_table(shards))
    assert found is not None and found.untimed == 1
    a, b = found.lanes
    assert (a.run, a.number, a.shards, a.rows, a.restarts) == (1, 1, 2, 20, 0)
    assert (b.number, b.rows, b.restarts) == (2, 30, 1)
    assert a.seconds == pytest.approx({"start-up": 4, "prefill": 5, "decode": 10, "other": 5, "idle": 1 + 5 + 10})
    assert b.seconds == pytest.approx({"start-up": 6 + 2, "prefill": 6, "decode": 12, "other": 6, "idle": 2 + 6})
    middle = (found.edges[:-1] + found.edges[1:]) / 2
    pause = (middle > 11) & (middle < 14)  # 5 s after the run's first shard began
    assert found.rows[0][pause].max() == pytest.approx(0, abs=1e-6) and found.rows[1][pause].min() == pytest.approx(1.0)


def test_runs_lie_end_to_end() -> None:
    later = 86_400.0
    shards = [shard_of(0, "a", 1.0, 2.0, 10.0), shard_of(1, "b", later + 1, later + 2, 20.0)]
    runs = [JobRun(BEGAN, BEGAN, 20, 1), JobRun(BEGAN + later, BEGAN + later, 10, 1, BEGAN + later + 25)]
    assert run_spans(runs, to_table(shards)) == [(BEGAN, BEGAN + 12), (BEGAN + later, BEGAN + later + 25)]
    found = timeline(runs, to_table(shards))
    assert found is not None
    assert found.starts == pytest.approx([0, 10]) and found.edges[-1] == pytest.approx(30)
    assert [(lane.run, lane.number) for lane in found.lanes] == [(1, 1), (2, 1)]
    assert len(found.rows) == 1  # one lane for the first actor of each run


def test_without_a_record_of_runs_the_shards_are_one_run() -> None:
    shards = to_table([shard_of(0, "a", 1.0, 2.0, 10.0), shard_of(1, "a", 1.0, 12.0, 8.0)])
    assert run_spans([], shards) == [(BEGAN + 2, BEGAN + 20)]
    assert timeline([], to_table([])) is None


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 9)), min_size=1, max_size=6),  # gap before, seconds
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 20),
    st.floats(0, 3),
)
@settings(deadline=None, max_examples=20)
def test_seconds_add_up_and_no_row_is_lost(actors: list[list[tuple[float, float]]], loaded: float, tail: float) -> None:
    shards = []
    for number, spans in enumerate(actors):
        now = loaded
        for gap, seconds in spans:
            shards.append(shard_of(len(shards), f"actor {number}", loaded, now + gap, seconds))
            now += gap + seconds
    end = max(shard.finished for shard in shards) + tail
    found = timeline([JobRun(BEGAN, BEGAN, 1, len(actors), end)], to_table(shards))
    assert found is not None and len(found.lanes) == len(actors)
    for lane, spans in zip(found.lanes, actors, strict=True):
        assert sum(lane.seconds[part] for part in PARTS) == pytest.approx(end - BEGAN, rel=1e-4)
        assert lane.rows == 10 * len(spans)
    flown = (found.rows * np.diff(found.edges)).sum()
    assert flown == pytest.approx(10 * len(shards), rel=1e-3)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 20), st.floats(0, 100)), min_size=1, max_size=8))
@settings(deadline=None, max_examples=20)
def test_rates_equal_those_of_each_flow_by_itself(flows: list[tuple[float, float, float]]) -> None:
    edges = np.linspace(0, 70, 15)
    starts, lengths, amounts = (np.array(column) for column in zip(*flows, strict=True))
    expected = np.zeros(14)
    for start, length, amount in flows:
        for place in range(14):
            overlap = min(edges[place + 1], start + length) - max(edges[place], start)
            expected[place] += amount * max(overlap, 0) / length / 5
    np.testing.assert_allclose(rate(starts, starts + lengths, amounts, edges), expected, atol=1e-6)
