"""Train the demo's checkpoint, in five parts, or a dense model to compare it with.

    for part in full-depth any-speed copy copy-2 prompts; do python configs/demo/train.py $part; done

full-depth: a new model on E2E, every token at full depth. any-speed: from there to any speed between 1x and 5x. copy:
copying of values, on pairs whose values were replaced at random, which `tests/benchmarks/demo_pairs.py` writes.
copy-2: more of the same, on other pairs (`demo_pairs.py --seed 5 --pairs 24000 --replaced 0.5 --out
work/demo-copy/pairs-2.parquet`). prompts: prompts may run the layers of token 0 alone, at a falling and at a constant
depth, on pairs of the same kind (`--seed 6 --pairs 80000 --replaced 0.5 --out work/demo-prompts/pairs.parquet`).
dense-7, dense-5: as deep as 3x and 5x run on average, with as many steps and more.
The same command goes on after a kill. With --steps: training steps, to try the command.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from new_model import make_model

from actors.engine.model.loading import inspect
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.config.adapt import LossConfig, TrainingConfig
from pipeline.learn.speeds import UNIFORM, variants
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.run import train

DATA, WORK = Path("../shared/data/e2e"), Path("work")  # E2E: tests/benchmarks/fetch_data.py
LOSS = LossConfig(references=1.0, distillation=0.0, label_smoothing=0.05)
MAX_TOKENS = 256
ALL_SPEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Part:
    """A training.

    layers: number of layers of the new model to start from; 0: start is the result of an earlier part. schedule: keys
    that differ from those of the model to start from. further: keys of more schedules to train, see `variants`.
    """

    start: str
    output: str
    training: dict[str, Any]
    layers: int = 0
    pairs: Path = DATA / "train.parquet"
    speedups: tuple[float, ...] = ALL_SPEEDS
    default: float = 3  # speed of jobs that set none
    schedule: Mapping[str, Any] = field(default_factory=dict)
    further: tuple[Mapping[str, Any], ...] = ()
    dev_rows: int = 256


DENSE = {"max_steps": 3000, "learning_rate": 0.002, "warmup_steps": 100, "seed": 1, "eval_steps": 1000}
PARTS = {
    "full-depth": Part(
        "demo-new",
        "demo-full-depth",
        {"epochs": 1.5, "learning_rate": 0.002, "warmup_steps": 100, "seed": 1, "threads": 1},
        layers=24,
        speedups=(1,),
        default=1,
    ),
    "any-speed": Part(
        "demo-full-depth",
        "demo-any-speed",
        {"epochs": 1.25, "learning_rate": 0.0015, "warmup_steps": 50, "seed": 2},
    ),
    "copy": Part(
        "demo-any-speed",
        "demo-copy/model",
        {"epochs": 1, "learning_rate": 0.001, "warmup_steps": 50, "seed": 4},
        pairs=WORK / "demo-copy/pairs.parquet",
    ),
    "copy-2": Part(
        "demo-copy/model",
        "demo-copy/model-2",
        {"epochs": 1, "learning_rate": 0.0007, "warmup_steps": 20, "seed": 5},
        pairs=WORK / "demo-copy/pairs-2.parquet",
    ),
    # of the speeds above 1x, two of three steps train one whose prompts run few layers
    "prompts": Part(
        "demo-copy/model-2",
        "demo-prompts/model",
        {"max_steps": 450, "learning_rate": 0.001, "warmup_steps": 50, "seed": 6, "speeds_per_step": 2},
        pairs=WORK / "demo-prompts/pairs.parquet",
        schedule={"prompt": "first"},
        further=({"prompt": "full"}, UNIFORM),
        dev_rows=96,  # for each of 13 schedules
    ),
    **{
        f"dense-{layers}": Part(
            f"evidence/new/dense-{layers}",
            f"evidence/dense-{layers}",
            {**DENSE, "threads": 1},
            layers=layers,
            speedups=(1,),
            default=1,
        )
        for layers in (7, 5)
    },
}


def read_pairs(start: Path, file: Path, column: str) -> list[dict[str, Any]]:
    """Return the pairs of a file, one for each reference of a row, without those that are too long."""
    tokenizer, pairs = load_tokenizer(start), list[dict[str, Any]]()
    for row in pq.read_table(file, columns=["prompt", column]).to_pylist():
        for text in row[column] if isinstance(row[column], list) else [row[column]]:
            prompt = tokenizer(row["prompt"])["input_ids"]
            response = tokenizer(" ".join(text.split()), add_special_tokens=False)["input_ids"]
            pairs.append({"input_ids": [*prompt, *response, tokenizer.eos_token_id], "prompt_tokens": len(prompt)})
    return [pair for pair in pairs if len(pair["input_ids"]) <= MAX_TOKENS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    part = PARTS[options.part]
    start, output = WORK / part.start, WORK / part.output
    if part.layers and not (start / "tokenizer.json").is_file():
        make_model(start, DATA / "train.parquet", layers=part.layers)
    pairs, dev = read_pairs(start, part.pairs, "reference"), read_pairs(start, DATA / "dev.parquet", "references")
    found = inspect(start)
    horizon = max(2, int(statistics.median(len(pair["input_ids"]) - pair["prompt_tokens"] for pair in pairs)))
    spec = (found.spec or ScheduleSpec()).overridden(
        {**part.schedule, "speedup": float(part.default), "horizon": horizon}
    )
    trained = variants(spec, part.speedups, part.further)
    schedules = {one.name: one.spec.build(found.num_layers) for one in trained}
    # one speed for each step, and a larger batch than for an adapter
    settings = {"batch_size": 48, "speeds_per_step": 1, "eval_steps": 200, "save_steps": 200, **part.training}
    settings |= {} if options.steps is None else {"max_steps": options.steps}
    recipe = Recipe(spec, schedules, LOSS, TrainingConfig.model_validate(settings))
    dev = [dev[row * len(dev) // part.dev_rows] for row in range(part.dev_rows)]
    record = train(start, recipe, pairs, dev, output)
    print(f"{output}: {record['steps']} steps, dev loss {record['dev_loss']}")


if __name__ == "__main__":
    main()
