"""The first attempt wins and its files stay; after a crash at any moment the job can continue."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields, replace
from typing import Any

import pyarrow as pa
import pytest
from part_builders import (
    COUNTED,
    FINGERPRINT,
    LAYERS,
    SHARDS,
    commit_made_up_parts,
    fake_answers,
    part,
    part_spec,
    part_stats,
)

from actors.answers import OPTIONAL_TYPES
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.output import part_table
from pipeline.answer.stats import ShardStats
from pipeline.commit.records import COMMITS, read_records, record_name
from pipeline.commit.sink import clear, commit, commit_shard, committed_shards, part_name
from pipeline.input.shards import Shard
from pipeline.runtime.quarantine import QUARANTINE, marker_name
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import parquet_bytes, read_parquet


def records(folder: Folder) -> list[ShardStats]:
    table = read_records(folder, FINGERPRINT)
    return [ShardStats(**row) for row in table.drop_columns(["sha256", "bytes", "tag"]).to_pylist()]


def test_commit_writes_part_and_then_record(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record without its part would lose rows; a part without its record is only read again."""
    data, made, create = part(SHARDS[1]), list[str](), type(folder).create

    def noted(self: Any, name: str, data: bytes) -> bool:
        made.append(name)
        return create(self, name, data)

    monkeypatch.setattr(type(folder), "create", noted)
    assert commit(folder, SHARDS[1], data, part_stats(SHARDS[1]), FINGERPRINT)
    assert made == [part_name(1), record_name(1)]
    assert folder.names() == ["part-000001.parquet"] == [part_name(1)]
    assert folder.names(COMMITS) == ["000001.json"]
    assert folder.read(part_name(1)) == data
    record = json.loads(folder.read(record_name(1)))
    assert record["sha256"] == hashlib.sha256(data).hexdigest()
    assert (record["shard"], record["bytes"], record["rows"]) == (1, len(data), 5)
    (stats,) = records(folder)
    assert stats.commit_seconds > 0
    assert replace(stats, commit_seconds=0.0) == part_stats(SHARDS[1])


def test_a_later_attempt_is_discarded(folder: Folder) -> None:
    first, second = part(SHARDS[0]), part(SHARDS[0], keep=("topic",))
    assert first != second
    assert commit(folder, SHARDS[0], first, part_stats(SHARDS[0]), FINGERPRINT)
    record = folder.read(record_name(0))
    assert not commit(folder, SHARDS[0], second, part_stats(SHARDS[0], attempt=2), FINGERPRINT)
    assert folder.read(part_name(0)) == first and folder.read(record_name(0)) == record


@pytest.mark.parametrize("shard", SHARDS, ids=["errors", "more", "one-row"])
def test_a_rebuilt_record_counts_the_same(local: Folder, shard: Shard, caplog: pytest.LogCaptureFixture) -> None:
    local.create(part_name(shard.index), part(shard))
    with caplog.at_level(logging.WARNING):
        assert committed_shards(local, SHARDS, FINGERPRINT) == {shard.index}
    assert f"{part_name(shard.index)} had no commit record" in caplog.text
    (stats,) = records(local)
    known = part_stats(shard)
    assert {name: getattr(stats, name) for name in COUNTED} == {name: getattr(known, name) for name in COUNTED}
    assert stats.rebuilt
    unknown = {one.name: getattr(stats, one.name) for one in fields(stats) if one.name not in [*COUNTED, "rebuilt"]}
    assert not any(unknown.values())


