"""What the pipeline around the engine can do, and what it asks of driver, object store and planning.

    .venv/bin/python tests/benchmarks/scale.py [million|shards|nodes|plan|text ...] [--rows 1000000]
        [--files 200] [--shards 3000] [--node-shards 240] [--plan-shards 250000] [--text-mib 160]

million: short prompts through whole jobs with an engine that answers at once. shards: as many shards of one row
each, for what a shard costs the driver. nodes: one node of two actors against two, with an engine that sleeps.
plan: the read tasks of a job as large as 10^9 rows, which are made and put into the store but not run.
text: the plan's pass over JSON Lines and CSV, two files of each kind and length of row.
Each runs in a process of its own, on a Ray with the settings of `skipdecode run`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # before tests/, which has a folder of the package's name
sys.path += [str(ROOT / "tests"), str(ROOT / "configs/demo")]
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests/benchmarks'}"  # of Ray's workers: their hook runs before all else
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as the command line sets them
os.environ.setdefault("RAY_AUTH_MODE", "token")

import grpc  # noqa: E402
import psutil  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
from fake_engine import StartingLine, hook  # noqa: E402
from ray._private.internal_api import get_memory_info_reply  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tiny_checkpoint import tiny_checkpoint  # noqa: E402

from pipeline import job  # noqa: E402
from pipeline.config.job import JobConfig  # noqa: E402
from pipeline.input.files import InputFile, list_files  # noqa: E402
from pipeline.input.shards import cut_shards  # noqa: E402
from pipeline.plan.manifest import read_footers  # noqa: E402
from pipeline.run.ray_data import TASK_BYTES, TASK_ROWS, ShardSource, _prepared  # noqa: E402
from pipeline.run.ray_session import OBJECT_STORE_BYTES, ray_session  # noqa: E402

NODE_ACTORS = 2
NODE_SECONDS = 1.0  # that the sleeping engine takes for a shard
NODE_ROWS = 50  # a shard
WATCH_SECONDS = 1.0
MIB = 2**20
KINDS = {"raylet": "raylet", "gcs_server": "gcs"}
PLACES = ("Alimentum", "The Eagle", "Zizzi", "The Cricketers", "Cotto", "Browns Cambridge")


@dataclass
class Sample:
    """At `at` (s since 1970): bytes of the driver, of the store in use and spilled; CPU seconds so far by kind."""

    at: float
    driver: int
    store: int
    spilled: int
    cpu: Counter[str]


class Watch:
    """What a run asks of its driver and of Ray's object store, looked at once a second from a thread of the driver."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._cpu: dict[tuple[str, int], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def store(self) -> dict[str, float]:
        """The most that was in the store, and spilled, in MiB."""
        return {
            "store_mib_peak": round(max(one.store for one in self.samples) / MIB, 1),
            "spilled_mib": round(max(one.spilled for one in self.samples) / MIB, 1),
        }

    def _look(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            driver = psutil.Process().memory_info().rss
            self.samples.append(Sample(time.time(), driver, *self._store(), self._spent()))

    def _store(self) -> tuple[int, int]:
        if not ray.is_initialized():
            return 0, 0
        try:
            stats = get_memory_info_reply(ray._private.state.state).store_stats
        except (grpc.RpcError, ray.exceptions.RayError, AssertionError, ValueError):
            return 0, 0  # Ray is on its way up or down
        return stats.object_store_bytes_used, stats.spilled_bytes_total

    def _spent(self) -> Counter[str]:
        """CPU seconds of the driver and of all its descendants, those that have ended too."""
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with suppress(psutil.Error):
                kind = "driver" if process.pid == os.getpid() else KINDS.get(process.name(), "workers")
                self._cpu[kind, process.pid] = sum(process.cpu_times()[:2])
        spent = Counter[str]()
        for (kind, _), seconds in self._cpu.items():
            spent[kind] += seconds
        return spent


def write_inputs(folder: Path, rows: int, files: int) -> Path:
    """Seeded short prompts with an id, in `files` Parquet files of equal size."""
    folder.mkdir()
    draw = random.Random(17)
    each = rows // files
    for number in range(files):
        ids = range(number * each, (number + 1) * each)
        prompts = [f"name[{draw.choice(PLACES)}], area[{draw.randrange(1000)}]" for _ in ids]
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "prompt": prompts}), folder / f"{number:05d}.parquet")
    return folder


