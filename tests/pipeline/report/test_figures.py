"""Figures of the report: errors are grouped over shards, and the clock is compared with full depth."""

from __future__ import annotations

import json

from part_builders import part_stats, to_table

from pipeline.commit.runs import JobRun
from pipeline.generate.agreement import Agreement
from pipeline.generate.stats import add_up
from pipeline.input.shards import Shard
from pipeline.report.figures import clock_speedups, error_kinds, held_seconds


def test_errors_are_grouped_over_shards() -> None:
    kinds = [[["x …", 3, "a", "x 1"], ["y", 1, "b", "y"]], None, [["y", 4, "c", "y"], ["", 2, "", ""]]]
    shards = [
        part_stats(Shard(index, "u", 0, 5), error_kinds=json.dumps(kind) if kind else "")
        for index, kind in enumerate(kinds)
    ]
    found = [tuple(one.values()) for one in error_kinds(to_table(shards))]
    assert found == [("y", 5, "b", "y", 0), ("x …", 3, "a", "x 1", 0), ("", 2)]


def test_the_clock_is_compared_with_full_depth_as_timed_on_the_sample() -> None:
    """The run held two devices for 25 s; its actor of two devices decoded for 5 s, which takes 20 s at full depth."""
    stats = part_stats(
        Shard(0, "u", 0, 10), started=105.0, finished=120.0, prefill_seconds=2.0, decode_seconds=5.0, device_seconds=8.0
    )
    shards, runs = to_table([stats]), [JobRun(100.0, 102.0, 10, 2.0, 125.0)]
    held, totals = held_seconds(runs, shards), add_up(shards)
    assert held == 50.0 and held_seconds([], shards) is None
    earlier = JobRun(0.0, 1.0, 20, 4.0, 10.0)  # each run has its own devices
    assert held_seconds([earlier, *runs], shards) == 4 * 10 + held
    timed = Agreement(16, False, 200, 190, 0.04, prefill_ratio=1.5, decode_ratio=4.0)
    assert clock_speedups(timed, totals, held) == (1 + 2 * (1.0 + 15.0) / 50.0, 4.0)
    assert clock_speedups(Agreement(16, False, 200, 190, 0.04), totals, held) == (None, None)
    assert clock_speedups(None, totals, held) == clock_speedups(timed, totals, None) == (None, None)
