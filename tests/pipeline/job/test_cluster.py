"""Jobs on a cluster, as a user submits them: a small upload, logs, exit status, stop and resume, nodes that join."""

from __future__ import annotations

import logging
import re
import shutil
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


def own_folder(folder: Path, checkpoint: Path, rows: int, output: Path | str, **changes: Any) -> Path:
    """A user's folder with a job file, prompts and model, whose paths are relative to it."""
    folder.mkdir()
    shutil.copytree(checkpoint, folder / "model")
    values: dict[str, Any] = {"input": {"path": "in.parquet", "id": "id"}, "sampling": {"max_new_tokens": 4}, **changes}
    write_job(folder, Path("model"), rows, output={"path": str(output)}, **values)
    return folder


def submit_folder(cluster: LocalCluster, folder: Path, name: str, *options: str, slow: bool = False) -> tuple[int, str]:
    """Exit status and output of `ray job submit --working-dir` with a user's folder. slow: with slow stages."""
    command = ["python", str(ROOT / "tests" / "pipeline" / "slow_stages.py")] if slow else ["skipdecode"]
    options = ("--submission-id", name, "--working-dir", str(folder), *options)
    done = cluster.job("submit", *options, "--", *command, "run", "job.yaml")
    return done.returncode, done.stdout + done.stderr


def unpacked_folders(cluster: LocalCluster, marker: str) -> set[Path]:
    """Folders with the file `marker` into which Ray has unpacked uploads."""
    found = Path(cluster.folder).glob(f"session_*/runtime_resources/working_dir_files/*/{marker}")
    return {path.parent.resolve() for path in found}


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
    begins = ("INFO job_manager.py", "Running entrypoint for job", "INFO cli.py", "INFO sdk.py")
    return [line for line in lines if not line.endswith(" ...") and not any(begin in line for begin in begins)]


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
    folder = own_folder(tmp_path / "mine", checkpoint, 4, tmp_path / "out")
    (folder / "pipeline").mkdir()
    for module in ("pipeline/__init__.py", "actors.py"):
        (folder / module).write_text("raise SystemExit('the wrong module')\n")
    code, said = submit_folder(cluster, folder, "modules")
    assert code == 0, said
    assert_every_row_once(tmp_path, 4)


@pytest.mark.slow
def test_a_wrong_job_is_exit_1_and_one_line_in_the_log(cluster: LocalCluster, checkpoint: Path, tmp_path: Path) -> None:
    assert requests.get(f"{cluster.url}/api/jobs/", timeout=300).status_code == 401  # who has no token
    file = write_job(tmp_path, checkpoint, 4, input={"path": str(tmp_path / "none.parquet")})
    code, said = submit(cluster, file, "wrong")
    assert code == 1, said
    assert "entrypoint command failed with exit code 2" in cluster.asked("wrong")["message"]
    (line,) = own_lines(cluster.asked("wrong/logs")["logs"])
    assert line.startswith(f"skipdecode: {file}: {tmp_path}/none.parquet: no such file or folder")


def stopped_half_way(cluster: LocalCluster, folder: Path, output: Path, name: str) -> dict[Path, int]:
    """Submit a slow job, stop it after its second part; return its parts, each with its modification time in ns."""
    code, said = submit_folder(cluster, folder, name, "--no-wait", slow=True)
    assert code == 0, said

    def has_begun() -> bool:
        assert cluster.asked(name)["status"] in ("PENDING", "RUNNING"), cluster.asked(f"{name}/logs")["logs"]
        return len(list(output.rglob("part-*.parquet"))) >= 2

    wait_until(has_begun, every=0.2)
    cluster.stop(name)
    wait_until(lambda: cluster.asked(name)["status"] == "STOPPED", every=0.2)
    log = own_lines(cluster.asked(f"{name}/logs")["logs"])
    assert log[0].startswith("`ray job stop` leaves this job 45 s, less than grace_seconds = 60: ")
    assert log[-1] == "skipdecode: interrupted (SIGTERM); the same command finishes the job"
    return {path: path.stat().st_mtime_ns for path in output.rglob("part-*.parquet")}


