"""What an adapter learns more from: full depth's answers, or its own answers, with full depth's distributions on both.

    .venv/bin/python tests/benchmarks/on_policy.py [--rows 1600] [--steps 100] [--threads 1]

On-policy distillation (Agarwal et al. 2024, arXiv 2306.13649), in one round: the adapter `--start` answers the first
prompts of `--pairs`, a third of them at each speed; then it is trained further on these answers, and another time on
full depth's answers to the same prompts, for as many steps. Writes FOLDER/own and FOLDER/full-depth, each a speed
adapter, and prints the token KL of each at each speed on held-out answers of full depth, nats. What is there already is
not repeated.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from real_data import MODEL
from real_model import ADAPTER

from actors.answers import Prompt
from actors.engine.library.divergence import Model, teacher_forced
from actors.engine.model.loading import inspect, load_decoder, with_adapter
from actors.engine.model.speed_adapter import merge
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator
from pipeline.config.tune import TuneConfig
from pipeline.learn.tune.run import tune

SPEEDS = (1.5, 2.0, 3.0)
LEARNING_RATE = 3e-4  # a third of that of a new adapter


def main() -> None:
    """Command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=Path, default=Path("work/real/text/adapt"), help="folder of `skipdecode adapt`")
    parser.add_argument("--start", type=Path, default=ADAPTER, help="speed adapter")
    parser.add_argument("--folder", type=Path, default=Path("work/real/text/on-policy"))
    parser.add_argument("--rows", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    asked.folder.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(asked.pairs / "train.parquet").slice(0, asked.rows).to_pylist()
    answers = {"full-depth": asked.folder / "full-depth.parquet", "own": asked.folder / "own.parquet"}
    pq.write_table(pa.Table.from_pylist(rows), answers["full-depth"])
    if not answers["own"].is_file():
        began = time.process_time()
        pq.write_table(pa.Table.from_pylist(_own_answers(asked, rows)), answers["own"])
        print(f"{len(rows)} answers: {time.process_time() - began:.0f} s of the processor", flush=True)
    _print("start", asked, asked.start)
    for name, path in answers.items():
        began = time.process_time()
        tune(_recipe(asked, path, asked.folder / name))
        print(f"{name}: {time.process_time() - began:.0f} s of the processor", flush=True)
        _print(name, asked, asked.folder / name)


def _own_answers(asked: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answered = []
    for number, speed in enumerate(SPEEDS):
        some = rows[number :: len(SPEEDS)]
        generator = Generator(
            str(MODEL),
            schedule={"speedup": speed},
            sampling={"max_new_tokens": asked.new_tokens},
            dtype="bfloat16",
            speed_adapter=str(asked.start),
        )
        prompts = [Prompt(tuple(row["prompt"]), "own", place) for place, row in enumerate(some)]
        for row, answer in zip(some, generator.answer(prompts), strict=True):
            tokens, ended = list(answer.token_ids or ()), answer.finish_reason == "stop"
            if response := tokens[:-1] if ended else tokens:
                answered.append({"prompt": row["prompt"], "response": response, "ended": ended})
    return answered


def _recipe(asked: argparse.Namespace, answers: Path, output: Path) -> TuneConfig:
    return TuneConfig.model_validate(
        {
            "model": {"path": str(MODEL)},
            "data": {
                "train": str(answers),
                "dev": str(asked.pairs / "held-out.parquet"),
                "train_reference": "response",
                "dev_reference": "response",
                "ended": "ended",
                "max_tokens": 2048,
                "dev_rows": 2,  # scored below
            },
            "output": str(output),
            "schedule": {"speedups": list(SPEEDS), "horizon": with_adapter(inspect(MODEL), asked.start).spec.horizon},
            "loss": {"references": 0.0, "distillation": 1.0},
            "adapter": {"start": str(asked.start)},
            "training": {
                "max_steps": asked.steps,
                "batch_size": 16,
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 5,
                "micro_batch_tokens": 2600,
                "eval_steps": 10**6,
                "save_steps": 25,
                "threads": asked.threads,
            },
        }
    )


def _print(name: str, asked: argparse.Namespace, adapter: Path) -> None:
    """Token KL from full depth at each speed."""
    base, fast = (load_decoder(MODEL, torch.bfloat16, torch.device("cpu")) for _ in range(2))
    found = with_adapter(inspect(MODEL), adapter)
    assert found.adapter is not None
    merge(fast.model, found.adapter)
    rows = pq.read_table(asked.pairs / "held-out.parquet").to_pylist()
    pairs = [(row["prompt"], row["response"]) for row in rows]
    lines = [Model(fast, found.schedule({"speedup": speed})) for speed in SPEEDS]
    scores = teacher_forced(Model(base, ScheduleSpec().build(base.num_layers)), lines, pairs)
    of_speeds = (
        f"{float(score.kl.sum() / score.tokens.sum()):.3f} at {speed:g}x"
        for speed, score in zip(SPEEDS, scores, strict=True)
    )
    print(f"{name}: token KL {', '.join(of_speeds)}", flush=True)


if __name__ == "__main__":
    main()