def config(folder: Path, actors: dict[str, Any], **more: Any) -> JobConfig:
    """The job of a folder with inputs and checkpoint; its output goes to the same folder."""
    values = {
        "input": {"path": str(folder / "inputs"), "id": "id"},
        "output": {"path": str(folder / "answers")},
        "model": {"path": str(folder / "checkpoint"), "dtype": "float32"},
        "sampling": {"max_new_tokens": 8},
        "actors": actors,
        **more,
    }
    return JobConfig.model_validate(values)


def run_job(one: JobConfig, cpus: int | None = None) -> dict[str, Any]:
    """Run a job with the fake engine and tell what it came to, on the caller's Ray if there is one.

    steady: from the first shard's start to the last one's end. flowing: from the end of a tenth of all shards on.
    """
    began = time.time()
    with Watch() as watch:
        if not ray.is_initialized():
            ray.init(
                address="local",
                num_cpus=cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"worker_process_setup_hook": hook(0.0)},
            )
        outcome = job.run(one)
    seconds = time.time() - began
    stats = pq.read_table(Path(one.output.path, "_job/stats.pq"))
    rows, shards = outcome.totals.rows, outcome.totals.shards
    ends = sorted(stats["finished"].to_pylist())
    flowing = ends[len(ends) // 10 :]  # by then all workers of all stages have started
    first = pc.min(stats["started"]).as_py()
    seen = [one for one in watch.samples if first - WATCH_SECONDS <= one.at <= ends[-1] + WATCH_SECONDS]
    assert seen, "the job ended before it was looked at: take more rows"
    spent = {kind: round(last - seen[0].cpu[kind], 1) for kind, last in seen[-1].cpu.items()}
    grown = seen[-1].driver - seen[len(seen) // 4].driver
    assert outcome.totals.errors == 0 and outcome.totals.answers == rows
    return {
        "rows": rows,
        "shards": shards,
        "seconds": round(seconds, 1),
        "rows_per_second": round(rows / seconds, 1),
        "flowing_rows_per_second": round(rows / shards * (len(flowing) - 1) / (flowing[-1] - flowing[0]), 1),
        "driver_mib_start": round(watch.samples[0].driver / MIB),
        "driver_mib_end": round(seen[-1].driver / MIB),
        "driver_bytes_a_shard": round(grown / (0.75 * shards)),
        "driver_cpu_ms_a_shard": round(1e3 * spent["driver"] / shards, 2),
        "cpu_seconds": spent,
        **watch.store(),
    }


def million(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`--rows` short prompts in `--files` files, one actor."""
    write_inputs(folder / "inputs", options.rows, options.files)
    return run_job(config(folder, {"count": 1}), max(2, os.cpu_count() or 1))


def shards(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """`--shards` shards of one row each: what a shard costs, whatever is in it. CPUs are pretended, so that it is
    not the number of slots that holds the driver back; a driver's round of 0.1 s gives an actor two shards."""
    write_inputs(folder / "inputs", options.shards, max(1, options.shards // 500))
    return run_job(config(folder, {"count": 4}, shard_rows=1), cpus=8)


def nodes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """As many shards for one node as for two, each with as many actors on GPUs that are pretended; they start
    together, so that the start-up of processes on this machine's cores is not what is compared."""
    write_inputs(folder / "inputs", options.node_shards * NODE_ROWS, 4)
    found: dict[str, Any] = {}
    for count in (1, 2):
        line = StartingLine(folder / f"line-{count}", NODE_ACTORS * count)
        line.folder.mkdir()
        node = {"num_cpus": 4, "num_gpus": NODE_ACTORS, "object_store_memory": OBJECT_STORE_BYTES // 2}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            for _ in range(count - 1):
                cluster.add_node(**node)
            ray.init(
                address=cluster.address,
                runtime_env={"worker_process_setup_hook": hook(NODE_SECONDS / NODE_ROWS, line)},
                log_to_driver=False,
            )
            actors, output = {"count": NODE_ACTORS * count, "gpus": 1}, {"path": str(folder / f"on-{count}")}
            found[f"on_{count}"] = run_job(config(folder, actors, shard_rows=NODE_ROWS, output=output))
        finally:
            ray.shutdown()
            cluster.shutdown()
    on_2, on_1 = (found[name]["flowing_rows_per_second"] for name in ("on_2", "on_1"))
    return {**found, "ratio_flowing_rows_per_second": round(on_2 / on_1, 3)}


def plan(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Read tasks of `--plan-shards` shards of 4,000 rows, in files of 1,000,000 rows and groups of 100,000."""
    process = psutil.Process()
    before = process.memory_info().rss
    rows = options.plan_shards * 4_000
    files = [
        InputFile(f"s3://bucket/prompts/{number:06d}.parquet", 10**8, "0" * 32, (100_000,) * 10, (10**7,) * 10)
        for number in range(max(1, rows // 1_000_000))
    ]
    began = time.perf_counter()
    listed = cut_shards(files, 4_000, 64 * MIB)
    source = ShardSource(partial(_prepared, cast(Any, None), "out"), listed, files, TASK_ROWS, TASK_BYTES)
    tasks = source.get_read_tasks(-1)
    figures = {
        "rows": rows,
        "files": len(files),
        "shards": len(listed),
        "read_tasks": len(tasks),
        "plan_seconds": round(time.perf_counter() - began, 2),
        "plan_mib": round((process.memory_info().rss - before) / MIB),
    }
    with Watch() as watch, ray_session(config(folder, {"count": 1}).actors, False):
        began = time.perf_counter()
        held = [ray.put(task) for task in tasks]  # as Ray Data does before it runs the first
        figures["put_seconds"] = round(time.perf_counter() - began, 2)
        time.sleep(3)
        assert held
    return {**figures, **watch.store()}


def text(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Rows of about 100 and 2,000 bytes, a quarter of them with commas, one in 20 with a line end and quotes."""
    draw = random.Random(17)
    found: dict[str, Any] = {}
    for size in (100, 2_000):
        rows = []
        for number in range(2 * MIB // size):
            words = draw.choices([place.lower() for place in PLACES], k=size // 12)
            words[1:2] = [", "] if number % 4 == 0 else ['\n"'] if number % 20 == 1 else []
            rows.append({"id": number, "prompt": " ".join(words), "heat": number / 2})
        csv_text = io.StringIO(newline="")
        writer = csv.DictWriter(csv_text, list(rows[0]), lineterminator="\n")
        writer.writerows(rows)
        json_text = "".join(json.dumps(row) + "\n" for row in rows)
        for kind, header, block in (("jsonl", "", json_text), ("csv", "id,prompt,heat\n", csv_text.getvalue())):
            inputs = folder / f"{kind}-{size}"
            inputs.mkdir()
            for number in range(2):
                (inputs / f"{number}.{kind}").write_text(header + block * (options.text_mib * MIB // len(block)))
            one = config(folder, {"count": 2}, input={"path": str(inputs), "id": "id", "format": kind})
            began, used = time.perf_counter(), time.process_time()
            files, _ = read_footers(one, list_files(one.input.path, one.storage, one.input.format))
            took, used = time.perf_counter() - began, time.process_time() - used
            count = sum(file.rows for file in files)
            found[f"{kind}_{size}"] = {
                "rows": count,
                "mib": round(sum(file.size for file in files) / MIB),
                "rows_per_second": round(count / took),
                "rows_per_cpu_second": round(count / used),
            }
    return found


MODES = {"million": million, "shards": shards, "nodes": nodes, "plan": plan, "text": text}
SIZES = {"rows": 1_000_000, "files": 200, "shards": 3_000, "node-shards": 240, "plan-shards": 250_000, "text-mib": 160}


def main() -> None:
    """Each mode in a process of its own, for clean figures of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", choices=[*MODES, []], default=[])
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    modes = options.modes or list(MODES)
    if len(modes) == 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with tempfile.TemporaryDirectory(prefix="scale-") as name:
            tiny_checkpoint(Path(name) / "checkpoint")
            print(json.dumps({modes[0]: MODES[modes[0]](options, Path(name))}))
        return
    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "ray": ray.__version__}
    given = [word for word in sys.argv[1:] if word not in MODES]
    failed = False
    for mode in modes:
        print(f"{mode} ...", file=sys.stderr, flush=True)
        done = subprocess.run([sys.executable, __file__, mode, *given], stdout=subprocess.PIPE, text=True)
        failed |= done.returncode != 0
        if done.returncode == 0:
            found |= json.loads(done.stdout.splitlines()[-1])
            print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    print(json.dumps(found))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
