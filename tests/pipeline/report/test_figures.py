"""Figures of the report: joined histograms keep every value, errors are grouped over shards, plan meets outcome."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from part_builders import part_stats, predicted

from pipeline.commit.runs import JobRun
from pipeline.generate.agreement import Agreement
from pipeline.generate.distributions import depth_histogram, histogram
from pipeline.generate.stats import add_up, to_table
from pipeline.input.shards import Shard
from pipeline.report.figures import clock_speedups, compare, depths, error_kinds, held_seconds, lengths


def column(shards: list[list[int]]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(shards, pa.list_(pa.int32()))])


@given(st.lists(st.lists(st.one_of(st.integers(0, 60), st.integers(0, 100_000)), max_size=30), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_bins_count_the_values_between_their_ends(shards: list[list[int]]) -> None:
    values = [value for shard in shards for value in shard]
    found = lengths(column([histogram(shard) for shard in shards]))
    if not values:
        assert found is None
        return
    assert found is not None and len(found.counts) <= 20 and found.values == len(values)
    ends = [*found.firsts[1:], found.end + 1]
    for first, end, count in zip(found.firsts, ends, found.counts, strict=True):
        assert count == sum(first <= value < end for value in values)
    middle = sorted(values)[(len(values) - 1) // 2]
    place = found.firsts.index(found.quantile(0.5))
    assert found.firsts[place] <= middle < ends[place]


@given(st.lists(st.lists(st.floats(0, 90), max_size=10), min_size=1, max_size=3))
@settings(deadline=None, max_examples=20)
def test_depths_keep_every_answer(shards: list[list[float]]) -> None:
    values = [value for shard in shards for value in shard]
    found = depths(column([depth_histogram(shard) for shard in shards]))
    assert (found is None) == (not values)
    if found is not None:
        ends = [*found.firsts[1:], found.end + 1]
        assert found.counts == [
            sum(first <= value < end for value in values) for first, end in zip(found.firsts, ends, strict=True)
        ]


def test_ranges_are_for_people() -> None:
    found = lengths(column([histogram([3, 4, 4])]))
    assert found is not None and found.ranges == ["3", "4"]
    wide = lengths(column([histogram([*range(32, 64)] * 10 + [5000])]))
    assert wide is not None and wide.ranges[0] == "32 to 35" and wide.ranges[-1] == "64 to 5,119"


def test_errors_are_grouped_over_shards() -> None:
    kinds = [[["x …", 3, "a", "x 1"], ["y", 1, "b", "y"]], None, [["y", 4, "c", "y"], ["", 2, "", ""]]]
    shards = [
        part_stats(Shard(index, "u", 0, 5), error_kinds=json.dumps(kind) if kind else "")
        for index, kind in enumerate(kinds)
    ]
    found = [(one.kind, one.answers, one.row_id, one.shard) for one in error_kinds(to_table(shards))]
    assert found == [("y", 5, "b", 0), ("x …", 3, "a", 0), ("", 2, "", 0)]


def test_plan_meets_outcome() -> None:
    shards = to_table([part_stats(Shard(0, "u", 0, 10), started=105.0, finished=120.0, decode_seconds=5.0)])
    runs = [JobRun(100.0, 102.0, 10, 2.0, 125.0)]
    found = compare(predicted(10, 90.0), runs, shards)
    assert found.note == ""
    by_name = {line.name: line for line in found.lines}
    wall = by_name["wall clock, start-up included, s"]
    assert (wall.predicted, wall.range, wall.actual, wall.difference) == ("20.0", "18.0 to 23.0", "25.0", "+25.0%")
    assert by_name["money"].actual == "0.03" and by_name["decode, s"].difference == "-37.5%"


def test_the_clock_is_compared_with_full_depth_as_timed_on_the_sample() -> None:
    """The run held two devices for 25 s; its actor of two devices decoded for 5 s, which takes 20 s at full depth."""
    stats = part_stats(
        Shard(0, "u", 0, 10), started=105.0, finished=120.0, prefill_seconds=2.0, decode_seconds=5.0, device_seconds=8.0
    )
    shards, runs = to_table([stats]), [JobRun(100.0, 102.0, 10, 2.0, 125.0)]
    held, totals = held_seconds(runs, shards), add_up(shards)
    assert held == 50.0 and held_seconds([], shards) is None
    timed = Agreement(16, False, 200, 190, 0.04, prefill_ratio=1.5, decode_ratio=4.0)
    assert clock_speedups(timed, totals, held) == (1 + 2 * (1.0 + 15.0) / 50.0, 4.0)
    assert clock_speedups(Agreement(16, False, 200, 190, 0.04), totals, held) == (None, None)
    assert clock_speedups(None, totals, held) == clock_speedups(timed, totals, None) == (None, None)


def test_a_prediction_for_other_rows_says_so() -> None:
    shards = to_table([part_stats(Shard(0, "u", 0, 10), started=105.0, finished=120.0)])
    found = compare(predicted(99, 90.0), [JobRun(100.0, 102.0, 10, 2.0, 125.0)], shards)
    assert found.note.startswith("The prediction is for 99 rows; 10 were answered")
    made_later = compare(predicted(10, 130.0), [JobRun(100.0, 102.0, 10, 2.0, 125.0)], shards)
    assert "0 were answered after it" in made_later.note


def test_a_damaged_prediction_is_no_prediction() -> None:
    with pytest.raises(KeyError):
        compare({"made": 1.0}, [], to_table([part_stats(Shard(0, "u", 0, 10))]))
