"""A training step of a speed adapter by one thread, two threads and two processes: seconds and memory.

    .venv/bin/python tests/benchmarks/training_processes.py [--pairs work/real/text/adapt/train.parquet] [--batch 16]

The model of `make real-model`, a speed adapter of rank 8 at 1.5x, 2x and 3x, which every step trains all, on the pairs
that `skipdecode adapt` has left; each pair is new, so that its teacher's distribution is computed too. The command
`skipdecode tune` runs with FEW steps and with MANY; seconds of a step are the difference over that of the steps, so
that start-up and evaluation do not count. Memory: the most of the proportional set sizes of the command and its
processes together, read twice a second. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

FEW, MANY = 2, 8
ADAPTER = Path("configs/real/speed-adapter")
WAYS: dict[str, dict[str, object]] = {
    "one thread": {"training.threads": 1},
    "two threads": {"training.threads": 2},
    "two processes": {"workers": json.dumps({"count": 2})},
}


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path, default=Path("work/real/text/adapt/train.parquet"))
    parser.add_argument("--model", type=Path, default=Path("work/real/model"))
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for way, keys in WAYS.items():
        taken = [command(arguments, steps, keys) for steps in (FEW, MANY)]
        seconds = (taken[1][0] - taken[0][0]) / (MANY - FEW)
        found[way] = {"seconds": seconds, "gigabytes": max(peak for _, peak in taken)}
        print(f"{way}: {seconds:.2f} s a step, {found[way]['gigabytes']:.1f} GB at most", flush=True)
    print(json.dumps(found))


def command(arguments: argparse.Namespace, steps: int, keys: dict[str, object]) -> tuple[float, float]:
    """Seconds of a whole training of so many steps, and the most gigabytes of its processes together."""
    order = json.loads((ADAPTER / "skipdecode.json").read_text())["keep_order"]
    with tempfile.TemporaryDirectory() as folder:
        recipe = {
            "model": {"path": str(arguments.model)},
            "data": {
                "train": str(arguments.pairs),
                "dev": str(arguments.pairs),
                "dev_rows": 2,
                "train_reference": "response",
                "dev_reference": "response",
                "ended": "ended",
            },
            "output": f"{folder}/adapter",
            "schedule": {"speedups": [1.5, 2, 3], "keep_order": order, "warmup": 1, "prompt": "first"},
            "loss": {"references": 0, "distillation": 1},
            "adapter": {"rank": 8},
            "training": {"max_steps": steps, "batch_size": arguments.batch, "speeds_per_step": 3, "eval_steps": 1000},
        }
        file = Path(folder) / "tune.yaml"
        file.write_text(json.dumps(recipe))  # JSON is YAML
        changes = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        began, peak = time.perf_counter(), 0
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "tune", str(file), *changes],
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.5)
        if process.returncode:
            sys.exit(process.returncode)
        return time.perf_counter() - began, peak / 1e9


def memory(pid: int) -> int:
    """Proportional set sizes of a process and its children, bytes."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.NoSuchProcess:  # one has ended meanwhile
        pass
    return total


if __name__ == "__main__":
    main()
