"""Linear layers of 8 bits against their definition in torch, and the screened head against the whole one."""

from __future__ import annotations

import pytest
import torch
from engine_cases import STOP, answer, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, MODELS, tiny_model
from torch import Tensor

from actors.engine.cpu import kernels, products
from actors.engine.cpu.executor import Screen, StackDecoder, can_screen, fastest_decoder
from actors.engine.cpu.products import GROUP, PanelProduct, QuantizedProduct, product, quantize_weight, rounded
from actors.engine.cpu.stack import normalize
from actors.engine.engine import Engine
from actors.engine.model.layer_weights import NormWeights
from actors.engine.sampling.sampler import argmax
from actors.engine.sampling.state import NO_TOKEN
from actors.engine.schedule.schedule import ScheduleSpec

BF16 = torch.bfloat16
native = pytest.mark.skipif(not kernels.quantizes(BF16, torch.device("cpu")), reason="no kernel for 8 bits")


def by_torch(weight: Tensor, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> QuantizedProduct:
    """The product that a CPU without the kernel has."""
    with monkeypatch.context() as patch:
        patch.setattr(products, "quantizes", lambda *_: False)
        made = QuantizedProduct(weight, bias)
    assert not made.native
    return made


def test_numbers_are_within_half_a_step_of_their_groups_scale() -> None:
    hidden = torch.randn(5, 100) * torch.logspace(-3, 3, 5)[:, None]
    got = rounded(hidden)
    assert got.shape == (5, 2 * GROUP) and not got[:, 100:].any()
    for group in range(2):
        mine = slice(group * GROUP, min(100, (group + 1) * GROUP))
        step = hidden[:, mine].abs().amax(dim=1, keepdim=True) / 127
        assert ((got[:, mine] - hidden[:, mine]).abs() <= step * 0.5001).all()
    assert torch.equal(rounded(torch.zeros(2, 3)), torch.zeros(2, GROUP))


def test_weights_are_within_half_a_step_of_their_outputs_scale() -> None:
    weight = torch.randn(7, 70)
    weight[3] = 0
    codes, scales = quantize_weight(weight)
    assert codes.shape == (7, 2 * GROUP) and codes.dtype == torch.int8 and not codes[3].any()
    error = (codes[:, :70].float() * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.5001).all()


@native
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 150),
    inputs=st.integers(1, 500),
    outputs=st.integers(1, 150),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_the_kernel_is_the_definition(rows: int, inputs: int, outputs: int, bias: bool, seed: int) -> None:
    """Up to the rounding of float32 sums; and every row as if it were alone."""
    torch.manual_seed(seed)
    weight, added = torch.randn(outputs, inputs).to(BF16), torch.randn(outputs).to(BF16) if bias else None
    hidden = (torch.randn(rows, inputs) * torch.rand(rows, 1) * 9).to(BF16)
    run = product(weight, added, int8=True)
    assert isinstance(run, QuantizedProduct) and run.native
    got = run(hidden)
    with pytest.MonkeyPatch.context() as patch:
        want = by_torch(weight, added, patch)(hidden)
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)
    one = slice(seed % rows, seed % rows + 1)
    assert torch.equal(run(hidden[one]), got[one])


@native
@torch.inference_mode()
def test_what_is_no_number_is_told() -> None:
    weight, hidden = torch.ones(50, 130, dtype=BF16), torch.ones(3, 130, dtype=BF16)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        hidden[1, 128] = wrong
        got = QuantizedProduct(weight, None)(hidden)
        assert got[1].isnan().all() and torch.equal(got[::2], torch.full((2, 50), 130.0, dtype=BF16))


@native
@pytest.mark.parametrize("family", ["llama", "opt", "olmo2"])
def test_answers_do_not_depend_on_the_batch(family: str) -> None:
    decoder = fastest_decoder(tiny_model(family).to(BF16), int8=True)
    assert isinstance(decoder, StackDecoder)
    schedule, rows = ScheduleSpec(speedup=2, horizon=6).build(LAYERS), requests(6, seed=3)
    together = answer(Engine(decoder, schedule, STOP), rows)
    for row, got in zip(rows, together, strict=True):
        assert answer(Engine(decoder, schedule, STOP), [row])[0].token_ids == got.token_ids


