"""A job ends with the totals that were checked; a damaged part is named until --repair answers it again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import files_of, invoke, job_values
from input_files import write_rows
from part_builders import FINGERPRINT, LAYERS, MANIFEST, SHARDS, commit_made_up_parts, finish, part, part_stats

from actors.engine.errors import UserError
from pipeline.commit.finalize import (
    STATS,
    SUMMARY,
    RowsMissing,
    finalize,
    finished_totals,
    write_statistics,
    write_success,
)
from pipeline.commit.records import (
    commit_record,
    decode_record,
    encode_record,
    loose_shards,
    read_records,
    record_name,
)
from pipeline.commit.sink import DAMAGED, SUCCESS, commit, committed_shards, part_name
from pipeline.commit.verify import plan_problems, verify
from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.shards import Shard
from pipeline.plan import plan_files
from pipeline.report.figures import first_answers
from pipeline.storage.folder import Folder, open_folder
from pipeline.storage.parquet import read_parquet


@pytest.fixture
def folder(local: Folder) -> Folder:
    """An output with three committed shards."""
    plan_files.save(local, MANIFEST)
    commit_made_up_parts(SHARDS, local)
    return local


def test_a_refused_part_is_refused_until_it_is_repaired(folder: Folder) -> None:
    """A retry by a scheduler must not accept a part that was rewritten with other text."""
    changed = part(SHARDS[1], keep=("topic",))
    assert len(changed) != len(part(SHARDS[1]))
    folder.replace(part_name(1), changed)
    for _ in range(3):
        with pytest.raises(UserError, match=r"/part-000001.parquet: damaged \(.* committed\); run again with --repair"):
            committed_shards(folder, SHARDS, FINGERPRINT)
        with pytest.raises(RowsMissing, match=r"^part-000001.parquet differs from what was committed: run again with"):
            finalize(folder, MANIFEST)
        assert len(list(verify(folder, MANIFEST, StorageConfig()))) == 1
    assert committed_shards(folder, SHARDS, FINGERPRINT, "repair") == {0, 2}
    (kept,) = folder.names(DAMAGED)
    assert folder.read(f"{DAMAGED}/{kept}") == changed and not folder.exists(part_name(1))
    commit(folder, SHARDS[1], part(SHARDS[1]), part_stats(SHARDS[1]), FINGERPRINT)
    assert finish(folder, MANIFEST).rows == 10 and list(verify(folder, MANIFEST, StorageConfig())) == []


def test_a_finished_job_has_success_summary_and_statistics(folder: Folder) -> None:
    totals = finish(folder, MANIFEST)
    assert totals.rows == 10 == MANIFEST.rows and totals.shards == 3
    summary = json.loads(folder.read(SUMMARY))
    assert folder.read(SUCCESS) == folder.read(SUMMARY)
    assert summary == {
        "output": folder.url,
        "fingerprint": FINGERPRINT,
        "planned_shards": 3,
        "planned_rows": 10,
        "nominal_speedup": 2.0,
        "num_layers": LAYERS,
        **totals.to_dict(),
    }
    table = read_parquet(folder.read(STATS))
    assert table["shard"].to_pylist() == [0, 1, 2] and table.schema.field("rows").metadata[b"unit"] == b"input rows"
    answers = [row["generated_text"] for _, row in first_answers(folder, table, 5)]
    assert answers == ["answer 0", "answer 1", None, "answer 3", "answer 0"]  # the second part follows


def test_missing_rows_prevent_success(folder: Folder) -> None:
    data = folder.read(part_name(1))
    folder.replace(SUCCESS, b"{}")
    folder.remove(part_name(1))
    again = r"^part-000001.parquet was committed and is gone: run the same command again to write it$"
    with pytest.raises(RowsMissing, match=again):
        finish(folder, MANIFEST)
    assert committed_shards(folder, SHARDS, FINGERPRINT) == {0, 2}
    with pytest.raises(RowsMissing, match=r"^part-000001.parquet is missing: run the same command again"):
        finish(folder, MANIFEST)
    folder.create("part-000003.parquet", data)
    with pytest.raises(RowsMissing, match=r"^part-000003.parquet belongs to no shard of this job: delete it$"):
        finish(folder, MANIFEST)
    folder.remove("part-000003.parquet")
    assert SUCCESS not in folder.names() and "summary.json" not in folder.names("_job")
    folder.create(part_name(1), data)
    assert finish(folder, MANIFEST).rows == 10


def test_a_record_of_no_shard_prevents_success(folder: Folder) -> None:
    record = commit_record(b"", part_stats(Shard(9, "in/b.parquet", 1, 1)))
    folder.replace(record_name(9), encode_record(record, FINGERPRINT))
    problem = "_job/commits/000009.json: belongs to no shard of this job; delete it"
    assert list(verify(folder, MANIFEST, StorageConfig())) == [f"{folder.url}/{problem}"]
    with pytest.raises(RowsMissing, match=r"^_job/commits/000009.json belongs to no shard of this job: delete it$"):
        finish(folder, MANIFEST)


def test_statistics_of_an_unfinished_job(folder: Folder) -> None:
    folder.remove(part_name(2))
    folder.remove(record_name(2))
    totals = write_statistics(folder, MANIFEST, read_records(folder, FINGERPRINT))
    assert (totals.shards, totals.rows) == (2, 9) and SUCCESS not in folder.names()
    assert json.loads(folder.read(SUMMARY))["planned_rows"] == 10


def test_success_holds_the_totals_that_were_checked(folder: Folder) -> None:
    """A report that began earlier may write partial statistics before `_SUCCESS` is written."""
    partial = read_records(folder, FINGERPRINT).slice(0, 1)
    totals = finalize(folder, MANIFEST)
    write_statistics(folder, MANIFEST, partial)
    write_success(folder, MANIFEST, totals)
    values = json.loads(folder.read(SUCCESS))
    assert (values["rows"], values["shards"]) == (10, 3)


def test_the_check_of_a_finished_job_writes_nothing(folder: Folder) -> None:
    assert finished_totals(folder, MANIFEST) is None
    totals = finish(folder, MANIFEST)
    before = files_of(folder.url)
    assert finished_totals(folder, MANIFEST) == totals
    assert files_of(folder.url) == before
    data = folder.read(part_name(1))
    for damage in (
        lambda: folder.remove(part_name(1)),
        lambda: folder.replace(part_name(1), data[:-1]),
        lambda: folder.create(part_name(7), data),
        lambda: folder.replace("_job/commits/000001.json", b"{"),
        lambda: folder.remove("_job/commits/000001.json"),
        lambda: folder.remove(SUCCESS),
    ):
        damage()
        damaged = files_of(folder.url)
        assert finished_totals(folder, MANIFEST) is None
        assert files_of(folder.url) == damaged
        folder.remove(part_name(7))
        folder.replace(part_name(1), data)
        folder.replace(SUCCESS, b"{}")
        for name, (*_, held) in before.items():
            folder.replace(os.path.relpath(name, folder.url), held)
        assert finished_totals(folder, MANIFEST) == totals
    assert loose_shards(folder) == [0, 1, 2]


def test_verify_compares_the_plan_with_the_footers_of_the_input(folder: Folder, tmp_path: Path) -> None:
    """The plan says that the parts are whole; if it is wrong itself, only the input shows it."""
    url = str(tmp_path / "in.parquet")
    pq.write_table(pa.table({"prompt": ["p"] * 10}), url)
    size, version = list_files([url], StorageConfig())[url]
    file, _ = read_footer(url, size, version, StorageConfig())

    def problems(**changes: Any) -> list[str]:
        shards = [Shard(0, url, 0, 4), Shard(1, url, 4, 6)]
        manifest = replace(MANIFEST, files=[replace(file, **changes)], shards=shards)
        return plan_problems(manifest, StorageConfig())

    assert problems() == []
    assert problems(group_rows=(9,), group_bytes=(1,)) == [
        f"{url}: it holds 10 rows, but the plan says 9",
        f"shard 1: 6 rows from row 4, but {url} has 9 rows",
    ]
    assert problems(version="1", group_rows=(4, 6)) == []  # changed since: nothing can be said of it


ROWS = 12


class Job:
    """A command whose parts are made up, and its output folder with four parts."""

    def __init__(self, url: str, storage: StorageConfig, checkpoint: Path, folder: Path) -> None:
        self.output, self.folder = open_folder(url, storage), folder
        write_rows(folder / "in.parquet", [ROWS])
        own = {"input": {"id": "id"}, "shard_rows": 3, "storage": storage.model_dump(include={"endpoint_url"})}
        self.values = job_values(folder / "in.parquet", url, checkpoint, **own)
        assert self.run().exit_code == 0
        manifest = plan_files.load(self.output)
        assert manifest is not None
        self.fingerprint = manifest.fingerprint

    def run(self, *options: str) -> Any:
        return invoke(self.folder, self.values, *options)

    def flip(self, shard: int) -> bytes:
        """Flip a bit in the middle of a part. Returns the damaged bytes."""
        data = bytearray(self.output.read(part_name(shard)))
        data[len(data) // 2] ^= 1
        self.output.replace(part_name(shard), bytes(data))
        return bytes(data)


@pytest.fixture
def new_job(checkpoint: Path, tmp_path: Path, made_up_parts: None, s3: StorageConfig) -> Callable[[str], Job]:
    def make(store: str) -> Job:
        url = str(tmp_path / "out") if store == "local" else f"s3://bucket/{uuid4().hex}"
        return Job(url, s3, checkpoint, tmp_path)

    return make


@pytest.mark.parametrize("store", ["local", "s3"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_flipped_bit_is_named_and_repaired(store: str, finished: bool, new_job: Callable[[str], Job]) -> None:
    job = new_job(store)
    before = {name: job.output.read(name) for name in job.output.names() if name.startswith("part-")}
    if not finished:
        for name in (SUCCESS, part_name(3), record_name(3)):
            job.output.remove(name)
    damaged = job.flip(1)
    for _ in range(2):
        result = job.run()
        assert result.exit_code == 2 and not job.output.names(DAMAGED), result.output
        assert f"{job.output.url}/part-000001.parquet: damaged" in result.stderr and "--repair" in result.stderr
    result = job.run("--repair", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fresh_rows"] == (3 if finished else 6)
    (kept,) = job.output.names(DAMAGED)
    assert kept.startswith("part-000001-") and not kept.endswith(".parquet")
    assert job.output.read(f"{DAMAGED}/{kept}") == damaged
    assert {name: job.output.read(name) for name in before} == before
    assert job.run("--verify").exit_code == 0


def test_parts_whose_records_lack_the_stores_checksum_are_read(new_job: Callable[[str], Job]) -> None:
    """As in an output that was copied from a local folder."""
    job = new_job("s3")
    for shard in range(4):
        record = decode_record(job.output.read(record_name(shard)), shard, job.fingerprint)
        assert record is not None and record["tag"]
        job.output.replace(record_name(shard), encode_record({**record, "tag": ""}, job.fingerprint))
    job.flip(1)
    result = job.run()
    assert result.exit_code == 2 and "sha256 differs" in result.stderr
    assert job.run("--repair").exit_code == 0 and job.run().exit_code == 0
    data = job.output.read(part_name(0))
    job.output.replace(part_name(0), data[:-1])
    result = job.run()
    assert result.exit_code == 2 and f"{len(data) - 1:,} bytes, {len(data):,} were committed" in result.stderr
