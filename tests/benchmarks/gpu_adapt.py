"""The training of `skipdecode adapt` on this device, killed and resumed: random weights of a shape, random pairs.

    python tests/benchmarks/gpu_adapt.py --shape llama-3-8b --steps 50 --out work/gpu/adapt.json

A speed adapter for 2x and 3x, by `skipdecode tune` with the recipe of `adapt`. The training is killed as soon as it has
saved a step, and the same command goes on. Result: seconds, tokens a second, peak memory, the step where it went on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from shapes import DEMO, write

from pipeline.config.adapt import LOSS, TRAINING

WORDS = ("the", "Eagle", "is", "a", "cheap", "pub", "near", "river", "food", "French", "good", "city", "centre", "area")
PAIRS, DEV, SAVE = 256, 16, 10  # pairs, pairs of the dev set, steps between saved steps


def prepare(given: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoint, the pairs and the recipe."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        write(given.shape, folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / "model")
    chance = random.Random(0)
    for name, count in (("train", PAIRS), ("dev", DEV)):
        pairs = [[" ".join(chance.choices(WORDS, k=given.words)) for _ in range(2)] for _ in range(count)]
        prompts, responses = zip(*pairs, strict=True)
        pq.write_table(pa.table({"prompt": prompts, "response": responses}), folder / f"{name}.parquet")
    recipe = {
        "model": {"path": str(folder / "model")},
        "data": {
            **{name: str(folder / f"{name}.parquet") for name in ("train", "dev")},
            **{"train_reference": "response", "dev_reference": "response", "dev_rows": DEV, "max_tokens": 2048},
        },
        "output": str(folder / "adapter"),
        "schedule": {"speedups": [2, 3], "prompt": "first"},
        "loss": LOSS,
        "adapter": {"rank": 16},
        "training": {**TRAINING, "max_steps": given.steps, "save_steps": SAVE, "eval_steps": given.steps},
    }
    (folder / "tune.yaml").write_text(yaml.safe_dump(recipe))


def train(folder: Path, until: Path | None) -> tuple[int | None, int]:
    """Run the training; kill it once the file `until` exists. Return its exit status and the peak of bytes used."""
    peak, process_env = 0, {**os.environ, "NO_COLOR": "1"}
    with (folder / "log").open("a") as log:
        command = [sys.executable, "-m", "pipeline", "tune", str(folder / "tune.yaml")]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=process_env, start_new_session=True)
        while process.poll() is None:
            peak = max(peak, used_bytes(process.pid))
            if until is not None and until.exists():
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.2)
    return process.returncode, peak


def used_bytes(process: int) -> int:
    """Return the bytes that all processes use on the GPU, or on a CPU those of one process."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--words", type=int, default=128, help="of a prompt, and of a response")
    parser.add_argument("--out", type=Path, default=Path("work/gpu/adapt.json"))
    given = parser.parse_args()
    folder = given.out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prepare(given, folder)
    killed, first_peak = train(folder, folder / "adapter" / "_training" / "state.pt")
    began = time.perf_counter()
    status, peak = train(folder, None)
    if status or killed != -signal.SIGKILL:
        sys.exit(f"exit statuses {killed} and {status}:\n" + (folder / "log").read_text()[-3000:])
    record: dict[str, Any] = json.loads((folder / "adapter" / "tune.json").read_text())
    steps = record["steps"] - record["resumed_at_step"]
    tokens = steps * record["config"]["training"]["batch_size"] * 2 * given.words  # a word has about one token
    result = {
        "command": ["python", *sys.argv],
        "seconds": time.perf_counter() - began,
        "training_seconds": record["seconds"],
        "resumed_at_step": record["resumed_at_step"],
        "steps": record["steps"],
        "tokens_per_second": tokens / record["seconds"],
        "peak_bytes": max(first_peak, peak),
        "dev_losses": record["dev_losses"],
    }
    assert result["resumed_at_step"] > 0, "the second training did not go on from a saved step"
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
