"""Jobs that share a cluster: a finished shard's part exists at once, whatever other datasets have asked for."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_command import HANGING_SECONDS, Command
from in_process import job_config
from local_cluster import ROOT, LocalCluster

from pipeline.commit.sink import part_name
from pipeline.config.job import JobConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SHARD_ROWS = 10
MOST_BEFORE = 8  # shards that two actors may answer between the last answer of a shard and its part
CHECKPOINT = ROOT / "configs/demo/checkpoint"


def job(folder: Path, rows: int) -> JobConfig:
    """A job of two actors, its answers in `folder`/out."""
    folder.mkdir()
    table = pa.table({"id": list(range(rows)), "prompt": [f"name[Zizzi], area[{row}]" for row in range(rows)]})
    pq.write_table(table, folder / "in.parquet")
    own: dict[str, Any] = {"input": {"id": "id"}, "model": {"dtype": "bfloat16"}, "schedule": {"speedup": 1.0}}
    own |= {"sampling": {"max_new_tokens": 32}, "actors": {"count": 2}, "shard_rows": SHARD_ROWS}
    return job_config(folder / "in.parquet", folder / "out", CHECKPOINT, **own)


def start(cluster: LocalCluster, config: JobConfig) -> Command:
    """`skipdecode run` on the cluster."""
    env = {**cluster.env, "RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    return Command(Path(config.output.path).parent, config, **env)


def answered_before(config: JobConfig) -> list[int]:
    """Of each part: how many other shards were answered between its shard's last answer and its creation."""
    output = Path(config.output.path)
    stats = pq.ParquetFile(output / "_job" / "stats.pq").read(["shard", "finished"]).to_pylist()
    answered = [one["finished"] for one in stats]
    created = [(output / part_name(one["shard"])).stat().st_mtime for one in stats]
    return [sum(first < other < last for other in answered) for first, last in zip(answered, created, strict=True)]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    one = LocalCluster(4)
    yield one
    one.close()


def test_two_jobs_on_a_small_cluster(cluster: LocalCluster, tmp_path: Path) -> None:
    configs = [job(tmp_path / name, rows) for name, rows in (("first", 900), ("second", 300))]
    first = start(cluster, configs[0])
    first.wait_for_parts(Path(configs[0].output.path), 3)
    second = start(cluster, configs[1])
    for config, command, rows in zip(configs, (first, second), (900, 300), strict=True):
        code, _, said = command.end()
        assert code == 0, said
        found = answered_before(config)
        assert len(found) == rows / SHARD_ROWS and max(found) <= MOST_BEFORE, found


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_job_that_was_stopped_and_begun_again_commits_at_once(
    cluster: LocalCluster, tmp_path: Path, how: str
) -> None:
    """A killed job cannot take back what it has asked Ray Data for."""
    config = job(tmp_path / "job", 900)
    first, output = start(cluster, config), Path(config.output.path)
    first.wait_for_parts(output, 5)
    first.process.send_signal(signal.Signals[how])
    assert first.process.wait(HANGING_SECONDS) in (4, -9)
    early = len(list(output.glob("part-*.parquet")))
    assert 5 <= early < 90
    code, _, said = start(cluster, config).end()
    assert code == 0, said
    found = answered_before(config)
    assert len(found) == 90 and max(found) <= MOST_BEFORE, found


HOG = """
import time, ray
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=1)
def busy():
    time.sleep(600)

held = [busy.remote() for _ in range(4)]
print("held", flush=True)
time.sleep(600)
"""


def test_a_job_without_a_free_cpu_says_so(cluster: LocalCluster, tmp_path: Path) -> None:
    env = {**cluster.env, "RAY_ADDRESS": f"127.0.0.1:{cluster.gcs}"}
    hog = subprocess.Popen([sys.executable, "-c", HOG], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout is not None and hog.stdout.readline() == "held\n"
        command = start(cluster, job(tmp_path / "job", 40))
        waits = "no actor has started: 0 of the cluster's 4 CPUs are free"
        assert command.process.stderr is not None
        assert any(waits in line for line in command.process.stderr)
        hog.kill()
        code, _, said = command.end()
        assert code == 0, said
        assert "loading the model in " in said
    finally:
        hog.kill()
        hog.wait()
