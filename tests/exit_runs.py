"""Count how commands of a small job end, beside two busy processes of low priority: statuses, and processes that stay.

    .venv/bin/python tests/exit_runs.py [--run 100] [--plan 20] [--report 20] [--try 20] [--at-once 1]

Prints a line for each command: exit statuses, median seconds, and how many processes of its runs are alive 30 s after
the exit. Exits with 1 if a status is not 0 or a process stays.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).parents[1]
COMMANDS = {"run": 100, "plan": 20, "report": 20, "try": 20}
STAY_SECONDS = 30.0
MOST_SECONDS = 900.0


def main() -> None:
    """Run the commands that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in COMMANDS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--at-once", type=int, default=1, help="commands at the same time")
    counts = vars(parser.parse_args())
    failed = False
    busy = [subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with (
            tempfile.TemporaryDirectory(prefix="exit-runs-") as folder,
            ThreadPoolExecutor(counts["at_once"]) as runs,
            ThreadPoolExecutor(sum(counts.values())) as later,
        ):
            job = write_job(Path(folder))
            for name in COMMANDS:
                places = [Path(folder, f"{name}-{number}") for number in range(counts[name])]
                arguments = [str(job.with_name("run-0") / "out")] if name == "report" else [str(job)]
                ended = list(runs.map(lambda place: run([name, *arguments], place, later), places))  # noqa: B023
                statuses = Counter(status for status, _, _ in ended)
                seconds = statistics.median([seconds for _, seconds, _ in ended] or [0.0])
                staying = sum(stays.result() for _, _, stays in ended)
                failed |= bool(statuses.keys() - {0}) or staying > 0
                print(f"{name}: {dict(statuses)}, {seconds:.1f} s in the median, {staying} processes stay", flush=True)
    finally:
        for process in busy:
            process.kill()
    sys.exit(failed)


def write_job(folder: Path) -> Path:
    """A job of four rows for one actor, whose output is in the folder in which the command runs."""
    pq.write_table(pa.table({"prompt": ["name[Zizzi], food[Thai]"] * 4}), folder / "in.parquet")
    job = {
        "input": {"path": str(folder / "in.parquet")},
        "output": {"path": "out"},
        "model": {"path": str(ROOT / "configs/demo/checkpoint")},
        "schedule": {"agreement_rows": 0},
        "sampling": {"max_new_tokens": 4},
        "actors": {"count": 1},
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def run(arguments: list[str], place: Path, later: ThreadPoolExecutor) -> tuple[int, float, Future[int]]:
    """Exit status and seconds of `skipdecode` in a folder of its own, and the processes that stay, known later."""
    place.mkdir()
    began = time.monotonic()
    with (place / "err").open("w") as err:
        status = subprocess.run(
            [sys.executable, "-m", "pipeline", *arguments],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=err,
            timeout=MOST_SECONDS,
        ).returncode
    if status:
        print(f"{place.name}: status {status}: {(place / 'err').read_text()[-500:]}", flush=True)
    return status, time.monotonic() - began, later.submit(staying_processes, place)


def staying_processes(place: Path) -> int:
    """The living processes in a folder `STAY_SECONDS` from now."""
    time.sleep(STAY_SECONDS)
    found = []
    for process in psutil.process_iter(["cwd", "status", "cmdline"]):
        if process.info["cwd"] == str(place) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info)
    for one in found:
        print(f"{place.name}: stays: {one}", flush=True)
    return len(found)


if __name__ == "__main__":
    main()
