"""Records are committed, compacted, lost and rebuilt in any order, and each shard counts exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from cli_command import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import files_of, report
from memory_folder import MemoryFolder, Stepped
from part_builders import FINGERPRINT, finish, manifest_of, part, part_stats

from actors.engine.errors import UserError
from pipeline.commit import records, sink
from pipeline.commit.finalize import RowsMissing, finalize
from pipeline.commit.records import (
    COMMITS,
    RECORDS_SCHEMA,
    SEGMENTS,
    compact,
    compacting,
    read_records,
    write_segment,
)
from pipeline.commit.sink import commit, committed_shards, part_name
from pipeline.commit.verify import verify
from pipeline.config.job import StorageConfig
from pipeline.input.shards import Shard
from pipeline.plan import plan_files
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder

FIRST_ROWS = [0, 2, 5, 9, 11, 14]
SHARDS = [Shard(index, "in/a.parquet", FIRST_ROWS[index], 2 + index % 3) for index in range(6)]
MANIFEST = manifest_of(SHARDS)
PARTS = [part(shard) for shard in SHARDS]
ROWS, TOKENS = MANIFEST.rows, sum(part_stats(shard).generated_tokens for shard in SHARDS)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in an order that the test decides."""

    def inline(function: Callable[[Any], Any], items: Iterable[Any], threads: int = 1) -> Iterator[Any]:
        return map(function, items)

    for module in (records, sink):
        monkeypatch.setattr(module, "in_parallel", inline)


def commit_all(folder: Folder | MemoryFolder, shards: Iterable[Shard] = SHARDS) -> None:
    for shard in shards:
        commit(folder, shard, PARTS[shard.index], part_stats(shard), FINGERPRINT)


def run_job(folder: Folder, check: sink.Check = "quick") -> None:
    """The steps of a job: find committed shards, commit the others, compact, finalize."""
    done = committed_shards(folder, SHARDS, FINGERPRINT, check)
    commit_all(folder, [shard for shard in SHARDS if shard.index not in done])
    compact(folder, FINGERPRINT, 3)
    finalize(folder, MANIFEST)


def assert_complete(folder: Folder, uncertain: Iterable[str] = ()) -> None:
    """uncertain: parts that may have a rebuilt record with a flaw that a full read does not show."""
    table = read_records(folder, FINGERPRINT)
    assert table["shard"].to_pylist() == [shard.index for shard in SHARDS]
    assert table["rows"].to_pylist() == [shard.rows for shard in SHARDS]
    totals = finish(folder, MANIFEST)
    assert (totals.shards, totals.rows) == (len(SHARDS), ROWS)
    assert totals.generated_tokens == TOKENS or uncertain
    for shard in SHARDS:
        if part_name(shard.index) not in uncertain:
            assert folder.read(part_name(shard.index)) == PARTS[shard.index]
    assert list(verify(folder, MANIFEST, StorageConfig())) == []


def test_compaction_keeps_the_records(folder: Folder) -> None:
    commit_all(folder)
    before = read_records(folder, FINGERPRINT)
    compact(folder, FINGERPRINT, 7)
    assert len(folder.names(COMMITS)) == 6 and folder.names(SEGMENTS) == []
    compact(folder, FINGERPRINT, 6)
    (segment,) = folder.names(SEGMENTS)
    assert folder.names(COMMITS) == [] and segment.endswith(".pq")
    assert read_records(folder, FINGERPRINT).equals(before)
    assert committed_shards(folder, SHARDS, FINGERPRINT) == set(range(6))
    assert_complete(folder)


def test_records_are_compacted_while_the_job_runs(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "COMPACT_SECONDS", 0.05)
    monkeypatch.setattr(compact, "__defaults__", (2,))
    commit_all(folder, SHARDS[:2])
    with compacting(folder, FINGERPRINT):
        wait_until(lambda: folder.names(SEGMENTS))
        commit_all(folder, SHARDS[2:5])
    commit_all(folder, SHARDS[5:])
    assert "000005.json" in folder.names(COMMITS)
    assert_complete(folder)


