"""The learned keep order: layers without effect are bypassed first; the rest are ranked without them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from oracle import oracle_logits
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine.decoder import Decoder
from actors.engine.schedule import Schedule, ScheduleSpec
from pipeline.evaluate import layer_ranking as importance
from pipeline.evaluate.layer_ranking import Row, learned_order

SILENT = ("self_attn.o_proj", "mlp.down_proj")


def silence(decoder: Decoder, layer: int) -> None:
    """Make a Llama layer an exact identity."""
    for name in SILENT:
        decoder.blocks[layer].get_submodule(name).weight.data.zero_()


def sure(decoder: Decoder) -> Decoder:
    """With logits so far apart that its own answers have next to no loss: a missing layer can only add to it."""
    decoder.model.get_output_embeddings().weight.data.mul_(30)
    return decoder


def weaken(decoder: Decoder, layer: int, factor: float) -> None:
    for name in SILENT:
        decoder.blocks[layer].get_submodule(name).weight.data.mul_(factor)


def own_answers(decoder: Decoder, count: int = 6) -> list[Row]:
    """Prompts with what the model at full depth answers them."""
    rng, full, rows = random.Random(5), ScheduleSpec().build(LAYERS), []
    for _ in range(count):
        prompt, response = rng.choices(range(3, VOCAB), k=rng.randint(2, 6)), []
        for _ in range(rng.randint(4, 7)):
            response.append(int(oracle_logits(decoder, full, prompt, response).argmax()))
        rows.append((prompt, response))
    return rows


@pytest.mark.parametrize("layer", [1, 3, 5])
def test_an_identity_ranks_last_and_an_essential_layer_first(layer: int) -> None:
    decoder, crucial = sure(Decoder(tiny_model("llama"))), 2
    silence(decoder, layer)
    for other in set(range(1, LAYERS)) - {layer, crucial}:
        weaken(decoder, other, 0.3)
    rows = own_answers(decoder)
    order = learned_order(decoder, rows, warmup=1)
    assert order[0] == 0 and order[1] == crucial and order[-1] == layer
    assert order == learned_order(decoder, rows, warmup=1)
    Schedule(LAYERS, (3, 2), order)


def test_of_equal_layers_the_higher_is_kept_longer_and_all_goes_into_the_warm_up() -> None:
    decoder = sure(Decoder(tiny_model("llama")))
    for layer in (1, 2, 4):
        silence(decoder, layer)
    rows = own_answers(decoder)
    order = learned_order(decoder, rows, warmup=0)
    assert order[-3:] == (4, 2, 1)
    assert set(order[:3]) == {0, 3, 5}
    assert learned_order(decoder, rows, warmup=LAYERS) == tuple(range(LAYERS))
    assert learned_order(decoder, rows, warmup=LAYERS - 1) == tuple(range(LAYERS))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
def test_the_losses_are_those_of_generation_without_the_layers(family: str) -> None:
    """Against one row and one token at a time; the mean is over tokens, whatever the passes."""
    decoder = Decoder(tiny_model(family))
    rng = random.Random(7)
    rows = [(rng.choices(range(3, VOCAB), k=3), rng.choices(range(3, VOCAB), k=k)) for k in (1, 2, 5, 4, 3)]
    schedule = Schedule(LAYERS, (LAYERS - 2,), (0, 1, 3, 5, 2, 4), warmup=0)
    nats = [
        -float(oracle_logits(decoder, schedule, prompt, response[:t]).log_softmax(-1)[response[t]])
        for prompt, response in rows
        for t in range(len(response))
    ]
    got = importance._loss(decoder, importance._batches(decoder, rows), {2, 4})
    assert got == pytest.approx(sum(nats) / len(nats), rel=1e-3)


def test_the_cost_is_as_promised_and_the_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny_model("llama"))
    plain, passes = importance._loss, []

    def counting(*given: Any) -> float:
        passes.append(given[2])
        return plain(*given)

    monkeypatch.setattr(importance, "_loss", counting)
    decoder.model.train()
    order = learned_order(decoder, [*own_answers(decoder, 1), ([3], []), ([], [3])], warmup=1)
    assert [len(bypassed) for bypassed in passes] == [1] * 5 + [2] * 4 + [3] * 3 + [4] * 2
    assert all(set(order[LAYERS - len(bypassed) + 1 :]) < bypassed for bypassed in passes)
    assert decoder.model.training
    assert not any(weight.requires_grad or torch.isnan(weight).any() for weight in decoder.model.parameters())
    with pytest.raises(ValueError, match="no row with a prompt and a response"):
        learned_order(decoder, [([3], []), ([], [3])], warmup=1)
