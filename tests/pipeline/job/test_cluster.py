"""Jobs on a cluster, as a user submits them: a small upload, logs, exit status, stop and resume, nodes that join."""

from __future__ import annotations

import logging
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import yaml
from cli_command import wait_until
from in_process import job_config
from local_cluster import ROOT, LocalCluster
from ray._private.runtime_env.packaging import create_package

pytestmark = pytest.mark.ray
HEAD_CPUS = 3
PROGRESS = re.compile(r"\d+/\d+ shards  [\d,]+/[\d,]+ rows  [\d,.]+ rows/s  [\d,]+ tokens/s")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    one = LocalCluster(HEAD_CPUS)
    yield one
    one.close()


def write_job(folder: Path, checkpoint: Path, rows: int, **changes: Any) -> Path:
    """A job file over `rows` prompts, its answers in `folder`/out."""
    table = pa.table({"id": [f"row-{row}" for row in range(rows)], "prompt": [f"alpha {row}" for row in range(rows)]})
    pq.write_table(table, folder / "in.parquet")
    values: dict[str, Any] = {
        "input": {"id": "id"},
        "sampling": {"max_new_tokens": 40, "temperature": 1.0, "seed": 3},
        "actors": {"count": 1, "max_batch": 1},
        "shard_rows": 8,
    }
    job = job_config(folder / "in.parquet", folder / "out", checkpoint, **{**values, **changes})
    (folder / "job.yaml").write_text(yaml.safe_dump(job.model_dump(exclude_none=True)))
    return folder / "job.yaml"


def submit(cluster: LocalCluster, file: Path, name: str, *options: str) -> tuple[int, str]:
    """Exit status and output of `ray job submit --working-dir . -- python -m pipeline run` of a job file."""
    command = ["--", "python", "-m", "pipeline", "run", str(file)]
    done = cluster.job("submit", "--submission-id", name, "--working-dir", ".", *options, *command)
    return done.returncode, done.stdout + done.stderr


def parts(folder: Path) -> dict[str, int]:
    """Part files with the time at which each was written, ns since 1970."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "out").glob("part-*.parquet")}


def assert_every_row_once(folder: Path, rows: int) -> None:
    ids = pq.read_table(folder / "out")["id"].to_pylist()
    assert sorted(ids) == sorted(f"row-{row}" for row in range(rows))
    assert (folder / "out" / "_SUCCESS").exists()


def own_lines(log: str) -> list[str]:
    """A job's log without the two lines that Ray's job manager begins it with, and what a busy machine adds."""
    lines = [line for line in log.splitlines() if line.strip()]
    begins = ("INFO job_manager.py", "Running entrypoint for job", "INFO cli.py", "INFO sdk.py", "loading libraries")
    return [line for line in lines if not any(begin in line for begin in begins)]


def test_the_upload_is_small_and_whole(tmp_path: Path) -> None:
    """What `--working-dir .` packs: all of the code and the job files, neither weights nor tests."""
    target = tmp_path / "package.zip"
    create_package(str(ROOT), target, include_gitignore=True, logger=logging.getLogger("quiet"))
    assert target.stat().st_size < 3_000_000  # nothing in it is compressed
    names = set(zipfile.ZipFile(target).namelist())
    code = {str(path.relative_to(ROOT)) for top in ("actors", "pipeline") for path in (ROOT / top).rglob("*.py")}
    assert code | {"configs/demo.yaml"} <= names
    assert {name.split("/")[0] for name in names if "/" in name} == {"actors", "configs", "pipeline"}
    assert not [name for name in names if name.startswith("configs/demo/checkpoint/")]


def test_a_users_own_modules_beside_the_job_break_nothing(
    cluster: LocalCluster, checkpoint: Path, tmp_path: Path
) -> None:
    """Neither in the driver nor in the workers, which have the uploaded folder first on their path."""
    (tmp_path / "pipeline").mkdir()
    for module in ("pipeline/__init__.py", "actors.py"):
        (tmp_path / module).write_text("raise SystemExit('the wrong module')\n")
    write_job(tmp_path, checkpoint, 4)
    done = cluster.job("submit", "--working-dir", str(tmp_path), "--", "skipdecode", "run", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_every_row_once(tmp_path, 4)


@pytest.mark.slow
def test_a_wrong_job_is_exit_1_and_one_line_in_the_log(cluster: LocalCluster, checkpoint: Path, tmp_path: Path) -> None:
    assert requests.get(f"{cluster.url}/api/jobs/", timeout=30).status_code == 401  # who has no token
    file = write_job(tmp_path, checkpoint, 4, input={"path": str(tmp_path / "none.parquet")})
    code, said = submit(cluster, file, "wrong")
    assert code == 1, said
    assert "entrypoint command failed with exit code 2" in cluster.asked("wrong")["message"]
    (line,) = own_lines(cluster.asked("wrong/logs")["logs"])
    assert line == f"skipdecode: {file}: {tmp_path}/none.parquet: no such file or folder"


@pytest.mark.slow
def test_stopped_half_way_and_submitted_again_every_row_is_answered_once(
    cluster: LocalCluster, checkpoint: Path, tmp_path: Path
) -> None:
    rows = 160
    file = write_job(tmp_path, checkpoint, rows)
    code, said = submit(cluster, file, "first", "--no-wait")
    assert code == 0, said
    wait_until(lambda: len(parts(tmp_path)) >= 3)
    stopped = cluster.job("stop", "first")
    assert stopped.returncode == 0, stopped.stderr
    early = parts(tmp_path)
    assert 3 <= len(early) < rows // 8
    assert "interrupted (SIGTERM); the same command finishes the job" in cluster.job("logs", "first").stdout

    code, said = submit(cluster, file, "second")
    assert code == 0, said
    log = own_lines(cluster.job("logs", "second").stdout)
    assert any(re.fullmatch(r"resuming: \d+ of 20 shards are committed already", line) for line in log)
    assert_every_row_once(tmp_path, rows)
    assert {name: parts(tmp_path)[name] for name in early} == early


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_pool_that_may_grow_uses_a_node_that_joins(cluster: LocalCluster, checkpoint: Path, tmp_path: Path) -> None:
    """The head node has room for one actor of two CPUs; the second node comes in the middle of the job."""
    rows, shard_rows = 3600, 12  # long enough: Ray Data looks for new nodes every 20 s
    actors = {"min": 1, "max": 2, "cpus": 2, "threads": 1, "max_batch": 1}
    file = write_job(tmp_path, checkpoint, rows, actors=actors, shard_rows=shard_rows)
    code, said = submit(cluster, file, "pool", "--no-wait")
    assert code == 0, said
    wait_until(lambda: len(parts(tmp_path)) >= 1)
    cluster.join(6)  # more than the actor takes: Ray Data sets shares aside for the stages beside it
    joined = time.time()

    def ended() -> bool:
        done = cluster.job("status", "pool")
        said = done.stdout + done.stderr
        assert "failed" not in said, cluster.job("logs", "pool").stdout
        return "succeeded" in said

    wait_until(ended, 300, every=1)
    assert_every_row_once(tmp_path, rows)
    stats = pq.read_table(tmp_path / "out" / "_job" / "stats.parquet").to_pylist()
    head = min(stats, key=lambda one: one["started"])["node"]
    elsewhere = [one for one in stats if one["node"] != head]
    assert elsewhere
    assert len({one["node"] for one in elsewhere}) == 1
    assert min(one["started"] for one in elsewhere) > joined
    log = own_lines(cluster.job("logs", "pool").stdout)
    assert any(PROGRESS.match(line) for line in log)
    assert log[-3].startswith(f"{rows:,} rows in ")
