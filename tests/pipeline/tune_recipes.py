"""A small training, and a call that runs it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from new_model import save_model, train_tokenizer

from pipeline.config.tune import TuneConfig
from pipeline.learn.tune.run import tune


def copying_recipe(folder: Path) -> dict[str, Any]:
    """A copying task that a tiny model learns something of in a few steps."""
    rng = random.Random(3)
    words = ["red", "green", "blue", "round", "square", "small"]
    rows = [" ".join(rng.choices(words, k=3)) for _ in range(64)]
    pq.write_table(pa.table({"prompt": rows, "reference": rows}), folder / "train.parquet")
    pq.write_table(
        pa.table({"prompt": rows[:8], "references": [[row, row] for row in rows[:8]]}), folder / "dev.parquet"
    )
    save_model(
        folder / "start",
        train_tokenizer([*sorted(set(rows)), *rows], vocab_size=300),
        seed=0,
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return {
        "model": {"path": str(folder / "start")},
        "data": {"train": str(folder / "train.parquet"), "dev": str(folder / "dev.parquet")},
        "output": str(folder / "out"),
        "schedule": {"speedups": [1, 2]},
        "training": {
            "max_steps": 12,
            "batch_size": 16,
            "learning_rate": 0.01,
            "warmup_steps": 2,
            "eval_steps": 6,
            "save_steps": 6,
            "threads": 1,
        },
    }


def train_recipe(recipe: dict[str, Any], **training: Any) -> dict[str, Any]:
    """The record of a training, with these keys of its section changed."""
    values = {**recipe, "training": {**recipe["training"], **training}}
    output = tune(TuneConfig.model_validate(values))
    return json.loads((output / "tune.json").read_text())  # type: ignore[no-any-return]
