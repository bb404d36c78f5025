"""A job ends with the totals that were checked, a refused part stays refused, and a finished job is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from part_builders import FINGERPRINT, finish, manifest_of, part, part_stats
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.commit.finalize import RowsMissing, finalize, finished_totals, write_statistics, write_success
from pipeline.commit.records import compact, loose_shards, read_records
from pipeline.commit.sink import SUCCESS, commit, committed_shards, part_name
from pipeline.commit.verify import verify
from pipeline.config.job import StorageConfig
from pipeline.plan import manifest as manifests
from pipeline.read.shards import Shard
from pipeline.storage.folder import Folder, open_folder

SHARDS = [Shard(0, "in/a.parquet", 0, 4), Shard(1, "in/a.parquet", 4, 5), Shard(2, "in/b.parquet", 0, 1)]
MANIFEST = manifest_of(SHARDS)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An output with three committed shards."""
    output = open_folder(str(tmp_path / "out"), StorageConfig())
    manifests.save(output, MANIFEST)
    for shard in SHARDS:
        commit(output, shard, part(shard), part_stats(shard), FINGERPRINT)
    return output


def files(folder: Folder) -> dict[str, tuple[int, int, bytes]]:
    """Inode, modification time and bytes of every file."""
    paths = [path for path in Path(folder.url).rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_refused_part_is_refused_until_it_is_deleted(folder: Folder, compacted: bool) -> None:
    """A retry by a scheduler must not accept a part that was rewritten with other text."""
    if compacted:
        compact(folder, FINGERPRINT, 1)
    changed = part(SHARDS[1], keep=("topic",))
    assert len(changed) != len(part(SHARDS[1]))
    folder.replace(part_name(1), changed)
    for _ in range(3):
        assert committed_shards(folder, SHARDS, FINGERPRINT) == {0, 1, 2}
        with pytest.raises(RowsMissing, match=r"^part-000001.parquet is not what was committed: delete it, then run"):
            finalize(folder, MANIFEST)
        assert len(list(verify(folder, MANIFEST))) == 1
    folder.remove(part_name(1))
    if compacted:
        with pytest.raises(RowsMissing, match=r"was committed and is gone: run the same command again"):
            finalize(folder, MANIFEST)
    assert committed_shards(folder, SHARDS, FINGERPRINT) == {0, 2}
    commit(folder, SHARDS[1], part(SHARDS[1]), part_stats(SHARDS[1]), FINGERPRINT)
    assert finish(folder, MANIFEST).rows == 10 and list(verify(folder, MANIFEST)) == []


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
