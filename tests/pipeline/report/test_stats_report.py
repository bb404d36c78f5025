"""Totals are sums over shards, and a job is finished only when every planned row is committed."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import wait_until
from hypothesis import given
from hypothesis import strategies as st
from moved_clock import Clock
from part_builders import (
    COUNTED,
    LAYERS,
    MANIFEST,
    SHARDS,
    Commits,
    part_spec,
    part_stats,
    shard_batch,
    shard_generator,
    to_table,
)

from pipeline.answer.coordinator import Coordinator, RunProgress, Workload
from pipeline.answer.stats import Counts, ShardStats, add_up, with_rates
from pipeline.commit.runs import JobRun
from pipeline.input.shards import Shard
from pipeline.plan.manifest import Manifest
from pipeline.prepare.prompts import ADDED, CHOICES, CONTROL_TOKENS, ERROR, FORM, PROMPT_IDS, SAMPLING
from pipeline.report import progress
from pipeline.report.figures import error_kinds, held
from pipeline.report.progress import progress_line, rates
from pipeline.report.summary import print_report
from pipeline.runtime.wide_console import wide_console

KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(0, 10**9),
    "float": st.floats(0, 1e6),
    "str": st.text("ab", max_size=3),
    "bool": st.booleans(),
}
COUNTS = st.dictionaries(st.text("ab[]", max_size=3), st.integers(1, 10**6), max_size=4)
LABELS = COUNTS.map(lambda counts: json.dumps(counts) if counts else "")
ANY_STATS = st.builds(
    ShardStats,
    **{
        **{one.name: KINDS[str(one.type)] for one in fields(ShardStats)},
        **dict.fromkeys(("label_counts", "common_answers"), LABELS),
    },
)


@given(st.lists(ANY_STATS, max_size=6))
def test_totals_are_sums_and_maxima(shards: list[ShardStats]) -> None:
    totals = add_up(to_table(shards))
    assert totals.shards == len(shards)
    for name in (one.name for one in fields(Counts)):
        values = [0, *(getattr(shard, name) for shard in shards)]
        total = max(values) if name in ("cache_bytes", "peak_memory_bytes") else sum(values)
        assert getattr(totals, name) == (pytest.approx(total) if isinstance(total, float) else total), name
    steps, layers = sum(shard.decode_steps for shard in shards), sum(shard.layer_steps for shard in shards)
    full = sum(shard.full_layer_steps for shard in shards)
    assert totals.mean_depth == (layers / steps if steps else None)
    assert totals.layer_ratio == (full / layers if layers else None)
    by_label: Counter[str] = Counter()
    for shard in shards:
        by_label.update(json.loads(shard.label_counts or "{}"))
    assert totals.labels == by_label and list(totals.labels.values()) == sorted(by_label.values(), reverse=True)
    computed = sum(shard.padded_prompt_tokens for shard in shards)
    padding = sum(shard.padding_tokens for shard in shards)
    assert totals.padding_fraction == (padding / computed if computed else 0)
    json.dumps(totals.to_dict(), allow_nan=False)


@given(ANY_STATS)
def test_a_record_keeps_every_number(stats: ShardStats) -> None:
    assert ShardStats.from_record(json.loads(json.dumps(asdict(stats)))) == stats


@given(st.lists(ANY_STATS, max_size=5, unique_by=lambda shard: shard.shard))
def test_a_table_has_one_row_per_shard_and_units(shards: list[ShardStats]) -> None:
    table = to_table(shards)
    assert table.to_pylist() == [asdict(shard) for shard in shards]
    assert table.column_names == [one.name for one in fields(ShardStats)]
    rated = with_rates(table)
    for one in rated.schema:
        assert one.metadata[b"unit"], one.name
    for shard, row in zip(shards, rated.to_pylist(), strict=True):
        is_known = shard.generate_seconds and not shard.overlaps
        assert (row["tokens_per_second"] is not None) == (row["rows_per_second"] is not None) == bool(is_known)
        assert row["mean_depth"] == (shard.layer_steps / shard.decode_steps if shard.decode_steps else None)
        padded = shard.padded_prompt_tokens
        assert row["padding_fraction"] == (shard.padding_tokens / padded if padded else None)
    assert table.schema.field("generate_seconds").metadata[b"unit"].startswith(b"s")
    assert table.schema.field("peak_memory_bytes").metadata[b"unit"] == b"bytes"


@pytest.mark.parametrize("cache_bytes", [2**30, 4000])
def test_statistics_of_a_part_equal_those_of_the_actor(checkpoint: Path, cache_bytes: int) -> None:
    """Also for rows that the actor refuses, here because the cache is too small."""
    prompts = [[1, 9, 3], [1, *range(10, 30), 3], [], [1, 40, 41, 3], [1, *range(60, 80), 3]]
    rows = pa.table(
        {
            "id": ["a", "b", "b", "c", "d"],
            PROMPT_IDS: pa.array(prompts, pa.list_(pa.int32())),
            ERROR: pa.array([None, None, "prompt is null", None, None], pa.string()),
            SAMPLING: pa.array([None, '{"n":3,"temperature":1.0}', None, None, None], pa.string()),
            CHOICES: pa.nulls(5, pa.list_(pa.string())),
            **{name: pa.nulls(5, ADDED[name]) for name in (FORM, CONTROL_TOKENS)},
        }
    )
    commits = Commits()
    actor = shard_generator(
        {
            "checkpoint": str(checkpoint),
            "dtype": "float32",
            "device": "cpu",
            "sampling": {"max_new_tokens": 8},
            "seed": 3,
            "cache_bytes": cache_bytes,
        },
        part_spec(),
        commits,
        devices=2,
        price_per_hour=1800.0,
    )
    actor(shard_batch(7, rows, first_row=10))
    counted = ShardStats.from_record(json.loads(json.dumps(asdict(commits.stats[7]))))
    assert counted.device_seconds == 2 * counted.generate_seconds > 0
    assert counted.money == pytest.approx(counted.device_seconds / 2)
    table = pq.read_table(io.BytesIO(commits.parts[7]))
    told = ShardStats.of_part(7, table, LAYERS)
    samples = 3 if cache_bytes == 2**30 else 1
    assert table["id"].to_pylist() == ["a", *["b"] * samples, "b", "c", "d"]
    assert (counted.rows, counted.answers) == (5, table.num_rows)
    assert counted.errors == (1 if cache_bytes == 2**30 else 3)
    assert counted.prepare_seconds == 0.25 and counted.generate_seconds > 0 and not counted.rebuilt
    for name in COUNTED:
        known = getattr(counted, name)
        assert getattr(told, name) == known, name
    assert 0 < counted.layer_steps < counted.full_layer_steps and json.loads(counted.prompt_ends)[2] == ""
    assert json.loads(counted.prompt_ends)[0].startswith("<s>") and told.prompt_ends == ""


def printed(shards: pa.Table, manifest: Manifest = MANIFEST) -> str:
    console = wide_console(io.StringIO())
    print_report(console, manifest, shards, add_up(shards))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_can_be_read() -> None:
    shards = to_table(map(part_stats, SHARDS))
    text = printed(shards)
    assert "10 rows in 3 shards, 2 with an error" in text
    assert f"mean depth 3.00 of {LAYERS}, layer ratio 1.33x" in text
    assert "cut off at a length limit (sampling.max_new_tokens, context): 8 of 8" in text
    tokens = sum(part_stats(shard).generated_tokens for shard in SHARDS)
    assert "cost: 24.0 device-seconds (24.0 at work) and money 0.06; " in text
    assert f"; {24e6 / tokens:,.0f} device-seconds and money {0.06e6 / tokens:,.4g} for a million" in text
    free = printed(to_table([replace(part_stats(SHARDS[0]), money=0.0)]))
    assert "device-seconds" in free and "money" not in free
    assert "cost" not in printed(to_table([replace(part_stats(SHARDS[0]), generated_tokens=0)]))
    assert "no shard is committed yet: 0 of 10 rows" in printed(to_table([]))
    assert "4 of 10 rows in 1 shard" in printed(to_table([part_stats(SHARDS[0])]))
    none = [part_stats(SHARDS[2])]
    assert "no decode steps" in printed(to_table(none))
    failed = {"generated_tokens": 0, "cut_off": 0, "error_kinds": json.dumps([["bad", 1, "", "bad (row 0 of 'f')"]])}
    text = printed(to_table([replace(none[0], **failed)]))
    assert "no decode steps" not in text and "cut off" not in text and "error: 1 x bad (row 0 of 'f')\n" in text


def test_answers_of_one_token_have_no_columns_of_decode_steps() -> None:
    counts = json.dumps({f"label [b]{number}\n": 100 - number for number in range(12)})
    none = {"decode_steps": 0, "layer_steps": 0, "full_layer_steps": 0}
    one = part_stats(SHARDS[0], answers=1200, rows=1200, stopped=1200, cut_off=0, label_counts=counts, **none)
    text = printed(to_table([one, replace(one, shard=1, label_counts="")]))
    title = text.splitlines()[1].split()
    assert title == ["shard", "rows", "errors", "prompt", "tok", "prefill", "s", "rows/s", "padding"]
    assert "depth" not in text and "decode " not in text.replace("no decode steps", "")
    named = sum(100 - number for number in range(12))
    assert f"labels: label [b]0 100 ({100 / 2400:.1%}), " in text and f"all others {90 + 89 + 2400 - named:,} (" in text
    known = replace(MANIFEST, identity={**MANIFEST.identity, "choices": ["yes", "no", "maybe"]})
    few = replace(one, label_counts=json.dumps({"yes": 1200}))
    assert "labels: yes 1,200 (100.0%), no 0 (0.0%), maybe 0 (0.0%)\n" in printed(to_table([few]), known)
    told = printed(to_table([part_stats(SHARDS[0])]))
    assert "decode s" in told and "labels" not in told and "rows/s" not in told


def test_a_line_of_progress() -> None:
    work, run = Workload(8, 1000, 1, 50), RunProgress(2, 100, 0, 5000)
    assert progress_line(run, rates([(2.0, RunProgress()), (12.0, run)], 12.0, work), 12.0, work) == (
        "3/8 shards  150/1,000 rows  10.0 rows/s  500 tokens/s  ETA 1:25  0:12 elapsed"
    )
    work, run = Workload(9, 9_999_999, 0, 0), RunProgress(3, 1234, 12, 99_999)
    assert progress_line(run, rates([(0.0, RunProgress()), (4000.0, run)], 4000.0, work), 4000.0, work) == (
        "3/9 shards  1,234/9,999,999 rows (12 errors)  0.3 rows/s  25 tokens/s  ETA 9003:01:48  1:06:40 elapsed"
    )
    work, run = Workload(8, 1000, 2, 300), RunProgress(6, 700, 1, 0)
    last = progress_line(run, rates([(0.4, RunProgress()), (60.0, run)], 60.0, work), 60.0, work)
    run = RunProgress(6, 700, 3, 0, kinds=(("prompt is null", 2), ("no …", 1)))
    assert " rows (3 errors: 2 prompt is null, 1 no …)  " in progress_line(run, {}, 1.0, work)
    assert last == "8/8 shards  1,000/1,000 rows (1 error)  11.7 rows/s  1:00 elapsed"


@pytest.mark.parametrize(("waited", "rate"), [(0, 10.0), (4, 10.0), (5, 10.0), (15, 5.0), (95, 1.0)])
def test_the_rate_sinks_when_a_commit_is_overdue_and_the_time_left_follows_it(waited: float, rate: float) -> None:
    """Commits of 50 rows each 5 s."""
    work = Workload(20, 1000, 0, 0)
    seen = [(5.0 * shards, RunProgress(shards, 50 * shards, 0, 50 * shards)) for shards in (3, 4)]
    found = rates(seen, 20.0 + waited, work)
    assert found == {"rows_per_second": rate, "tokens_per_second": rate, "eta_seconds": 800 / rate}


def test_rates_are_those_of_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first shard that took half an hour, as kernels were compiled, then one each ten seconds."""
    coordinator, now = Coordinator(), 0.0
    shown = progress.Progress(coordinator, Workload(1000, 10_000, 0, 0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    coordinator.begin(0)
    shown.read()
    for shard in range(60):
        now = 1800 + 10.0 * shard
        coordinator.ended(shard, True, 10, 0, 100)
        coordinator.begin(shard + 1)
        line, fields = shown.read()
    assert fields["rows_per_second"] == pytest.approx(1.0, rel=0.05)
    assert fields["rows_per_second"] * fields["eta_seconds"] == pytest.approx(10_000 - 600)
    assert len(shown.seen) < 40 and "1.0 rows/s" in line


@pytest.mark.parametrize(
    ("run", "waits_for"),
    [
        (RunProgress(), "starting workers, preparing the first shard"),
        (RunProgress(loading=2), "loading the model in 2 actors"),
        (RunProgress(at_work=3), "answering 3 shards"),
    ],
)
def test_before_the_first_commit_progress_says_what_it_waits_for(run: RunProgress, waits_for: str) -> None:
    line = progress_line(run, {}, 3.0, Workload(8, 1000, 2, 300))
    assert line == f"2/8 shards  300/1,000 rows  {waits_for}  0:03 elapsed"


def test_a_coordinator_that_does_not_answer_is_named_only_after_it_has_started() -> None:
    coordinator = Mock(**{"read.side_effect": [TimeoutError(), RunProgress(at_work=1), TimeoutError()]})
    shown = progress.Progress(coordinator, Workload(8, 80, 0, 0))
    lines = [shown.read()[0] for _ in range(3)]
    assert lines[0] == "starting the run's coordinator" and "0/80 rows" in lines[1] and "unknown" in lines[2]


def test_a_line_says_that_actors_wait_for_rows_and_how_many_cpus_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now, free = 0.0, 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.ray, "available_resources", lambda: {"CPU": free} if free else {})
    monkeypatch.setattr(progress.ray, "cluster_resources", lambda: {"CPU": 4.0})
    coordinator = Coordinator()
    shown = progress.Progress(coordinator, Workload(8, 80, 0, 0))

    def after(seconds: float) -> str:
        nonlocal now
        now += seconds
        return shown.read()[0]

    assert after(0).endswith("elapsed") and after(10).endswith("elapsed")
    assert after(11).endswith("  no actor has started: 0 of the cluster's 4 CPUs are free")
    coordinator.loading("a")
    assert after(30).endswith("elapsed")
    for actor in ("a", "b"):
        coordinator.loaded(actor)
    coordinator.begin(0)
    free = 0.5
    assert after(0).endswith("elapsed")
    assert after(21).endswith("  1 of 2 actors wait for rows: 0.5 of the cluster's 4 CPUs are free")
    with monkeypatch.context() as patch:
        patch.setattr(progress.ray, "available_resources", Mock(side_effect=TimeoutError))
        assert after(1) == "progress unknown: the run's coordinator does not answer"
    coordinator.begin(1)
    assert after(30).endswith("elapsed"), "all are at work"
    for shard in range(8):
        coordinator.ended(shard, True, 10, 0, 10)
    assert after(0).endswith("elapsed") and after(30).endswith("elapsed"), "nothing is left to do"


def test_the_coordinator_counts_each_shard_once() -> None:
    coordinator = Coordinator()
    assert coordinator.read() == RunProgress()
    assert coordinator.loading("a") == 1 and coordinator.read().loading == 1
    coordinator.loaded("a")
    assert coordinator.read() == RunProgress(actors=1)
    assert coordinator.begin(0) and coordinator.begin(1) and coordinator.begin(2)
    coordinator.ended(0, True, 10, 1, 100, '[["prompt is null", 1, "row-3", "prompt is null"]]')
    coordinator.ended(1, True, 5, 0, 50)
    kinds = (("prompt is null", 1),)
    coordinator.ended(1, False, 5, 0, 50)  # a second attempt adds nothing
    assert coordinator.read() == RunProgress(2, 15, 1, 150, at_work=1, actors=1, kinds=kinds)
    assert not coordinator.begin(1)  # the actor died after its commit, and its task is tried again
    coordinator.ended(2, True, 5, 0, 50)
    assert coordinator.read() == RunProgress(3, 20, 1, 200, actors=1, kinds=kinds)
    coordinator.begin(4)
    coordinator.ended(4, True, 5, 0, 50)
    coordinator.begin(5)
    assert coordinator.stop() == {5}
    assert not coordinator.begin(3) and coordinator.stop() == {5}
    assert not coordinator.begin(5) and coordinator.working() == set()  # its actor had died


def test_a_line_says_at_once_what_the_run_waits_for_and_when_the_first_rows_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0.01)
    monkeypatch.setattr(progress, "time", Clock())
    monkeypatch.setattr(progress, "announce", lambda text, *_, **__: said.append(text))
    coordinator = Mock(wraps=Coordinator())

    def wait_for(text: str) -> None:
        wait_until(lambda: any(text in line for line in said), every=0.01)

    with progress.shown_progress(coordinator, Workload(8, 1000, 0, 0)):
        wait_for("starting workers")
        coordinator.loading("a")
        wait_for("loading the model in 1 actor")
        coordinator.loaded("a")
        coordinator.begin(0)
        wait_for("answering 1 shard")
        coordinator.ended(0, True, 125, 0, 5000, "", ["9 of 9 answers (100.0%) are empty"])
        wait_for("1/8 shards  125/1,000 rows")
        wait_for("warning: in the first shard, 9 of 9 answers (100.0%) are empty")
        coordinator.ended(1, True, 125, 0, 5000, "", ["later"])
        for example in ("…'a prompt' -> 'answer 1'", "…'a prompt' -> 'answer 2'"):
            coordinator.show(example)
            wait_for("example: …'a prompt' -> 'answer 1'")
        read = coordinator.read.call_count
        wait_until(lambda: coordinator.read.call_count > read + 3)
        assert said[-3].endswith("elapsed: the first rows") and len(said) == 6  # each once, within ten seconds


