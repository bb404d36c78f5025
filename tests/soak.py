"""Kills processes of many small jobs at random moments and counts rows lost, rows repeated and parts that differ.

    python tests/soak.py [--trials 30] [--faults actor,prepare,raylet,driver] [--store local|moto|s3]
        [--minutes 60] [--seed 0]

A trial counts if the kill hit a living process of an unfinished job. s3: the bucket skipdecode-soak at
AWS_ENDPOINT_URL, credentials from the usual AWS variables, as `infra/ceph.sh start FOLDER` prints them. The last
line is one JSON object; exit 1 if a row was lost or repeated, a part differs, a job hung or failed, or the trials
asked for were not reached.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT / name) for name in (".", "tests", "tests/pipeline", "configs/demo")]
sys.path[:0] = PATHS
os.environ.update(PYTHONPATH=os.pathsep.join(PATHS), OMP_NUM_THREADS="1", RAY_AUTH_MODE="disabled")

import boto3  # noqa: E402
import bucket_server  # noqa: E402
import ray  # noqa: E402
from fault_bench import Bench, Trial  # noqa: E402
from process_kills import TwoNodes, kill_driver, kill_worker  # noqa: E402

from pipeline.config.job import StorageConfig  # noqa: E402
from pipeline.run import ray_head  # noqa: E402

FAULTS = ("actor", "prepare", "write", "raylet", "driver")
BUCKET = "skipdecode-soak"
TRIES = 3  # a trial asked for may miss so often, less one


@contextmanager
def store(kind: str, folder: Path) -> Iterator[tuple[str, StorageConfig]]:
    """Where outputs go: URL and storage section."""
    if kind == "local":
        yield str(folder / "outputs"), StorageConfig()
        return
    if kind == "moto":
        os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1")
    with bucket_server.serving() if kind == "moto" else nullcontext(os.environ.get("AWS_ENDPOINT_URL")) as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint)
        if BUCKET not in [one["Name"] for one in client.list_buckets()["Buckets"]]:
            client.create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}", StorageConfig(endpoint_url=endpoint)


def start_ray() -> None:
    ray.shutdown()
    own = {"address": "local", "num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    ray_head.start({**own, "logging_level": logging.ERROR})


def show_ray() -> None:
    """What the Ray of this process knows and did last, after a job that hung or failed."""
    if not ray.is_initialized():
        return
    print(f"  nodes {ray.nodes()}\n  free {ray.available_resources()}", file=sys.stderr)
    logs = Path(ray._private.worker._global_node.get_logs_dir_path(), "ray-data")
    for log in sorted(logs.glob("*.log"), key=os.path.getmtime)[-1:]:
        print("\n".join(f"  {line}" for line in log.read_text().splitlines()[-40:]), file=sys.stderr)


def soak(bench: Bench, fault: str, wanted: int, seed: int, deadline: float) -> list[Trial]:
    """Trials of one fault until `wanted` of them have hit; fewer, but one, if time or tries run out."""
    trials: list[Trial] = []
    with ExitStack() as stack:
        nodes = None
        if fault == "raylet":
            nodes = TwoNodes()
            stack.callback(nodes.close)
        elif fault != "driver" or not bench.undisturbed:
            start_ray()
            stack.callback(ray.shutdown)
        if not bench.undisturbed:
            bench.learn()
        for number in range(TRIES * wanted):
            if sum(trial.hit for trial in trials) == wanted or (trials and time.monotonic() > deadline):
                break
            if nodes is not None:
                trial = nodes.kill_node(bench, seed + number)
            elif fault == "driver":
                trial = kill_driver(bench, seed + number)
            else:
                trial = kill_worker(bench, fault, seed + number)
            trials.append(trial)
            verdict = ("ok" if trial.passed else "FAILED") if trial.hit else "missed"
            print(f"{verdict:7}{json.dumps(asdict(trial))}", flush=True)
            if not trial.passed:
                show_ray()
                if nodes is None and fault != "driver":
                    start_ray()
    return trials


def summary(trials: list[Trial]) -> dict[str, int]:
    hits = [trial for trial in trials if trial.hit]
    return {
        "trials": len(hits),
        "rows lost": sum(trial.lost for trial in hits),
        "rows repeated": sum(trial.repeated for trial in hits),
        "parts identical": sum(trial.identical for trial in hits),
        "recovered by itself": sum(trial.recovered == "itself" for trial in hits),
        "failed": sum(not trial.passed for trial in trials),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30, help="of each fault")
    parser.add_argument("--faults", default="actor,prepare,raylet,driver", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--store", choices=("local", "moto", "s3"), default="local")
    parser.add_argument("--minutes", type=float, default=60, help="after which no trial is begun")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    faults = asked.faults.split(",")
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    if asked.store == "s3" and "AWS_ENDPOINT_URL" not in os.environ:
        parser.error("--store s3: set AWS_ENDPOINT_URL and credentials, as infra/ceph.sh start FOLDER prints them")
    if asked.trials < 1:
        parser.error("--trials: at least 1")
    deadline = time.monotonic() + 60 * asked.minutes
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    with store(asked.store, folder) as (root, storage):
        bench = Bench(folder, root, storage)
        done = {}
        for place, fault in enumerate(faults):
            share = (deadline - time.monotonic()) / (len(faults) - place)
            done[fault] = soak(bench, fault, asked.trials, asked.seed, time.monotonic() + share)
    table = {fault: summary(trials) for fault, trials in done.items()}
    print(f"{'fault':10}" + "".join(f"{name:>21}" for name in summary([])))
    for fault, row in table.items():
        print(f"{fault:10}" + "".join(f"{number:>21}" for number in row.values()))
    failed = any(row["failed"] for row in table.values())
    if failed:
        print(f"outputs and logs are kept: {folder}")
    else:
        shutil.rmtree(folder)
    short = any(row["trials"] < asked.trials for row in table.values())
    print(json.dumps({"store": asked.store, "seed": asked.seed, "passed": not (failed or short), "faults": table}))
    sys.exit(1 if failed or short else 0)


if __name__ == "__main__":
    main()
