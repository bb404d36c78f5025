"""Training follows the inference path: its logits are the oracle's, and skipped layers are not computed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from models import LAYERS, VOCAB, tiny_model
from oracle import oracle_logits

from actors.engine.decoder import Decoder
from actors.engine.loading import inspect
from actors.engine.schedule import ScheduleSpec
from pipeline.config_tuning import TuneConfig
from pipeline.training import response_logits
from pipeline.training_data import IGNORED, Batch, collate
from pipeline.tune import tune

SPECS = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]


def pairs(seed: int, count: int = 5) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, response = rng.randint(1, 9), rng.randint(1, 8)
        rows.append({"input_ids": rng.choices(range(3, VOCAB), k=prompt + response), "prompt_tokens": prompt})
    return rows


@pytest.mark.parametrize("family", ["llama", "opt", "opt-post-norm", "mistral", "gemma2", "gemma3", "gpt-neox"])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_training_logits_are_those_of_inference(family: str, spec: ScheduleSpec) -> None:
    decoder, schedule, rows = Decoder(tiny_model(family)), spec.build(LAYERS), pairs(seed=1)
    inputs = collate(rows)
    logits = response_logits(decoder, Batch(**inputs), schedule)
    for row, pair in enumerate(rows):
        prompt, response = pair["input_ids"][: pair["prompt_tokens"]], pair["input_ids"][pair["prompt_tokens"] :]
        for place, token in enumerate(response):
            want = oracle_logits(decoder, schedule, prompt, response[:place])
            torch.testing.assert_close(logits[row, place], want, rtol=1e-3, atol=1e-3)
            assert inputs["labels"][row, place] == token
        assert (inputs["labels"][row, len(response) :] == IGNORED).all()


def test_a_layer_is_run_only_over_the_columns_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows = Decoder(tiny_model("llama")), pairs(seed=2)
    schedule = ScheduleSpec(max_depth=4, min_depth=2, horizon=3).build(LAYERS)
    run: dict[int, int] = {}
    plain = decoder.run_layer

    def counting(layer: int, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        run[layer] = hidden.shape[1]
        return plain(layer, hidden, *rest)

    monkeypatch.setattr(decoder, "run_layer", counting)
    batch = Batch(**collate(rows))
    response_logits(decoder, batch, schedule)
    inputs = batch.ids.shape[1] - batch.prompt_columns
    assert run == {layer: batch.prompt_columns + schedule.uses(layer, inputs + 1) for layer in range(LAYERS)}
    assert len(set(run.values())) == 4


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """A copying task that a tiny model learns something of in a few steps."""
    rng = random.Random(3)
    words = ["red", "green", "blue", "round", "square", "small"]
    rows = [" ".join(rng.choices(words, k=3)) for _ in range(64)]
    pq.write_table(pa.table({"prompt": rows, "reference": rows}), tmp_path / "train.parquet")
    pq.write_table(
        pa.table({"prompt": rows[:8], "references": [[row, row] for row in rows[:8]]}), tmp_path / "dev.parquet"
    )
    return {
        "model": {
            "new": {
                "model_type": "llama",
                "num_hidden_layers": 4,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_attention_heads": 2,
                "max_position_embeddings": 64,
            },
            "vocab_size": 300,
        },
        "data": {"train": str(tmp_path / "train.parquet"), "dev": str(tmp_path / "dev.parquet")},
        "output": str(tmp_path / "out"),
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


def run(recipe: dict[str, Any], **training: Any) -> dict[str, Any]:
    values = {**recipe, "training": {**recipe["training"], **training}}
    output = tune(TuneConfig.model_validate(values), "recipe.yaml")
    return json.loads((output / "tune.json").read_text())  # type: ignore[no-any-return]


def test_tune_from_scratch_then_from_its_checkpoint(recipe: dict[str, Any], tmp_path: Path) -> None:
    record = run(recipe)
    assert record["steps"] == 12
    assert set(record["dev_loss"]) == {"eval_loss_1x", "eval_loss_2x", "eval_loss"}
    assert record["dev_loss"]["eval_loss"] < 4.5  # untrained: ln 300 = 5.7
    found = inspect(tmp_path / "out")
    assert found.spec is not None
    assert (found.spec.speedup, found.num_layers) == (2, 4)
    assert found.spec.horizon is not None and 3 <= found.spec.horizon <= 20
    further = {
        **recipe,
        "model": {"path": str(tmp_path / "out")},
        "output": str(tmp_path / "further"),
        "schedule": {"speedups": [2], "horizon": 5},
    }
    assert run(further, bf16=False)["dev_loss"]["eval_loss_2x"] < record["dev_loss"]["eval_loss_2x"]
    spec = inspect(tmp_path / "further").spec
    assert spec is not None and spec.horizon == 5


def test_a_run_that_was_cut_off_goes_on(recipe: dict[str, Any]) -> None:
    first = run(recipe, max_steps=6)
    assert (first["steps"], first["resumed_at_step"]) == (6, 0)
    second = run(recipe)
    assert (second["steps"], second["resumed_at_step"]) == (12, 6)
    with pytest.raises(ValueError, match="holds a run of another recipe"):
        run(recipe, learning_rate=0.02)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("data", "train", "none.parquet", "none.parquet: cannot be read as Parquet"),
        ("data", "prompt", "question", r"train.parquet: no column 'question'; it has prompt, reference"),
        ("data", "max_tokens", 4, "no pair within max_tokens = 4 tokens"),
        ("schedule", "speedups", [0.5], "speedup = 0.5: must be at least 1"),
        ("schedule", "keep_order", [0, 1], "keep_order has 2 entries for 4 layers"),
    ],
)
def test_bad_recipes_are_refused_before_training(
    recipe: dict[str, Any], section: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    bad = {**recipe, section: {**recipe[section], key: value}}
    with pytest.raises(ValueError, match=message) as caught:
        tune(TuneConfig.model_validate(bad), "recipe.yaml")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
