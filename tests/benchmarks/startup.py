"""How long a user waits: for `skipdecode --help`, and for the first answers of `make demo`'s job; and what a job costs.

    .venv/bin/python tests/benchmarks/startup.py [--runs 3] [--set actors.count=1] [--processor]

The demo's job goes into a fresh folder; its prompts are written before it, timed apart. What a job has come to is
read off its output folder, every 20 ms: planned (`_job/job.json` is there), a first shard in preparation, a first
shard at an actor whose model is loaded (their markers in `_job/quarantine`). The first batch has no time of
its own: it is taken to end where the earliest shard began, plus that shard's seconds over its batches. Medians; a
first run, which finds no file in memory, is not told apart. The last line is one JSON object.

--processor: only the processor seconds of the demo's job, generation included, by process, of each run. They hardly
depend on other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq
from process_seconds import ProcessSeconds

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "pipeline"]  # what `skipdecode` runs
POLL_SECONDS = 0.02
EVENTS = {
    "planned": "_job/job.json",
    "first shard in preparation": "_job/quarantine/*.prepare.json",
    "a model loaded, first shard begun": "_job/quarantine/*.generate.json",
}
FIRST = "first batch answered"
GENERATION = "of them generation, on the clock"


def seconds_of(*arguments: str) -> float:
    """Of a command that must succeed."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - began


def demo_command(folder: Path, changes: list[str]) -> list[str]:
    """The demo's job over `folder`/prompts, answers to `folder`/answers."""
    values = [f"output.path={folder / 'answers'}", f"input.path={folder / 'prompts'}", *changes]
    return [*COMMAND, "run", str(ROOT / "configs/demo.yaml"), *(one for value in values for one in ("--set", value))]


def processor(folder: Path, changes: list[str], limit: int | None) -> dict[str, tuple[int, float]]:
    """Processes and their processor seconds in the demo's job, by part, and the actors' seconds with rows."""
    seconds = ProcessSeconds()
    with (folder / "log").open("w") as log:
        command = demo_command(folder, changes) + ([] if limit is None else ["--limit", str(limit)])
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=seconds.environment)
        while process.poll() is None:
            seconds.poll()
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit((folder / "log").read_text())
    shards = pq.read_table(folder / "answers/_job/stats.parquet")
    answered = sum(sum(shards[name].to_pylist()) for name in ("prefill_seconds", "decode_seconds"))
    return {**seconds.by_part(), GENERATION: (0, answered)}


def print_processor(runs: list[dict[str, tuple[int, float]]]) -> None:
    """A table of the runs, and one JSON object."""
    parts = sorted(
        {part for run in runs for part in run} - {GENERATION}, key=lambda part: -runs[0].get(part, (0, 0))[1]
    )
    for part in [*parts, GENERATION]:
        each = [run.get(part, (0, 0.0)) for run in runs]
        print(f"  {statistics.median(one[1] for one in each):6.1f} s  {each[0][0] or ''} {part}")
    totals = [sum(seconds for part, (_, seconds) in run.items() if part != GENERATION) for run in runs]
    print(f"  {statistics.median(totals):6.1f} s  in all  ({min(totals):.1f} to {max(totals):.1f})")
    print(json.dumps({"totals": totals, "runs": runs}))


def demo(folder: Path, changes: list[str]) -> dict[str, float]:
    """Seconds from the start of the demo's job to each event, and to its end."""
    output, command = folder / "answers", demo_command(folder, changes)
    seen: dict[str, float] = {}
    with (folder / "log").open("w") as log:
        began = time.time()
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        while process.poll() is None:
            for name, pattern in EVENTS.items():
                if name not in seen and any(output.glob(pattern)):
                    seen[name] = time.time() - began
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise SystemExit((folder / "log").read_text())
    end = time.time() - began
    shards = pq.read_table(output / "_job/stats.parquet").to_pylist()
    first = min(shards, key=lambda shard: shard["started"])
    seen[FIRST] = first["started"] - began + first["generate_seconds"] / first["batches"]
    return {**seen, "job ended": end}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--limit", type=int, help="rows of the job whose processor seconds are measured")
    given = parser.parse_args()
    if given.processor:
        costs = []
        for _ in range(given.runs):
            with tempfile.TemporaryDirectory() as folder:
                seconds_of("-m", "pipeline.demo_data", f"{folder}/prompts")
                costs.append(processor(Path(folder), given.changes, given.limit))
        print_processor(costs)
        return
    help_seconds = statistics.median(seconds_of("-m", "pipeline", "--help") for _ in range(5))
    imports = statistics.median(seconds_of("-c", "import pipeline.job") for _ in range(given.runs))
    writing, runs = [], []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as folder:
            writing.append(seconds_of("-m", "pipeline.demo_data", f"{folder}/prompts"))
            runs.append(demo(Path(folder), given.changes))
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(f"{os.cpu_count()} cores; medians of {given.runs}, of 5 for --help\nskipdecode --help {help_seconds:.2f} s")
    print(f"writing the demo's prompts {statistics.median(writing):.1f} s; importing the job's modules {imports:.1f} s")
    print("the demo's job, from its start:")
    for name, seconds in found.items():
        each = [run[name] for run in runs]
        print(f"  {seconds:6.1f} s  {name}  ({min(each):.1f} to {max(each):.1f})")
    print(json.dumps({"help": help_seconds, "prompts": statistics.median(writing), "imports": imports, **found}))


if __name__ == "__main__":
    main()
