"""The prototype of a bottleneck past skipped layers, against one row and all tokens at a time."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import adapter_variants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from skip_bottleneck import BottleneckDecoder, cost, load_bottlenecks, schedule_of
from tiny_checkpoint import tiny_checkpoint
from tiny_models import LAYERS, VOCAB, tiny_model
from torch import Tensor

from actors.engine.decoder import Decoder, causal_mask
from actors.engine.library import packed_attention
from actors.engine.library.forcing import predicting_states
from actors.engine.schedule.schedule import Schedule, ScheduleSpec

SPECS = [
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]


def pairs(shared: int, low: int = 3, vocabulary: int = VOCAB) -> list[dict[str, Any]]:
    rng = random.Random(3)
    prefix = rng.choices(range(low, vocabulary), k=shared)
    lengths = [(rng.randint(1, 9), rng.randint(1, 8)) for _ in range(5)]
    return [
        {"input_ids": prefix + rng.choices(range(low, vocabulary), k=sum(one)), "prompt_tokens": shared + one[0]}
        for one in lengths
    ]


def packed_decoder(width: int = 3) -> BottleneckDecoder:
    model = tiny_model("llama").requires_grad_(False)
    model.config._attn_implementation = packed_attention.register()
    torch.manual_seed(7)
    return BottleneckDecoder(model, width)


def with_random_ups(decoder: BottleneckDecoder) -> BottleneckDecoder:
    for bottleneck in decoder.bottlenecks:
        torch.nn.init.normal_(bottleneck.up.weight, 0.0, 0.5)
    return decoder


def slow_states(decoder: BottleneckDecoder, pair: dict[str, Any], schedule: Schedule) -> Tensor:
    """States [R, E] that predict the response: every layer over all tokens, and a choice for each of them behind it."""
    plain = Decoder(tiny_model("llama"))
    prompt, ids = pair["prompt_tokens"], torch.tensor(pair["input_ids"][:-1])[None]
    layers = [schedule.prompt_layers] * prompt + [schedule.layers(place) for place in range(ids.shape[1] - prompt)]
    hidden, rotary = plain.embed(ids, torch.arange(ids.shape[1])[None])
    causal = causal_mask(ids.shape[1], 0, None, ids.device)
    for layer in range(plain.num_layers):
        runs = torch.tensor([layer in some for some in layers])
        visible = (causal & runs) | torch.eye(ids.shape[1], dtype=torch.bool)
        skipped = hidden + decoder.bottlenecks[layer](hidden)
        hidden = torch.where(runs[None, :, None], plain.run_layer(layer, hidden, rotary[layer], visible), skipped)
    return hidden[0, prompt - 1 :]


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
@pytest.mark.parametrize("shared", [0, 17])
def test_skipping_tokens_take_the_bottleneck_and_others_the_layer(spec: ScheduleSpec, shared: int) -> None:
    decoder, rows, schedule = with_random_ups(packed_decoder()), pairs(shared), spec.build(LAYERS)
    (found,) = predicting_states(decoder, rows, [schedule])
    expected = torch.cat([slow_states(decoder, row, schedule) for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    gradients = []
    for states in (found, expected):
        decoder.bottlenecks.zero_grad()
        states.square().sum().backward()
        of_layers = [[one.grad for one in bottleneck.parameters()] for bottleneck in decoder.bottlenecks]
        gradients.append(of_layers)
    places = range(max(len(row["input_ids"]) - row["prompt_tokens"] for row in rows) - 1)
    for layer, (fast, slow) in enumerate(zip(*gradients, strict=True)):
        always = all(layer in schedule.layers(place) for place in places) and layer in schedule.prompt_layers
        assert all(one is None for one in fast) == always
        for one, other in zip(fast, slow, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_it_begins_as_plain_skipping_and_leaves_full_depth_alone() -> None:
    decoder, rows = packed_decoder(), pairs(17)
    plain = Decoder(decoder.model)
    full, skipping = ScheduleSpec().build(LAYERS), SPECS[0].build(LAYERS)
    expected = predicting_states(plain, rows, [full, skipping])
    torch.testing.assert_close(predicting_states(decoder, rows, [full, skipping]), expected, rtol=0, atol=0)
    with_random_ups(decoder)
    (found,) = predicting_states(decoder, rows, [full])
    (alone,) = predicting_states(plain, rows, [full])
    assert torch.equal(found, alone)
    assert not torch.allclose(predicting_states(decoder, rows, [skipping])[0], expected[1], atol=1e-2)


def test_its_cost_counts_the_layers_that_a_token_skips() -> None:
    decoder = packed_decoder(width=4)
    found = cost(decoder, ScheduleSpec(max_depth=4, min_depth=4).build(LAYERS), 10)
    of_layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64
    assert found.parameters == LAYERS * (2 * 32 * 4 + 32)
    assert found.share == pytest.approx(2 * 256 / of_layer)
    assert found.mflop == pytest.approx(2 * 2 * 256 / 1e6)


def test_a_variant_is_trained_and_scored(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "base")
    rows = [
        {
            "prompt": row["input_ids"][: row["prompt_tokens"]],
            "response": row["input_ids"][row["prompt_tokens"] :],
            "ended": True,
        }
        for row in pairs(0, low=5, vocabulary=260) * 2
    ]
    for name in ("train", "held-out"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    asked = argparse.Namespace(
        checkpoint=checkpoint,
        folder=tmp_path,
        batch=5,
        keep_order="paper",
        horizon=4,
        prompt="first",
        micro_batch_tokens=None,
        threads=None,
        held_out=8,
    )
    kl = {}
    for steps in (1, 40):
        adapter_variants._trained(asked, f"of-{steps}", "bottleneck-16+shared", [2.0, 3.0], steps)
        output = tmp_path / f"of-{steps}"
        kl[steps] = adapter_variants._distances(asked, output, "bottleneck-16+shared", [2.0, 3.0])
        assert json.loads((output / "tune.json").read_text())["steps"] == steps
    assert kl[40].keys() == {"2x", "3x"}
    assert all(kl[40][speed] < 0.98 * kl[1][speed] for speed in kl[40])
    decoder = load_bottlenecks(checkpoint, tmp_path / "of-40", torch.float32, torch.device("cpu"))
    assert cost(decoder, schedule_of(tmp_path / "of-40", 4, 2.0), 9).share > 0
