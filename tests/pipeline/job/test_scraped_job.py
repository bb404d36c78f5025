"""A Prometheus with infra's scrape file answers every query of the dashboard while a job runs on a cluster; a job on a
Ray of its own serves metrics too."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import yaml
from cli_command import Command
from fault_proxy import SLOW_DOWN, Request, fault_proxy
from in_process import job_config, job_values
from infra_files import SCRAPE, queries
from local_cluster import LocalCluster

from pipeline.config.job import StorageConfig

SECONDS = 300.0  # until every query has an answer


@contextmanager
def prometheus(folder: Path, rays_folder: str) -> Iterator[str]:
    """A Prometheus with the scrape file, for a cluster with that temporary folder; its URL."""
    (folder / "prometheus.yml").write_text(SCRAPE.read_text().replace("/tmp/ray/", f"{rays_folder}/"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
        try:
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(timeout=300)


def answers(url: str, expr: str) -> list[float]:
    """Values that Prometheus computes now; none while it starts. AssertionError for a query that it refuses."""
    try:
        response = requests.get(f"{url}/api/v1/query", params={"query": expr}, timeout=300).json()
    except requests.RequestException:
        return []
    assert response["status"] == "success", (expr, response)
    return [float(one["value"][1]) for one in response["data"]["result"]]


def is_incomplete(name: str, values: list[float]) -> bool:
    """Whether a query has not one finite value for the job, or for each part of its time, yet."""
    return len(values) != (4 if "by part" in name else 1) or not all(map(math.isfinite, values))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus")
def test_prometheus_answers_every_query_while_a_job_runs(s3: StorageConfig, checkpoint: Path, tmp_path: Path) -> None:
    rows = 100_000  # more than are answered here
    prompts = [None if row % 7 == 0 else f"alpha {row}" for row in range(rows)]
    pq.write_table(pa.table({"id": range(rows), "prompt": prompts}), tmp_path / "in.parquet")

    def faults(request: Request) -> str | None:
        return SLOW_DOWN if request.number % 5 == 0 else None

    assert s3.endpoint_url
    cluster = LocalCluster(3)
    try:
        with fault_proxy(s3.endpoint_url) as proxy, prometheus(tmp_path, cluster.folder) as url:
            proxy.script = faults  # type: ignore[assignment]
            job = job_values(
                tmp_path / "in.parquet",
                "s3://bucket/metrics",
                checkpoint,
                sampling={"max_new_tokens": 40, "temperature": 1.0},
                actors={"count": 1, "max_batch": 4},
                storage={"endpoint_url": proxy.url},
                shard_rows=64,
            )
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
            command = ["--", "python", "-m", "pipeline", "run", str(tmp_path / "job.yaml")]
            submitted = cluster.job("submit", "--no-wait", "--submission-id", "one", "--working-dir", ".", *command)
            assert submitted.returncode == 0, submitted.stdout + submitted.stderr
            deadline, found = time.monotonic() + SECONDS, {}
            while not found or any(map(is_incomplete, found, found.values())):
                headers = {"Authorization": f"Bearer {cluster.env['RAY_AUTH_TOKEN']}"}
                status = requests.get(f"{cluster.url}/api/jobs/one", headers=headers, timeout=300).json()["status"]
                running = status in ("PENDING", "RUNNING")
                assert running and time.monotonic() < deadline, (found, cluster.job("logs", "one"))
                time.sleep(3)
                found = {name: answers(url, expr) for name, expr in queries().items()}
            (done,), (left,) = found["Done A"], found["Time left A"]
            assert 0 < done < 0.5 and left > 0
            (depth,) = found["Mean depth A"]
            layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
            assert 1 <= depth <= layers
            (labels,) = (requests.get(f"{url}/api/v1/label/output/values", timeout=300).json()["data"],)
            assert labels == ["s3://bucket/metrics"]
            committed, wrong = (answers(url, f"sum(ray_skipdecode_{name}_total)")[0] for name in ("rows", "row_errors"))
            assert 0 < committed < rows and committed % 64 == 0 and wrong == pytest.approx(committed / 7, abs=64)
            cluster.job("stop", "one")
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_of_its_own_ray_serves_metrics_and_logs_objects(checkpoint: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(20_000), "prompt": ["alpha"] * 20_000}), tmp_path / "in.parquet")
    sampling, actors = {"max_new_tokens": 40, "temperature": 1.0}, {"count": 1, "max_batch": 1}
    own: dict[str, Any] = {"sampling": sampling, "actors": actors, "shard_rows": 64, "grace_seconds": 0}
    config = job_config(tmp_path / "in.parquet", tmp_path / "out", checkpoint, **own)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = Command(tmp_path, config, "--log-json", "--metrics-port", str(port))

    def scraped() -> bool:
        try:
            text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text
        except requests.RequestException:
            return False
        names = ("rows_total", "generated_tokens_total", "job_rows_done")
        return all(f"ray_skipdecode_{name}{{" in text for name in names)

    command.wait_until(scraped, every=1)
    listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.end()
    events = [json.loads(line) for line in err.splitlines()]
    assert code == events[-1]["exit_status"] == 4 and events[-1]["event"] == "end"
    assert "progress" in {one["event"] for one in events}
