"""The training of `skipdecode adapt` on this device, killed and resumed: random weights of a shape, random pairs.

    python tests/benchmarks/gpu_adapt.py --shape llama-3-8b --steps 50 --out work/gpu/adapt.json

A speed adapter for 2x and 3x, with the settings of `adapt`. The training is killed as soon as it has saved a step, and
the same command goes on. Result: seconds, tokens a second, peak memory, the step where it went on.
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
import torch
from shapes import DEMO, write

from actors.engine.model.loading import inspect
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.learn.speeds import variants
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.run import train

WORDS = ("the", "Eagle", "is", "a", "cheap", "pub", "near", "river", "food", "French", "good", "city", "centre", "area")
PAIRS, DEV, SAVE = 256, 16, 10  # pairs, pairs of the dev set, steps between saved steps


def prepare(given: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoint."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        write(given.shape, folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / "model")


def train_here(given: argparse.Namespace, folder: Path) -> None:
    """Train in this process."""
    tokenizer, chance = load_tokenizer(folder / "model"), random.Random(0)
    pairs = []
    for _ in range(PAIRS + DEV):
        prompt, response = (tokenizer(" ".join(chance.choices(WORDS, k=given.words)))["input_ids"] for _ in range(2))
        pairs.append({"input_ids": [*prompt, *response], "prompt_tokens": len(prompt)})
    spec, layers = ScheduleSpec(speedup=3.0, horizon=given.words, prompt="first"), inspect(folder / "model").num_layers
    schedules = {one.name: one.spec.build(layers) for one in variants(spec, [2, 3])}
    settings = TrainingConfig(max_steps=given.steps, save_steps=SAVE, eval_steps=given.steps)
    recipe = Recipe(spec, schedules, LossConfig(), settings, AdapterConfig(rank=16))
    train(folder / "model", recipe, pairs[DEV:], pairs[:DEV], folder / "adapter")


def run(folder: Path, until: Path | None) -> tuple[int | None, int]:
    """Run the training; kill it once the file `until` exists. Return its exit status and the peak of bytes used."""
    peak, process_env = 0, {**os.environ, "NO_COLOR": "1"}
    with (folder / "log").open("a") as log:
        command = [sys.executable, *sys.argv, "--train"]
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
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.out.with_suffix("")
    if given.train:
        train_here(given, folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prepare(given, folder)
    killed, first_peak = run(folder, folder / "adapter" / "_training" / "state.pt")
    began = time.perf_counter()
    status, peak = run(folder, None)
    if status or killed != -signal.SIGKILL:
        sys.exit(f"exit statuses {killed} and {status}:\n" + (folder / "log").read_text()[-3000:])
    record: dict[str, Any] = json.loads((folder / "adapter" / "tune.json").read_text())
    steps = record["steps"] - record["resumed_at_step"]
    tokens = steps * record["training"]["batch_size"] * 2 * given.words  # a word has about one token
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