def refusal(folder: Folder, index: int) -> str:
    """The refusal at the start of a run; a late attempt must raise the same."""
    said = set()
    for look in (
        lambda: committed_shards(folder, SHARDS, FINGERPRINT),
        lambda: commit(folder, SHARDS[index], part(SHARDS[index]), part_stats(SHARDS[index]), FINGERPRINT),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            look()
        said.add(str(caught.value))
    (one,) = said
    assert "\n" not in one and one.startswith(f"{folder.url}/{part_name(index)}: ")
    assert folder.names(COMMITS) == []
    return one


def test_parts_of_other_jobs_and_damaged_parts_are_named(folder: Folder) -> None:
    data = part(SHARDS[1])
    folder.replace(part_name(1), part(SHARDS[1], fingerprint="0" * 64))
    assert "written by another job" in refusal(folder, 1)
    folder.replace(part_name(1), parquet_bytes(pa.table({"a": [1]})))
    assert "written by another program" in refusal(folder, 1)
    page = data[:8] + bytes(192) + data[200:]
    for damaged in (data[:-1], data[: len(data) // 2], b"", b"PAR1", page):
        folder.replace(part_name(1), damaged)
        assert "damaged" in refusal(folder, 1)
    others: Any = ({"first_row": 3}, {"url": "in/b.parquet"}, {"rows": 3})
    for other in (SHARDS[0], *(replace(SHARDS[1], **changes) for changes in others)):
        folder.replace(part_name(1), part(other))
        assert "does not hold shard 1 (5 rows from row 4 of in/a.parquet)" in refusal(folder, 1)
    folder.replace(part_name(1), data)
    assert committed_shards(folder, SHARDS, FINGERPRINT) == {1}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"stats": {}}', b'{"stats": null}', b"\xff\xfe"])
def test_a_damaged_record_is_named(local: Folder, text: bytes) -> None:
    commit_made_up_parts(SHARDS, local)
    local.replace(record_name(1), text)
    with pytest.raises(ValueError, match="damaged; run the job again") as caught:
        records(local)
    assert str(caught.value).startswith(f"{local.url}/{record_name(1)}: ") and "\n" not in str(caught.value)


def test_clear_removes_a_job_and_nothing_else(folder: Folder) -> None:
    commit_made_up_parts(SHARDS, folder)
    for name in ("_SUCCESS", "_job/job.json", "_job/plan.pq", "_job/lease/000001.json"):
        folder.replace(name, b"x")
    for name in ("notes.txt", "other.parquet"):
        folder.replace(name, b"x")
    clear(folder)
    assert folder.names() == ["notes.txt", "other.parquet"]
    assert folder.names("_job") == folder.names(COMMITS) == [] and folder.names("_job/lease") == ["000001.json"]
    assert committed_shards(folder, SHARDS, FINGERPRINT) == set()


def test_a_commit_is_reported_and_removes_the_shards_markers(local: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, calls = Coordinator(), []
    monkeypatch.setattr(coordinator, "ended", lambda *call: calls.append(call))
    local.create(marker_name(1, "generate"), b"{}")
    for shard in (*SHARDS[:2], *SHARDS[1:]):
        commit_shard(shard, part(shard), part_stats(shard), local, FINGERPRINT, coordinator)
    assert committed_shards(local, SHARDS, FINGERPRINT) == {0, 1, 2}
    assert local.names(QUARANTINE) == []
    assert [(shard, first) for shard, first, *_ in calls] == [(0, True), (1, True), (1, False), (2, True)]
    for shard, _, *counts in calls:
        stats = part_stats(SHARDS[shard])
        assert counts == [stats.rows, stats.errors, stats.generated_tokens, stats.error_kinds, stats.warnings]


def test_a_part_holds_id_columns_kept_and_answers() -> None:
    table = read_parquet(part(SHARDS[0], keep=("topic", "id"), optional=("token_ids", "cumulative_logprob")))
    answers = "sample_index generated_text finish_reason prompt_tokens generated_tokens mean_depth error"
    assert table.column_names == f"id topic {answers} token_ids cumulative_logprob".split()
    assert table["id"].to_pylist() == ["row-0", "row-0", "row-1", "row-2"]
    assert table["generated_text"].to_pylist() == ["answer 0", "answer 1", None, "answer 3"]
    assert table["error"].to_pylist() == [None, None, "prompt is null", None]
    assert table["token_ids"].to_pylist() == [[7], [7, 7], [], [7] * 4]
    assert table["mean_depth"].to_pylist() == [None, 3.0, None, 3.0]


def test_a_part_depends_only_on_its_rows() -> None:
    assert part(SHARDS[0]) == part(SHARDS[0])
    metadata = read_parquet(part(SHARDS[1])).schema.metadata
    assert {key: value for key, value in metadata.items() if key.startswith(b"skipdecode")} == {
        b"skipdecode.fingerprint": FINGERPRINT.encode(),
        b"skipdecode.shard": b"1",
        b"skipdecode.file": b"in/a.parquet",
        b"skipdecode.first_row": b"4",
        b"skipdecode.num_layers": b"4",
    }


def test_all_errors_have_the_same_schema() -> None:
    """A shard in which every row is bad is written with the types of the others."""
    rows = pa.table({"id": ["a", "b", "c"]})
    optional = tuple(OPTIONAL_TYPES)
    last = [replace(fake_answers(3)[-1], row=0)]
    one = part_table(rows.slice(2), last, part_spec(optional=optional), Shard(0, "u", 2, 1))
    all_ = part_table(rows, fake_answers(3), part_spec(optional=optional), Shard(0, "u", 0, 3))
    assert one.schema == all_.schema and one["error"].to_pylist() == ["prompt is null"]


def test_samples_of_a_row_carry_its_columns_and_count_as_one_row() -> None:
    rows = pa.table({"id": ["a", "b"], "topic": [1, 2]})
    first, second = fake_answers(2)
    samples = [first, replace(first, sample_index=1), replace(first, sample_index=2), second]
    table = part_table(rows, samples, part_spec(keep=("topic",)), Shard(0, "u", 0, 3))
    assert table["id"].to_pylist() == ["a", "a", "a", "b"] and table["topic"].to_pylist() == [1, 1, 1, 2]
    assert table["sample_index"].to_pylist() == [0, 1, 2, 0]
    stats = ShardStats.of_part(0, table, LAYERS)
    assert (stats.rows, stats.answers, stats.prompt_tokens) == (2, 4, 10)