def test_a_line_shows_kinds_that_look_the_same_as_one() -> None:
    coordinator = Coordinator()
    for shard, end in enumerate(("country", "city")):
        kinds = json.dumps([[f"template: a null is printed; {'x' * 60} {end}", 1 + shard, "", ""], ["", 1, "", ""]])
        coordinator.ended(shard, True, 10, 2, 0, kinds)
    kinds = dict(coordinator.read().kinds)
    assert list(kinds.values()) == [3, 2] and all(len(kind) <= 61 for kind in kinds)


def test_errors_are_grouped_over_shards() -> None:
    kinds = [[["x …", 3, "a", "x 1"], ["y", 1, "b", "y"]], None, [["y", 4, "c", "y"], ["", 2, "", ""]]]
    shards = [
        part_stats(Shard(index, "u", 0, 5), error_kinds=json.dumps(kind) if kind else "")
        for index, kind in enumerate(kinds)
    ]
    found = [tuple(one.values()) for one in error_kinds(to_table(shards))]
    assert found == [("y", 5, "b", "y", 0), ("x …", 3, "a", "x 1", 0), ("", 2)]


def test_the_devices_of_a_run_are_held_from_its_beginning_to_its_end() -> None:
    """Two runs of 25 s and 10 s; the first was killed, and ends with its last shard."""
    shards = to_table([part_stats(Shard(0, "u", 0, 10), finished=end) for end in (110.0, 125.0, 205.0)])
    runs = [JobRun(100.0, 4.0), JobRun(200.0, 2.0, 210.0)]
    assert held(runs, shards) == (35.0, 4 * 25 + 2 * 10) and held([], shards) == (0, 0)
    assert held([JobRun(300.0, 4.0)], shards) == (0, 0)  # no shard ended in this run