@pytest.mark.parametrize("kernel", [pytest.param(True, marks=native), False])
@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_logits_stay_near_those_of_bfloat16(family: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of 8 bits is a small part of the logits' spread."""
    if not kernel:
        for module in (products, kernels):  # the second one decides whether layers are stacked
            monkeypatch.setattr(module, "quantizes", lambda *_: False)
    ids, positions = torch.tensor([[5, 9, 3, 7]]), torch.arange(4)[None]
    logits = []
    for int8 in (False, True):
        decoder = fastest_decoder(tiny_model(family).to(BF16), int8=int8)
        hidden, rotary = decoder.embed(ids, positions)
        for layer in range(LAYERS):
            hidden = decoder.run_layer(layer, hidden, rotary[layer], None)
        logits.append(decoder.logits(hidden[0]).float())
    error = (logits[1] - logits[0]).abs() / logits[0].std()
    assert 0 < error.mean() < 0.1 and error.max() < 0.6


@native
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 140),
    half=st.integers(1, 150),
    vocabulary=st.integers(8, 400),
    copies=st.integers(0, 3),
    sharp=st.sampled_from([0.0, 0.5, 3.0]),
    seed=st.integers(0, 999),
)
@torch.inference_mode()
def test_a_screened_token_is_that_of_the_whole_head(
    rows: int, half: int, vocabulary: int, copies: int, sharp: float, seed: int
) -> None:
    """Equal weights are equal logits, of which the first counts; sharp: how near rows are to a token's weight."""
    torch.manual_seed(seed)
    weight = torch.randn(vocabulary, 2 * half).to(BF16)
    for _ in range(copies):
        weight[seed % vocabulary :: 3] = weight[seed % vocabulary].clone()
    hidden = (torch.randn(rows, 2 * half) + sharp * weight[torch.randint(vocabulary, (rows,))].float()).to(BF16)
    norm = NormWeights(torch.rand(2 * half) + 0.5, torch.randn(2 * half) if seed % 2 else None, 1e-5)
    got, want = Screen(weight, norm)(hidden), argmax(PanelProduct(weight, None)(normalize(hidden, norm)))
    decided = got >= 0
    assert torch.equal(got[decided], want[decided])


@native
@torch.inference_mode()
def test_a_screen_decides_where_one_token_leads_and_not_where_all_are_near() -> None:
    torch.manual_seed(1)
    weight = torch.randn(4000, 64).to(BF16)
    norm = NormWeights(torch.ones(64), None, 1e-5)
    screen = Screen(weight, norm)
    assert torch.equal(screen(3 * weight[:100]), torch.arange(100))
    near = Screen((torch.ones(4000, 64) + 0.001 * torch.randn(4000, 64)).to(BF16), norm)
    assert near(torch.randn(5, 64).to(BF16)).tolist() == [-1] * 5
    for value in (torch.nan, torch.inf):
        hidden = torch.randn(3, 64).to(BF16)
        hidden[1, 7] = value
        assert [token >= 0 for token in screen(hidden).tolist()] == [True, False, True]
    assert can_screen(weight) and not can_screen(weight[:, :63].contiguous()) and not can_screen(weight.float())
    weight[5, 5] = torch.inf
    assert not can_screen(weight)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_a_stacks_likeliest_tokens_are_those_of_its_logits(family: str, dtype: torch.dtype) -> None:
    decoder = fastest_decoder(tiny_model(family).to(dtype))
    if not isinstance(decoder, StackDecoder):
        pytest.skip("no stack of this family or on this CPU")
    hidden = torch.randn(70, decoder.embed(torch.tensor([[1]]), torch.tensor([[0]]))[0].shape[-1]).to(dtype)
    for wrong in (False, True):
        hidden[3] = torch.nan if wrong else hidden[3]
        found = decoder.likeliest(hidden)
        assert torch.equal(found, argmax(decoder.logits(hidden)))
        assert (found[3] == NO_TOKEN) == wrong and min(found[4:]) >= 0