def test_a_relative_output_is_refused_and_no_file_is_written(
    cluster: LocalCluster, checkpoint: Path, tmp_path: Path
) -> None:
    folder = own_folder(tmp_path / "mine", checkpoint, 4, "answers/mine")
    (folder / "refused").touch()
    code, said = submit_folder(cluster, folder, "relative")
    assert code == 1, said
    assert "entrypoint command failed with exit code 2" in cluster.asked("relative")["message"]
    (line,) = own_lines(cluster.asked("relative/logs")["logs"])
    assert line.startswith("skipdecode: job.yaml: output.path: answers/mine is in the temporary copy ")
    (package,) = unpacked_folders(cluster, "refused")
    assert {path.name for path in package.rglob("*")} == {path.name for path in folder.rglob("*")}


@pytest.mark.slow
def test_stopped_half_way_and_submitted_again_from_a_changed_folder_every_row_is_answered_once(
    cluster: LocalCluster, checkpoint: Path, tmp_path: Path
) -> None:
    rows, shard_rows = 160, 4
    folder = own_folder(tmp_path / "mine", checkpoint, rows, tmp_path / "out", shard_rows=shard_rows, grace_seconds=60)
    (folder / "resumed").touch()
    early = stopped_half_way(cluster, folder, tmp_path / "out", "first")
    assert 2 <= len(early) < rows // shard_rows
    (folder / "notes.txt").write_text("Ray unpacks the changed folder to another place")
    code, said = submit_folder(cluster, folder, "second")
    assert code == 0, said
    log = own_lines(cluster.asked("second/logs")["logs"])
    assert f"resuming: {len(early)} of {rows // shard_rows} shards are committed already" in log
    assert_every_row_once(tmp_path, rows)
    assert {path: path.stat().st_mtime_ns for path in early} == early
    assert len(unpacked_folders(cluster, "resumed")) == 2


@pytest.mark.slow
def test_a_nightly_run_stopped_half_way_and_submitted_again_answers_every_row_once(
    cluster: LocalCluster, checkpoint: Path, tmp_path: Path
) -> None:
    rows, nightly = 160, {"path": "inbox", "since": "last_success"}
    folder = own_folder(
        tmp_path / "mine", checkpoint, rows, tmp_path / "out", input=nightly, shard_rows=4, grace_seconds=60
    )
    (folder / "inbox").mkdir()
    (folder / "in.parquet").rename(folder / "inbox" / "a.parquet")
    early = stopped_half_way(cluster, folder, tmp_path / "out", "night-1")
    pq.write_table(pa.table({"id": ["new-0", "new-1"], "prompt": ["bravo", "bravo"]}), folder / "inbox" / "b.parquet")
    code, said = submit_folder(cluster, folder, "night-2")
    assert code == 0, said
    log = cluster.asked("night-2/logs")["logs"]
    assert "run 1, left unfinished by an earlier command, is now finished" in log
    assert {path: path.stat().st_mtime_ns for path in early} == early
    first, second = (pq.read_table(path.parent)["id"].to_pylist() for path in sorted(tmp_path.glob("out/*/_SUCCESS")))
    assert sorted(first) == sorted(f"a.parquet:{row}" for row in range(rows))
    assert second == ["b.parquet:0", "b.parquet:1"]


@pytest.mark.slow
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

    wait_until(ended, every=1)
    assert_every_row_once(tmp_path, rows)
    stats = pq.read_table(tmp_path / "out" / "_job" / "stats.pq").to_pylist()
    head = min(stats, key=lambda one: one["started"])["node"]
    elsewhere = [one for one in stats if one["node"] != head]
    assert elsewhere
    assert len({one["node"] for one in elsewhere}) == 1
    assert min(one["started"] for one in elsewhere) > joined
    log = own_lines(cluster.job("logs", "pool").stdout)
    assert any(PROGRESS.match(line) for line in log)
    assert log[-3].startswith(f"{rows:,} rows in ")
