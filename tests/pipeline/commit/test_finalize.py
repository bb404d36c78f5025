"""A job ends with the totals that were checked, a refused part stays refused, and a finished job is left alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from part_builders import FINGERPRINT, finish, manifest_of, part, part_stats
from typer.testing import CliRunner

from actors.engine.errors import UserError
from pipeline.cli.app import app
from pipeline.commit.finalize import RowsMissing, finalize, finished_totals, write_statistics, write_success
from pipeline.commit.records import compact, loose_shards, read_records
from pipeline.commit.sink import DAMAGED, SUCCESS, commit, committed_shards, part_name
from pipeline.commit.verify import plan_problems, verify
from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.shards import Shard
from pipeline.plan import plan_files
from pipeline.storage.folder import Folder, open_folder

SHARDS = [Shard(0, "in/a.parquet", 0, 4), Shard(1, "in/a.parquet", 4, 5), Shard(2, "in/b.parquet", 0, 1)]
MANIFEST = manifest_of(SHARDS)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An output with three committed shards."""
    output = open_folder(str(tmp_path / "out"), StorageConfig())
    plan_files.save(output, MANIFEST)
    for shard in SHARDS:
        commit(output, shard, part(shard), part_stats(shard), FINGERPRINT)
    return output


def files(folder: Folder) -> dict[str, tuple[int, int, bytes]]:
    """Inode, modification time and bytes of every file."""
    paths = [path for path in Path(folder.url).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_refused_part_is_refused_until_it_is_repaired(folder: Folder, compacted: bool) -> None:
    """A retry by a scheduler must not accept a part that was rewritten with other text."""
    if compacted:
        compact(folder, FINGERPRINT, 1)
    changed = part(SHARDS[1], keep=("topic",))
    assert len(changed) != len(part(SHARDS[1]))
    folder.replace(part_name(1), changed)
    for _ in range(3):
        with pytest.raises(UserError, match=r"/part-000001.parquet: damaged \(.* committed\); run again with --repair"):
            committed_shards(folder, SHARDS, FINGERPRINT)
        with pytest.raises(
            RowsMissing, match=r"^part-000001.parquet differs from what was committed: run again with --repair"
        ):
            finalize(folder, MANIFEST)
        assert len(list(verify(folder, MANIFEST, StorageConfig()))) == 1
    assert committed_shards(folder, SHARDS, FINGERPRINT, "repair") == {0, 2}
    (kept,) = folder.names(DAMAGED)
    assert folder.read(f"{DAMAGED}/{kept}") == changed and not folder.exists(part_name(1))
    commit(folder, SHARDS[1], part(SHARDS[1]), part_stats(SHARDS[1]), FINGERPRINT)
    assert finish(folder, MANIFEST).rows == 10 and list(verify(folder, MANIFEST, StorageConfig())) == []


def test_success_holds_the_totals_that_were_checked(folder: Folder) -> None:
    """A report that began earlier may write partial statistics before `_SUCCESS` is written."""
    partial = read_records(folder, FINGERPRINT).slice(0, 1)
    totals = finalize(folder, MANIFEST)
    write_statistics(folder, MANIFEST, partial)
    write_success(folder, MANIFEST, totals)
    values = json.loads(folder.read(SUCCESS))
    assert (values["rows"], values["shards"]) == (10, 3)


def test_a_report_only_reads(folder: Folder) -> None:
    finish(folder, MANIFEST)
    before = files(folder)
    result = CliRunner().invoke(app, ["report", folder.url])
    assert result.exit_code == 0 and "10 rows in 3 shards" in result.stdout
    assert files(folder) == before
    folder.remove("_job/stats.parquet")
    assert CliRunner().invoke(app, ["report", folder.url, "--write"]).exit_code == 0
    assert {name: values[2] for name, values in files(folder).items()} == {
        name: values[2] for name, values in before.items()
    }


def test_the_check_of_a_finished_job_writes_nothing(folder: Folder) -> None:
    assert finished_totals(folder, MANIFEST) is None
    totals = finish(folder, MANIFEST)
    before = files(folder)
    assert finished_totals(folder, MANIFEST) == totals
    assert files(folder) == before
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
        damaged = files(folder)
        assert finished_totals(folder, MANIFEST) is None
        assert files(folder) == damaged
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
        f"shard 1: 6 rows from row 4; {url} has 9",
    ]
    assert problems(version="1", group_rows=(4, 6)) == []  # changed since: nothing can be said of it
