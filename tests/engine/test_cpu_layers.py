"""What a CPU runs in place of the library's layers: packed products, and attention of one token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from actors.engine.attention import attend
from actors.engine.decoder import Decoder
from actors.engine.packing import PackedLinear, can_pack, pack_linears

BF16 = torch.bfloat16
packs = pytest.mark.skipif(not can_pack(BF16, torch.device("cpu")), reason="no bfloat16 products on this CPU")


@packs
@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(1, 70), min_size=1, max_size=2),
    sizes=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    bias=st.booleans(),
    conv=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_packed_layer_is_the_layer(
    rows: list[int], sizes: tuple[int, int], bias: bool, conv: bool, seed: int
) -> None:
    """As near to the exact product as bfloat16 can tell it, for any number of rows."""
    torch.manual_seed(seed)
    layer: nn.Module = Conv1D(sizes[1], sizes[0]) if conv else nn.Linear(*sizes, bias=bias)
    layer = layer.to(BF16).requires_grad_(False)
    holder = nn.ModuleDict({"inner": nn.ModuleDict({"layer": layer})})
    pack_linears(holder)
    packed = holder["inner"]["layer"]  # type: ignore[index]
    assert isinstance(packed, PackedLinear) and (packed.in_features, packed.out_features) == sizes
    hidden = torch.randn(*rows, sizes[0]).to(BF16)
    want = layer.float()(hidden.float())
    torch.testing.assert_close(packed(hidden).float(), want, rtol=2**-7, atol=2**-7)


@packs
@pytest.mark.parametrize("family", MODELS)
def test_no_linear_layer_of_a_family_is_left(family: str) -> None:
    decoder = Decoder(tiny_model(family).to(BF16))
    decoder.prepare_for_cpu()
    left = [name for block in decoder.blocks for name, one in block.named_modules() if hasattr(one, "weight")]
    assert not [name for name in left if "norm" not in name.lower() and "ln_" not in name], left
    assert isinstance(decoder.head, PackedLinear)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    keys=st.integers(1, 20),
    beyond=st.integers(0, 3),
    scaling=st.sampled_from([None, 0.3]),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_attention_of_one_token_is_the_librarys(
    rows: int,
    heads: int,
    group: int,
    keys: int,
    beyond: int,
    scaling: float | None,
    masked: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also over a slice of a longer cache; in half precision near to what float32 makes of the same numbers."""
    torch.manual_seed(seed)
    query = torch.randn(rows, heads * group, 1, 8).to(dtype)
    key, value = (torch.randn(rows, heads, keys + beyond, 8).to(dtype)[:, :, :keys] for _ in range(2))
    mask = None
    if masked:
        mask = torch.rand(rows, 1, 1, keys) < 0.5
        mask[..., 0] = True  # every token sees itself at least
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = group, True  # type: ignore[assignment]
    got, _ = attend(module, query, key, value, mask, scaling=scaling)
    repeated = [one.float().repeat_interleave(group, dim=1) for one in (key, value)]
    want = nn.functional.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=scaling)
    error = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.float(), want.transpose(1, 2), rtol=10 * error, atol=error)


@torch.inference_mode()
def test_what_a_masked_slot_holds_is_not_seen() -> None:
    """Slots are masked where a shorter row has not come to yet: whatever finite lies there."""
    key = torch.randn(2, 1, 4, 8)
    mask = torch.tensor([True, True, False, False]).view(1, 1, 1, 4).expand(2, -1, -1, -1)
    query = torch.randn(2, 1, 1, 8)
    want, _ = attend(nn.Module(), query, key[:, :, :2], key[:, :, :2], None)
    key[:, :, 2:] = 1e4
    got, _ = attend(nn.Module(), query, key, key, mask)
    torch.testing.assert_close(got, want)


@torch.inference_mode()
def test_an_added_mask_is_left_to_the_library() -> None:
    """As training's passes give it, also over one column."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 1, True  # type: ignore[assignment]
    query, key = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 3, 8)
    seen = torch.tensor([True, True, False]).view(1, 1, 1, 3).expand(2, -1, -1, -1)
    added = torch.zeros(2, 1, 1, 3).masked_fill(~seen, torch.finfo(torch.float32).min)
    (got, _), (want, _) = (attend(module, query, key, key, mask) for mask in (added, seen))
    torch.testing.assert_close(got, want)
