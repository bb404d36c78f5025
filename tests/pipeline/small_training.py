"""A small training, and a call that runs it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from new_model import save_model, train_tokenizer
from transformers import PreTrainedTokenizerBase

from actors.engine.model.loading import inspect
from actors.engine.model.tokenizer import load_tokenizer
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.learn.speeds import variants
from pipeline.learn.train.recipe import Recipe
from pipeline.learn.train.run import train

SETTINGS = {
    "max_steps": 12,
    "batch_size": 16,
    "learning_rate": 0.01,
    "warmup_steps": 2,
    "eval_steps": 6,
    "save_steps": 6,
    "speeds_per_step": 1,
    "threads": 1,
}


@dataclass(frozen=True)
class Small:
    """A training of a copying task that a tiny model learns something of in a few steps.

    texts: prompt and response of each row. spec: schedule to train at `speedups`, and with each of `further`.
    """

    start: Path
    output: Path
    texts: list[tuple[str, str]]
    spec: ScheduleSpec = field(default_factory=lambda: ScheduleSpec(horizon=6))
    speedups: tuple[float, ...] = (1, 2)
    further: tuple[dict[str, Any], ...] = ()
    loss: LossConfig = field(default_factory=lambda: LossConfig(references=1.0, distillation=0.0))
    adapter: AdapterConfig | None = None

    def pairs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Pairs to train on, and those of the dev set."""
        rows = pairs(load_tokenizer(self.start), self.texts)
        return rows, rows[:8]

    def recipe(self, *, bf16: bool = True, **training: Any) -> Recipe:
        """What to train, with these changes of `SETTINGS`."""
        layers = inspect(self.start).num_layers
        built = {one.name: one.spec.build(layers) for one in variants(self.spec, self.speedups, self.further)}
        if self.adapter is not None:
            built = {name: schedule for name, schedule in built.items() if not schedule.is_full_depth}
        settings = TrainingConfig.model_validate({**SETTINGS, **training})
        spec = replace(self.spec, speedup=float(self.speedups[-1]))
        return Recipe(spec, built, self.loss, settings, self.adapter, bf16)

    def train(self, *, bf16: bool = True, **training: Any) -> dict[str, Any]:
        """Train, and return the record."""
        return train(self.start, self.recipe(bf16=bf16, **training), *self.pairs(), self.output)


def copying(folder: Path) -> Small:
    """The task, with a start checkpoint in `folder`."""
    rng = random.Random(3)
    words = ["red", "green", "blue", "round", "square", "small"]
    rows = [" ".join(rng.choices(words, k=3)) for _ in range(64)]
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
    return Small(folder / "start", folder / "out", [(row, row) for row in rows])


def pairs(tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The texts as pairs for `train`, each response with an end token."""
    return [
        {
            "input_ids": [*(ids := tokenizer(prompt)["input_ids"]), *_response(tokenizer, text)],
            "prompt_tokens": len(ids),
        }
        for prompt, text in texts
    ]


def _response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
