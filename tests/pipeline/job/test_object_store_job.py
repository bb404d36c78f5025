"""Whole jobs over a store that fails, refuses, or is Ceph's: the bytes are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cli_command import Command
from fault_proxy import DELAY, EXPIRED, Fault, Proxy, Request, mixed
from in_process import job_config, parts

from pipeline import job as jobs
from pipeline.config.job import JobConfig, StorageConfig
from pipeline.storage.folder import Folder, open_folder
from pipeline.storage.parquet import parquet_bytes

ROWS = 40


def fill(storage: StorageConfig, checkpoint: Path, count: int = ROWS) -> str:
    """URL of a new folder in the bucket with inputs and a checkpoint."""
    root = f"s3://bucket/{uuid.uuid4().hex}"
    folder = open_folder(root, storage)
    for number in range(2):
        rows = range(number * count // 2, (number + 1) * count // 2)
        table = pa.table({"id": [f"r{row}" for row in rows], "prompt": [f"name[{row}]" for row in rows]})
        folder.replace(f"in/{number}.parquet", parquet_bytes(table))
    for path in checkpoint.iterdir():
        folder.replace(f"model/{path.name}", path.read_bytes())
    return root


def config(root: str, output: Path | str, storage: StorageConfig, cache: Path, **sampling: Any) -> JobConfig:
    return job_config(
        f"{root}/in",
        output,
        f"{root}/model",
        input={"id": "id"},
        output={"token_ids": True},
        model={"cache": str(cache)},
        sampling={"max_new_tokens": 8, "temperature": 1.0, **sampling},
        storage=storage.model_dump(exclude_none=True),
        shard_rows=5,
    )


def parts_of(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in folder.names() if name.endswith(".parquet")}


def test_a_job_over_a_failing_store_writes_the_same_bytes(
    in_process: None, proxy: Proxy, s3: StorageConfig, checkpoint: Path, tmp_path: Path
) -> None:
    root = fill(s3, checkpoint, 20)  # four shards
    assert jobs.run(config(root, tmp_path / "out", s3, tmp_path / "a", max_new_tokens=4)).totals.rows == 20
    proxy.script = mixed(seed=7, share=0.15)
    storage = StorageConfig(endpoint_url=proxy.url, retry_seconds=60)
    outcome = jobs.run(config(root, f"{root}/out", storage, tmp_path / "b", max_new_tokens=4))
    assert outcome.totals.rows == 20 and outcome.totals.errors == 0
    assert parts_of(open_folder(f"{root}/out", s3)) == parts(tmp_path / "out")
    assert sum(count for (_, fault), count in proxy.done.items() if fault != DELAY) >= 10
    assert open_folder(f"{root}/out", s3).names("_job/tmp") == []


@pytest.mark.ray
@pytest.mark.slow
def test_credentials_that_expire_end_a_job_with_one_line_and_a_rerun_finishes_it(
    proxy: Proxy, s3: StorageConfig, checkpoint: Path, tmp_path: Path
) -> None:
    root = fill(s3, checkpoint)
    undisturbed = Command(tmp_path, config(root, tmp_path / "out", s3, tmp_path / "cache"))
    assert undisturbed.end()[0] == 0
    storage = StorageConfig(endpoint_url=proxy.url, retry_seconds=20)
    job = config(root, f"{root}/out", storage, tmp_path / "cache")
    puts = 0

    def expires(request: Request) -> Fault:
        nonlocal puts
        puts += request.method == "PUT" and "/part-" in request.target
        return EXPIRED if puts > 3 else None

    proxy.script = expires
    code, out, err = Command(tmp_path, job).end()
    assert code == 1 and out == "", err
    lease, line = [line for line in err.splitlines() if "refused" in line]
    assert lease.startswith("the lease could not be released: ") and lease.endswith(
        "; the next run takes over at once on this machine, or after 60 s on another"
    )
    assert line.startswith("skipdecode: failed: ") and f"{root}/" in line and "access refused (ExpiredToken)" in line
    assert "renew the credentials; the same command resumes the job" in line
    assert "Traceback" not in err
    early = parts_of(open_folder(f"{root}/out", s3))
    assert len(early) == 3
    code, _, err = Command(tmp_path, job).end()  # not one request is answered
    assert code != 0 and len([line for line in err.splitlines() if "refused (" in line]) == 1, err
    proxy.script = lambda request: None
    code, _, err = Command(tmp_path, job).end()
    assert code == 0, err
    assert parts_of(open_folder(f"{root}/out", s3)) == parts(tmp_path / "out")


@pytest.mark.ceph
@pytest.mark.ray
def test_out_of_ceph_and_into_it_killed_half_way(ceph: StorageConfig, checkpoint: Path, tmp_path: Path) -> None:
    root = fill(ceph, checkpoint)
    long = {"max_new_tokens": 40, "min_new_tokens": 40}
    code, _, err = Command(tmp_path, config(root, tmp_path / "out", ceph, tmp_path / "cache", **long)).end()
    assert code == 0, err
    whole = parts(tmp_path / "out")
    job, folder = config(root, f"{root}/out", ceph, tmp_path / "cache", **long), open_folder(f"{root}/out", ceph)
    first = Command(tmp_path, job)
    first.wait_until(lambda: len(parts_of(folder)) >= 3)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait()
    early = parts_of(folder)
    assert len(early) < len(whole)
    code, _, err = Command(tmp_path, job).end()
    assert code == 0, err
    assert f"resuming: {len(early)} of {len(whole)} shards" in err
    assert parts_of(folder) == whole
