"""A disk that is full, or may not be written: one line, and nothing half-done; with space made the job is finished."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import Command, assert_released
from in_process import invoke, job_config
from in_process import parts as parts_of
from part_builders import FINGERPRINT, commit_made_up_parts, part

from pipeline.commit.sink import committed_shards, part_name
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.shards import Shard
from pipeline.storage.folder import Folder, open_folder

SHARDS = [Shard(index, "in.parquet", 6 * index, 6) for index in range(12)]


class Disk:
    """A filesystem of its own at `path`."""

    def __init__(self, path: Path, kibibytes: int) -> None:
        self.path = path
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Room for some of SHARDS' parts and records."""
    found = Disk(tmp_path / "disk", 64)
    yield found
    subprocess.run(["umount", "-l", str(found.path)], check=True)


def test_what_is_committed_on_a_full_disk_stays_and_the_rest_follows(disk: Disk) -> None:
    folder = open_folder(str(disk.path / "out"), StorageConfig())
    with pytest.raises(OSError, match="No space left on device") as caught:
        commit_made_up_parts(SHARDS, folder)
    assert caught.value.errno == errno.ENOSPC and str(caught.value.filename).startswith(folder.url)
    assert folder.names("_job/tmp") == []
    parts = [name for name in folder.names() if name.endswith(".parquet")]
    assert 0 < len(parts) < len(SHARDS)
    assert all(folder.read(name) == part(shard) for name, shard in zip(parts, SHARDS, strict=False))
    disk.remount("size=1m")
    assert committed_shards(folder, SHARDS, FINGERPRINT) == set(range(len(parts)))
    commit_made_up_parts(SHARDS, folder)
    assert {name: folder.read(name) for name in folder.names()} == {part_name(s.index): part(s) for s in SHARDS}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("method", ["create", "replace"])
def test_half_a_file_is_not_left_behind(
    local: Folder, monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    local.replace("b", b"before")

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=rf"{os.strerror(number)}: '{local.url}/b'"):
        getattr(local, method)("b", b"data")
    assert local.names("_job/tmp") == [] and local.read("b") == b"before"


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path, disk: Disk) -> JobConfig:
    table = pa.table({"id": list(range(48)), "prompt": [f"alpha {row}" for row in range(48)]})
    pq.write_table(table, tmp_path / "in.parquet")
    own = {"input": {"id": "id"}, "sampling": {"max_new_tokens": 8}, "shard_rows": 4}
    return job_config(tmp_path / "in.parquet", disk.path / "out", checkpoint, **own)


def test_an_output_that_may_not_be_written_is_one_line_at_once(
    tmp_path: Path, disk: Disk, job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.remount("ro")
    for name in ("ray.init", "actors.engine.build.load_decoder"):
        monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("too late"))
    result = invoke(tmp_path, job)
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if not line.startswith("memory")]
    refused = f"output.path: {disk.path}/out cannot be created: {disk.path} is not writable"
    assert said[-1] == f"skipdecode: {tmp_path}/job.yaml: {refused}"


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_that_fills_the_disk_is_finished_once_there_is_space(tmp_path: Path, disk: Disk, job: JobConfig) -> None:
    """Three runs of the command, on a Ray of their own."""
    whole = job.model_copy(update={"output": job.output.model_copy(update={"path": str(tmp_path / "whole")})})
    assert Command(tmp_path, whole).end()[0] == 0
    output = disk.path / "out"
    disk.remount("size=96k")  # the job's own records too
    first = Command(tmp_path, job)
    code, _, err = first.end()
    assert code == 1, err
    assert "Traceback" not in err
    assert "No space left on device: " in err.splitlines()[-1] and str(output) in err.splitlines()[-1], err
    early = parts_of(output)
    assert 0 < len(early) < 12
    first.assert_nothing_left()
    disk.remount("size=1m")
    assert Command(tmp_path, job).end()[0] == 0
    assert parts_of(output) == parts_of(tmp_path / "whole")
    assert_released(output)