def test_every_record_can_be_read_during_compaction(one_at_a_time: None) -> None:
    root = MemoryFolder()
    commit_all(root)
    before = read_records(root, FINGERPRINT)
    rolling = Stepped(lambda gate: compact(MemoryFolder(root.files, gate=gate), FINGERPRINT, 1))
    while not rolling.ended:
        rolling.step(1)
        assert read_records(root, FINGERPRINT).equals(before)
    assert rolling.error is None and root.names(COMMITS) == []


def test_a_segment_of_another_job_is_removed(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    """A run that slept while another job took over its output, and then compacted its records."""
    commit_all(folder)
    write_segment(folder, RECORDS_SCHEMA.empty_table(), "0" * 64)
    assert committed_shards(folder, SHARDS, FINGERPRINT) == set(range(len(SHARDS)))
    assert folder.names(SEGMENTS) == [] and "removed, because it is damaged or another job's" in caplog.text
    run_job(folder)
    assert_complete(folder)


def test_a_segment_that_lacks_another_column_is_damaged(folder: Folder) -> None:
    commit_all(folder)
    write_segment(folder, read_records(folder, FINGERPRINT).drop_columns("rows"), FINGERPRINT)
    with pytest.raises(UserError, match="damaged; run the job again"):
        read_records(folder, FINGERPRINT)


@given(data=st.data())
@settings(max_examples=35)
def test_each_shard_counts_once_after_any_deaths(one_at_a_time: None, data: st.DataObject) -> None:
    """Overlapping runs that compact and are killed between any two operations, followed by an undisturbed run."""
    root = MemoryFolder()

    def start() -> Stepped:
        what = data.draw(st.sampled_from(["run", "roll", "late"]))

        def work(gate: Callable[[], None]) -> None:
            gated = MemoryFolder(root.files, gate=gate)
            if what == "run":
                run_job(gated)
            elif what == "roll":
                compact(gated, FINGERPRINT, 1)
            else:  # workers of a driver that is no more
                commit_all(gated, data_order)

        return Stepped(work)

    data_order = data.draw(st.permutations(SHARDS))
    alive = [start() for _ in range(2)]
    for _ in range(data.draw(st.integers(0, 5))):
        number = data.draw(st.integers(0, 1))
        alive[number].step(data.draw(st.integers(0, 40)))
        if data.draw(st.booleans()):
            if not alive[number].ended:
                alive[number].kill()
            alive[number] = start()
    for one in alive:
        if not one.ended:
            one.kill()
    run_job(root)
    assert_complete(root)


@cache
def outputs(rolled: int, done: int) -> dict[str, bytes]:
    """Files of an output with `done` committed shards, the first of which are compacted; cached."""
    folder = MemoryFolder()
    commit_all(folder, SHARDS[:rolled])
    compact(folder, FINGERPRINT, 1)
    commit_all(folder, SHARDS[rolled:done])
    return folder.files


DAMAGES = ["truncate", "flip", "remove", "garbage", "swap", "copy", "foreign"]


def damage(folder: MemoryFolder, data: st.DataObject) -> str:
    """Change one file at random and return its name."""
    names = [f"{COMMITS}/{name}" for name in folder.names(COMMITS)] + folder.names()
    names += [f"{SEGMENTS}/{name}" for name in folder.names(SEGMENTS)]
    name = data.draw(st.sampled_from(sorted(names)))
    held, how = folder.read(name), data.draw(st.sampled_from(DAMAGES))
    if how == "truncate":
        folder.replace(name, held[: data.draw(st.integers(0, max(len(held) - 1, 0)))])
    elif how == "flip" and held:
        place = data.draw(st.integers(0, len(held) - 1))
        folder.replace(name, held[:place] + bytes([held[place] ^ data.draw(st.integers(1, 255))]) + held[place + 1 :])
    elif how == "remove":
        folder.remove(name)
    elif how == "garbage":
        folder.replace(name, data.draw(st.binary(max_size=60) | st.sampled_from([b"[]", b"null", b"[" * 9999, b"1"])))
    elif how in ("swap", "copy"):
        other = data.draw(st.sampled_from(sorted(names)))
        folder.replace(name, folder.read(other))
        if how == "swap":
            folder.replace(other, held)
    elif name.startswith(COMMITS) and held.startswith(b"{"):  # well made, but another job's or another shard's
        try:
            values = json.loads(held)
            wrong = {**values, **data.draw(st.sampled_from([{"fingerprint": "0" * 64}, {"shard": 99}, {"bytes": "x"}]))}
            folder.replace(name, json.dumps(wrong).encode())
        except ValueError:
            pass
    elif name.startswith("part-"):
        folder.replace(name, part(SHARDS[int(name[5:11])], fingerprint="0" * 64))
    return name


def run_as_told(folder: MemoryFolder) -> None:
    """Finish the job as a user does who follows its messages."""
    for _ in range(20):
        try:
            return run_job(folder)
        except (ValueError, RowsMissing) as error:
            said = str(error)
            assert "\n" not in said and said.isprintable()
            named = [name for path in folder.files if (name := path.removeprefix("root/")) in said]
            again = "run the same command again to write it" in said
            assert named or again, said
            if "--repair" in said:
                with suppress(ValueError, RowsMissing):
                    run_job(folder, "repair")
            elif not again:
                folder.remove(max(named, key=len))
    pytest.fail(said)


@given(data=st.data())
@settings(max_examples=30)
def test_damage_is_repaired_or_named(one_at_a_time: None, data: st.DataObject) -> None:
    folder = MemoryFolder(dict(outputs(data.draw(st.sampled_from([0, 4])), data.draw(st.sampled_from([4, 6])))))
    before, damaged = dict(folder.files), [damage(folder, data) for _ in range(data.draw(st.integers(1, 3)))]
    # a part is only as sure as its pages' checksums where its record is damaged too: two faults at once
    alone = len(damaged) == 1
    changed = {name.removeprefix("root/") for name, held in before.items() if folder.files.get(name) != held}
    run_as_told(folder)
    for line in list(verify(folder, MANIFEST, StorageConfig())):  # of the same size, so that only its digest tells
        name = next(name for name in folder.names() if name in line)
        folder.remove(name)
    run_as_told(folder)
    assert_complete(folder, set() if alone else changed)


def test_a_job_is_verified(local: Folder) -> None:
    plan_files.save(local, MANIFEST)
    commit_all(local)
    compact(local, FINGERPRINT, 1)
    finish(local, MANIFEST)
    result = report(local.url, "--verify")
    assert (result.exit_code, result.stdout) == (0, f"{local.url}: every part is as it was committed\n")
    local.replace(part_name(0), part(SHARDS[0], keep=("topic",)))  # whole and well made, of other bytes
    local.replace(part_name(1), PARTS[1][:-9])
    local.remove(part_name(2))
    local.replace(part_name(3), part(SHARDS[3], fingerprint="0" * 64))
    local.replace(part_name(9), PARTS[5])
    before = files_of(local.url)
    result = report(local.url, "--verify")
    assert result.exit_code == 1
    lines = [line.removeprefix(f"{local.url}/part-00000") for line in result.stdout.splitlines()]
    assert [line[0] for line in lines] == ["0", "1", "2", "3", "9"]
    differences = ("differs from the file that was committed (sha256)", "damaged", "gone", "another job", "no shard")
    for line, said in zip(lines, differences, strict=True):
        assert said in line
    assert "not as committed: 5 files" in result.stderr
    assert files_of(local.url) == before


def test_parallel_keeps_the_order_and_raises_the_first_error() -> None:
    def slow(number: int) -> int:
        time.sleep(0.001 * (number % 7))
        if number in (2000, 2003):
            raise ValueError(number)
        return number

    assert list(in_parallel(slow, range(1500))) == list(range(1500))
    assert list(in_parallel(slow, [])) == []
    with pytest.raises(ValueError, match=r"^2000$"):
        list(in_parallel(slow, range(10_000)))
