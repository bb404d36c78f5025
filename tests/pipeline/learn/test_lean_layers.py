"""The parts of layers with gradients by formula, against autograd on the library's layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, VOCAB, tiny_model
from training_cases import pairs

from actors.engine.decoder import Decoder
from actors.engine.library import packed_attention
from actors.engine.library.forcing import predicting_states, response_labels
from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.config.tune import AdapterConfig, LossConfig
from pipeline.learn.tune import adapters
from pipeline.learn.tune.lean_layers import Adapted, Gated, RmsNorm, make_lean
from pipeline.learn.tune.objective import summed_loss
from pipeline.learn.tune.trainer import Teacher

LOSS = LossConfig(references=0.5, distillation=1.0)
FAMILIES = ["llama", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", "gemma2", "opt", "gpt2", "gpt-neox"]


def adapted_decoder(family: str, **options: Any) -> tuple[Decoder, Any]:
    """A tiny model with random adapters of rank 2."""
    model = tiny_model(family)
    model.config._attn_implementation = packed_attention.register()
    decoder = Decoder(model)
    adapted = adapters.add_adapters(model, AdapterConfig(rank=2, **options))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2)
    return decoder, adapted


def step(decoder: Decoder, adapted: Any, recompute: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a training step, teacher included."""
    rows, schedule = pairs(seed=5), ScheduleSpec(speedup=2, horizon=4).build(LAYERS)
    targets = Teacher(decoder, LOSS, VOCAB, adapted.disable_adapter).targets(rows)
    (states,) = predicting_states(decoder, rows, [schedule], recompute=recompute)
    total = summed_loss(decoder, states, response_labels(rows), targets, LOSS, 0.0)
    adapted.zero_grad()
    total.backward()
    return total.detach(), {name: one.grad for name, one in adapted.named_parameters() if one.grad is not None}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31 - 1), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_each_formula_is_its_functions_derivative(seed: int, sizes: list[int], has_bias: bool) -> None:
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, learned: bool = True) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.double).requires_grad_(learned)

    weight, bias = tensor(6, 4, learned=False), tensor(6, learned=False) if has_bias else None
    states, down, up = tensor(*sizes, 4), tensor(2, 4), tensor(6, 2)
    expected = states @ weight.T + 0.7 * states @ down.T @ up.T + (0 if bias is None else bias)
    torch.testing.assert_close(Adapted.apply(states, weight, bias, down, up, 0.7), expected)
    assert torch.autograd.gradcheck(lambda *one: Adapted.apply(one[0], weight, bias, *one[1:], 0.7), (states, down, up))
    gate = tensor(*sizes, 4)
    assert torch.autograd.gradcheck(Gated.apply, (gate, states))
    scale = tensor(4, learned=False)
    assert torch.autograd.gradcheck(lambda one: RmsNorm.apply(one, scale, 1e-5, torch.double), (states,))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_the_librarys_layers(family: str, recompute: bool) -> None:
    decoder, adapted = adapted_decoder(family)
    expected, wanted = step(decoder, adapted)
    make_lean(adapted)
    found, gradients = step(decoder, adapted, recompute)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert gradients.keys() == wanted.keys()
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4 * largest, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "opt"])
def test_in_bfloat16_they_are_as_near_to_exact_gradients_as_the_librarys(family: str) -> None:
    decoder, adapted = adapted_decoder(family)
    adapters.round_frozen(decoder.model)
    rounded = [module for module in adapted.modules() if type(module) is torch.nn.Linear]
    for module in rounded:
        module.float()
    _, exact = step(decoder, adapted)
    adapters.round_frozen(decoder.model)
    errors = []
    for lean in (False, True):
        if lean:
            make_lean(adapted)
        with torch.autocast("cpu", torch.bfloat16):
            _, found = step(decoder, adapted)
        assert all(one.dtype == torch.float32 for one in found.values())
        errors.append(math.sqrt(sum(float((found[name] - exact[name]).square().sum()) for name in exact)))
    size = math.sqrt(sum(float(one.square().sum()) for one in exact.values()))
    assert 0 < errors[1] < 1.3 * errors[0] < size


def test_less_is_kept_for_the_backward_pass() -> None:
    decoder, adapted = adapted_decoder("llama")
    kept = []
    for lean in (False, True):
        if lean:
            make_lean(adapted)
        weights = {weight.untyped_storage().data_ptr() for weight in adapted.parameters()}
        found: dict[int, int] = {}

        def pack(one: torch.Tensor, found: dict[int, int] = found, weights: set[int] = weights) -> torch.Tensor:
            storage = one.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
            return one

        with torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            rows = pairs(seed=5, count=40)
            states = predicting_states(decoder, rows, [ScheduleSpec(speedup=2, horizon=4).build(LAYERS)])
        kept.append(sum(found.values()))
        del states
    assert kept[1] < 0.85 * kept[0]


def test_adapters_with_dropout_keep_the_librarys_function() -> None:
    decoder, adapted = adapted_decoder("llama", dropout=0.5)
    make_lean(adapted)
    adapted.train()
    rows, schedule = pairs(seed=5), ScheduleSpec(speedup=2, horizon=4).build(LAYERS)
    first, second = (predicting_states(decoder, rows, [schedule]) for _ in range(2))
    assert not torch.allclose(first, second)
