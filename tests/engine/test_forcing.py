"""Teacher forcing without padding against rows computed alone: logits, gradients, tokens of each layer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_cases import layer_columns
from oracle import forced_logits
from tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.torch.forcing import micro_batches, predicting_states, response_labels, shared_tokens
from actors.engine.torch.packed_attention import packed

# plain, post-norm, capped, windows of two kinds, parallel residual, learned positions
FAMILIES = ["llama", "opt", "opt-post-norm", "mistral", "gemma2", "gemma3", "gpt-neox", "gpt2"]
FULL = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]
FIRST = [ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first")]


def pairs(shared: int, seed: int = 5, count: int = 5) -> list[dict[str, Any]]:
    """Random pairs whose prompts begin with the same `shared` tokens."""
    rng = random.Random(seed)
    prefix = rng.choices(range(3, VOCAB), k=shared)
    lengths = [(rng.randint(1, 9), rng.randint(1, 8)) for _ in range(count)]
    return [
        {"input_ids": prefix + rng.choices(range(3, VOCAB), k=prompt + response), "prompt_tokens": shared + prompt}
        for prompt, response in lengths
    ]


def gradients(model: nn.Module, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def logits_alone(model: Any, rows: list[dict[str, Any]], schedules: list[Schedule]) -> tuple[Tensor, Tensor]:
    decoder = Decoder(model)
    split = [(row["input_ids"][: row["prompt_tokens"]], row["input_ids"][row["prompt_tokens"] :]) for row in rows]
    logits = [forced_logits(decoder, one, prompt, response[:-1]) for one in schedules for prompt, response in split]
    return torch.cat(logits), torch.tensor([token for _, response in split for token in response] * len(schedules))


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(one.abs().max()) for one in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-3 * largest)


@pytest.mark.parametrize("specs", [FULL, FIRST], ids=["full", "first"])
@pytest.mark.parametrize(("family", "shared"), [("llama", 0), *((family, 17) for family in FAMILIES)])
def test_logits_and_gradients_are_those_of_rows_alone(family: str, specs: list[ScheduleSpec], shared: int) -> None:
    model = tiny_model(family).requires_grad_(True)
    rows, schedules = pairs(shared), [spec.build(LAYERS) for spec in specs]
    assert shared_tokens(rows) == shared
    logits, labels = logits_alone(model, rows, schedules)
    expected = gradients(model, logits, labels)
    decoder = Decoder(model)
    with packed(model):
        for recompute in (False, True):
            states = predicting_states(decoder, rows, schedules, recompute=recompute)
            found = decoder.logits(states.flatten(0, 1))
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
            assert torch.equal(response_labels(rows).repeat(len(schedules)), labels)
            assert_same_gradients(gradients(model, found, labels), expected)


def test_without_the_prompts_gradient_the_logits_are_the_same() -> None:
    model = tiny_model("llama").requires_grad_(True)
    rows, schedules = pairs(17), [spec.build(LAYERS) for spec in FULL]
    labels = response_labels(rows).repeat(len(schedules))
    decoder = Decoder(model)
    with packed(model):
        whole, less = (
            decoder.logits(predicting_states(decoder, rows, schedules, prompt_gradient=kept).flatten(0, 1))
            for kept in (True, False)
        )
        torch.testing.assert_close(less, whole, rtol=1e-3, atol=1e-4)  # another kernel without gradients
        with_prompts, without = gradients(model, whole, labels), gradients(model, less, labels)
    assert with_prompts.keys() == without.keys()
    name = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.allclose(with_prompts[name], without[name])


def test_a_layer_is_run_only_over_the_tokens_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pairs(17)
    schedules = [spec.build(LAYERS) for spec in FULL]
    decoder = Decoder(tiny_model("llama"))
    with packed(decoder.model):
        run = layer_columns(decoder, monkeypatch)
        predicting_states(decoder, rows, schedules)
    prompts = 17 + sum(row["prompt_tokens"] - 1 - 17 for row in rows)
    responses = [len(row["input_ids"]) - row["prompt_tokens"] for row in rows]
    expected = [  # prompts' last tokens once a schedule
        prompts + sum(1 + schedule.uses(layer, length) for schedule in schedules for length in responses)
        for layer in range(LAYERS)
    ]
    assert run == expected


@pytest.mark.parametrize("tokens", [1, 30, 60, 1000])
def test_micro_batches_hold_all_pairs_in_order_within_their_tokens(tokens: int) -> None:
    rows = pairs(17, count=20)
    batches = list(micro_batches(rows, 2, tokens))
    assert [row for batch in batches for row in batch] == rows
    for batch in batches:
        responses = sum(len(row["input_ids"]) - row["prompt_tokens"] for row in batch)
        count = 17 + sum(row["prompt_tokens"] - 18 for row in batch) + 2 * responses
        assert len(batch) == 1 or count <= max(tokens, 17 + tokens // 4)
    if tokens in (1, 1000):
        assert len(batches) == {1: 20, 1000: 1}[tokens]
