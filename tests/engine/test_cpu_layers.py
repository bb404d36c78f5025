"""What a CPU runs in place of the library's layers: packed products, kernels, layers made of them; and the build."""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, MODELS, tiny_model
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D

from actors.engine.cpu import kernels, library
from actors.engine.cpu.attention import attend
from actors.engine.cpu.layers import CpuLayer
from actors.engine.cpu.native_stack import NativeStack
from actors.engine.cpu.packing import (
    PackedLinear,
    PackedProduct,
    PanelProduct,
    PlainProduct,
    can_pack,
    pack_linears,
    product,
)
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

BF16 = torch.bfloat16
builds = pytest.mark.skipif(library.library() is None, reason="no C++ compiler")
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


multiplying = pytest.mark.skipif(not library.multiplies(BF16, torch.device("cpu")), reason="no kernel for products")


@packs
@pytest.mark.parametrize(
    "kind",
    [
        PackedProduct,
        pytest.param(PanelProduct, marks=multiplying),
    ],
)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 150)),
    bias=st.booleans(),
    then=st.sampled_from(["none", "relu", "residual"]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_a_packed_product_is_the_product(
    kind: type[PackedProduct] | type[PanelProduct],
    rows: int,
    sizes: tuple[int, int],
    bias: bool,
    then: str,
    seed: int,
) -> None:
    """Rounded once, from a sum in float32; and by the kernel every row as if it were alone."""
    torch.manual_seed(seed)
    weight, added = torch.randn(sizes[1], 2 * sizes[0]).to(BF16), torch.randn(sizes[1]).to(BF16) if bias else None
    hidden = torch.randn(rows, 2 * sizes[0]).to(BF16)
    residual = torch.randn(rows, sizes[1]).to(BF16) if then == "residual" else None
    run = kind(weight, added)
    activation = "relu" if then == "relu" else "none"
    got = run(hidden, activation, residual)
    want = PlainProduct(weight.float(), None if added is None else added.float())
    exact = want(hidden.float(), activation, None if residual is None else residual.float())
    torch.testing.assert_close(got.float(), exact, rtol=2**-7, atol=1e-3)
    if kind is PanelProduct:
        row = seed % rows
        one = slice(row, row + 1)
        assert torch.equal(run(hidden[one], activation, None if residual is None else residual[one]), got[one])


@multiplying
@torch.inference_mode()
def test_a_product_with_what_is_no_number_tells_it() -> None:
    weight, hidden = torch.ones(50, 6, dtype=BF16), torch.ones(3, 6, dtype=BF16)
    hidden[1, 2] = torch.nan
    for activation in ("none", "relu"):
        got = product(weight, None)(hidden, activation)
        assert got[1].isnan().all() and torch.equal(got[::2], torch.full((2, 50), 6.0, dtype=BF16))


@packs
@pytest.mark.parametrize("family", MODELS)
def test_no_linear_layer_of_a_family_is_left(family: str) -> None:
    decoder = Decoder(tiny_model(family).to(BF16))
    decoder.prepare_for_cpu()
    for block in decoder.blocks:
        if isinstance(block, CpuLayer):
            products = (block.attention.qkv, block.attention.output, block.feed_forward.up, block.feed_forward.down)
            assert not any(isinstance(one, PlainProduct) for one in products)
        left = [name for name, one in block.named_modules() if hasattr(one, "weight")]
        assert not [name for name in left if "norm" not in name.lower() and "ln_" not in name], left
    assert isinstance(decoder.head, PackedLinear)


@builds
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    keys=st.integers(1, 50),
    beyond=st.integers(0, 3),
    size=st.sampled_from([1, 8, 32, 33, 64, 80, 128, 256]),
    scaling=st.sampled_from([None, 0.1]),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_attention_of_one_token_is_the_librarys(
    rows: int,
    heads: int,
    group: int,
    keys: int,
    beyond: int,
    size: int,
    scaling: float | None,
    masked: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also over a slice of a longer cache, and whatever lies where a row does not look; in half precision near to what
    float32 makes of the same numbers."""
    torch.manual_seed(seed)
    query = torch.randn(rows, heads * group, 1, size).to(dtype)
    key, value = (torch.randn(rows, heads, keys + 2 * beyond, size).to(dtype) for _ in range(2))
    key[:, :, :beyond] = value[:, :, beyond + keys :] = torch.nan
    key, value = (one[:, :, beyond : beyond + keys] for one in (key, value))
    mask = None
    if masked:  # a window before each row's own token
        last = torch.randint(keys, (rows, 1, 1, 1))
        first = (last - torch.randint(keys, (rows, 1, 1, 1))).clamp(min=0)
        mask = (first <= torch.arange(keys)) & (torch.arange(keys) <= last)
        for one in (key, value):
            one.masked_fill_(~mask[:, 0, 0, :, None].expand(one.shape[0], keys, size)[:, None], torch.nan)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = group, True  # type: ignore[assignment]
    got, _ = attend(module, query, key, value, mask, scaling=scaling)
    repeated = [one.float().nan_to_num().repeat_interleave(group, dim=1) for one in (key, value)]
    want = nn.functional.scaled_dot_product_attention(query.float(), *repeated, attn_mask=mask, scale=scaling)
    error = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.float(), want.transpose(1, 2), rtol=error, atol=error)


@multiplying
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(2, 110),
    size=st.sampled_from([2, 8, 32, 50, 64, 80, 128]),
    scaling=st.sampled_from([None, 0.1]),
    joined=st.booleans(),
    seed=st.integers(0, 99),
)
@example(rows=2, heads=2, group=3, tokens=58, size=80, scaling=0.1, joined=False, seed=3)
@torch.inference_mode()
def test_attention_of_prompts_is_the_librarys(
    rows: int, heads: int, group: int, tokens: int, size: int, scaling: float | None, joined: bool, seed: int
) -> None:
    """As near as bfloat16 weights allow to what float32 makes of the same numbers, wherever they lie and however many
    threads there are; and no token sees what comes after it."""
    torch.manual_seed(seed)
    if joined:
        states = torch.randn(rows, tokens, heads * (group + 2), size).to(BF16).transpose(1, 2)
        query, key, value = states.split([heads * group, heads, heads], dim=1)
    else:
        query = torch.randn(rows, heads * group, tokens, size).to(BF16)
        key, value = torch.randn(2, rows, heads, tokens, size).to(BF16)
    repeated = [one.float().repeat_interleave(group, dim=1) for one in (key, value)]
    want = nn.functional.scaled_dot_product_attention(query.float(), *repeated, is_causal=True, scale=scaling)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = group, True  # type: ignore[assignment]
    with mock.patch("actors.engine.cpu.attention.sdpa_attention_forward", side_effect=AssertionError):
        got, _ = attend(module, query, key, value, None, scaling=scaling)
        torch.testing.assert_close(got.float(), want.transpose(1, 2), rtol=2**-6, atol=2**-6)
        threads = torch.get_num_threads()
        torch.set_num_threads(5)
        many, _ = attend(module, query, key, value, None, scaling=scaling)
        torch.set_num_threads(threads)
        seen = 1 + seed % tokens
        key[:, :, seen:] += 1
        value[:, :, seen:] += 1
        again, _ = attend(module, query, key, value, None, scaling=scaling)
    assert torch.equal(again[:, :seen], got[:, :seen]) and torch.equal(many, got)


@multiplying
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    before=st.integers(1, 150),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 16, 34, 64, 98]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_attention_behind_a_prefix_is_attention_over_the_whole(
    lengths: list[int], before: int, heads: int, group: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    query = torch.randn(int(starts[-1]), heads * group, size).to(BF16)
    keys, values = torch.randn(2, int(starts[-1]), heads, size).to(BF16)
    shared = torch.randn(2, 1, heads, before, size).to(BF16)
    prefix = kernels.PackedPrefix.of(shared[0], shared[1])
    got = kernels.attend_prompts(query, keys, values, starts, 0.3, prefix)
    for first, end in itertools.pairwise(starts.tolist()):
        whole = [
            torch.cat((one[0], mine[first:end].transpose(0, 1)), dim=1).float().repeat_interleave(group, dim=0)
            for one, mine in zip(shared, (keys, values), strict=True)
        ]
        places = torch.arange(before + end - first)
        mask = places <= places[before:, None]
        asked = query[first:end].transpose(0, 1).float()
        want = nn.functional.scaled_dot_product_attention(asked, *whole, attn_mask=mask, scale=0.3)
        torch.testing.assert_close(got[first:end].float(), want.transpose(0, 1), rtol=2**-6, atol=2**-6)


@builds
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 80),
    size=st.integers(1, 300),
    rms=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_norms_and_gates_are_the_librarys(rows: int, size: int, rms: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    hidden, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, size), (size,), (size,)))
    got = kernels.normalize(3 * hidden + 1, weight, None if rms else bias, 1e-5)
    whole = (3 * hidden + 1).float()
    if rms:
        want = nn.functional.rms_norm(whole, (size,), weight.float(), 1e-5)
    else:
        want = nn.functional.layer_norm(whole, (size,), weight.float(), bias.float(), 1e-5)
    torch.testing.assert_close(got.float(), want, **near)
    states = torch.randn(rows, 5, size).to(dtype)
    heads = states.clone()
    kernels.normalize_heads(heads[:, 1:4], weight, 1e-5)
    assert torch.equal(heads[:, ::4], states[:, ::4])
    want = nn.functional.rms_norm(states[:, 1:4].float(), (size,), weight.float(), 1e-5)
    torch.testing.assert_close(heads[:, 1:4].float(), want, **near)
    joined, wide = states.clone(), torch.randn(3 * size).to(dtype)
    kernels.normalize_heads(joined[:, 1:4], wide, 1e-5)
    want = nn.functional.rms_norm(states[:, 1:4].flatten(1).float(), (3 * size,), wide.float(), 1e-5)
    torch.testing.assert_close(joined[:, 1:4].flatten(1).float(), want, **near)
    both = torch.randn(rows, 2 * size).mul(20).to(dtype)
    want = nn.functional.silu(both[:, :size].float()) * both[:, size:].float()
    torch.testing.assert_close(kernels.gate(both).float(), want, **near)


@builds
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    heads=st.integers(1, 4),
    half=st.integers(1, 40),
    beyond=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_rope_and_writes_are_the_librarys(
    rows: int, heads: int, half: int, beyond: int, dtype: torch.dtype, seed: int
) -> None:
    """Of some heads among others, of the first numbers of a head, and of one slot a row among others."""
    torch.manual_seed(seed)
    size = 2 * half
    states, (cosines, sines) = torch.randn(rows, heads + 3, size + beyond), torch.randn(2, rows, size).to(dtype)
    states = states.to(dtype)
    rotated = states.clone()
    kernels.rotate(rotated[:, :heads], cosines, sines)
    assert torch.equal(rotated[:, heads:], states[:, heads:])
    assert torch.equal(rotated[:, :, size:], states[:, :, size:])
    wide = [table.float()[:, None] for table in (cosines, sines)]
    want, _ = apply_rotary_pos_emb(states[:, :heads, None, :size].float(), states[:, :1, None, :size].float(), *wide)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-6}
    torch.testing.assert_close(rotated[:, :heads, :size].float(), want[:, :, 0], **near)
    size += beyond
    buffers = torch.randn(2, rows + 1, heads, 7, size).to(dtype)
    written = buffers.clone()
    slots = torch.randint(7, (rows,))
    new = [states[:, first : first + heads] for first in (0, 1)]
    kernels.append(*new, *written[:, 1:], slots)
    for want, one in zip(buffers, new, strict=True):
        want[1 + torch.arange(rows), :, slots] = one
    assert torch.equal(written, buffers)
    with pytest.raises(AssertionError, match="outside"):
        kernels.append(*new, *written[:, 1:], slots + 7)
    assert torch.equal(written, buffers)


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "false", "sh", "g++ --no-such-flag"])
def test_without_a_compiler_the_librarys_layers_are_run(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One line says so."""
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path))
    library.library.cache_clear()
    try:
        decoder = Decoder(tiny_model("llama"))
        decoder.prepare_for_cpu()
        assert decoder.native_buffers() is None and type(decoder.blocks[0]).__name__ == "LlamaDecoderLayer"
        (said,) = [record.getMessage() for record in caplog.records]
        assert compiler.split()[0] in said and "\n" not in said
    finally:
        library.library.cache_clear()


@builds
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another source, which takes less time than the kernels do."""
    source = tmp_path / "kernels.cpp"
    source.write_text('extern "C" int threads() { return 1; }\n')
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    first = library._built(compiler)
    before = first.stat().st_mtime_ns
    assert library._built(compiler) == first and first.stat().st_mtime_ns == before
    assert [one.name for one in first.parent.iterdir()] == [first.name]


@builds
@pytest.mark.parametrize("family", MODELS)
def test_layers_of_ones_own_are_taken_where_there_are_some(family: str) -> None:
    decoder = Decoder(tiny_model(family))
    decoder.prepare_for_cpu()
    own = family.startswith(("llama", "mistral", "qwen", "opt", "phi3", "olmo2", "smollm3"))
    assert all((type(block).__module__ == "actors.engine.cpu.layers") == own for block in decoder.blocks)
    assert list(decoder.family.layers(decoder.model)) == decoder.blocks


@builds
@pytest.mark.parametrize(
    ("family", "changes", "own"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, True),
        ("llama", {"hidden_act": "gelu"}, False),
        ("opt", {"enable_bias": False}, True),
        ("opt", {"activation_function": "gelu"}, True),
        ("opt", {"layer_norm_elementwise_affine": False}, False),
        ("opt-post-norm", {"enable_bias": False}, True),
        ("qwen3", {"attention_bias": True}, True),
        ("phi3", {"partial_rotary_factor": 1.0}, True),
        ("phi3-full", {"partial_rotary_factor": 0.75}, True),
        ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}, True),
        ("smollm3-full", {"no_rope_layers": [1, 0, 1, 0, 0, 1]}, True),
    ],
)
@torch.inference_mode()
def test_a_layer_is_the_librarys_in_every_configuration(family: str, changes: dict[str, Any], own: bool) -> None:
    """Prompts and steps, of rows of unequal lengths."""
    made = [Decoder(tiny_model(family, **changes)) for _ in range(2)]
    made[0].prepare_for_cpu()
    assert isinstance(made[0].blocks[0], CpuLayer) == own
    rows = [Request([5 + row, *range(7, 8 + row)], SamplingParams(max_new_tokens=9)) for row in range(4)]
    schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
    answers = [generate(Engine(one, schedule, ()), rows, budget_bytes=2**40, max_rows=4) for one in made]
    assert [one.token_ids for one in answers[0]] == [one.token_ids for one in answers[1]]
    for got, want in zip(*answers, strict=True):
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)


def drawn_logits(decoder: Decoder, rows: list[Request]) -> list[torch.Tensor]:
    """Of every pass over rows that come and go."""
    kept: list[torch.Tensor] = []
    logits_of = decoder.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(logits_of(hidden))
        return kept[-1]

    with mock.patch.object(decoder, "logits", keep):
        schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
        how: dict[str, Any] = {"max_rows": 4, "scheduler": "refill", "share_prefixes": False}
        generate(Engine(decoder, schedule, ()), rows, budget_bytes=2**40, **how)
    return kept


@multiplying
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {}),
        ("opt", {}),
        ("opt-post-norm", {"enable_bias": False}),
        ("qwen3", {}),
        ("phi3", {}),
        ("olmo2", {}),
        ("smollm3", {}),
    ],
)
@pytest.mark.parametrize("threads", [1, 5])
@torch.inference_mode()
def test_a_step_in_one_call_is_its_parts(family: str, changes: dict[str, Any], threads: int) -> None:
    """To the bit: rows of unequal lengths and ages, layers that leave, logits of every step."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder = Decoder(tiny_model(family, **changes).to(BF16))
        decoder.prepare_for_cpu()
        rows = [Request([5 + row, *range(7, 8 + 3 * row)], SamplingParams(max_new_tokens=12)) for row in range(6)]
        got = drawn_logits(decoder, rows)
        assert decoder.stack is not None
        decoder.stack = None
        want = drawn_logits(decoder, rows)
    finally:
        torch.set_num_threads(before)
    assert len(got) > 12 and all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@multiplying
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_key_value_heads": 1}),
        ("qwen2", {}),
        ("opt", {}),
        ("opt-post-norm", {}),
        ("qwen3", {}),
        ("phi3-full", {}),
        ("olmo2", {}),
        ("smollm3-full", {}),
    ],
)
@pytest.mark.parametrize("lengths", [(1, 9, 40, 9, 2, 33, 31, 1), (2300, 3, 700, 600, 1030, 50, 1, 1)])
@torch.inference_mode()
def test_prompts_one_behind_another_are_prompts_side_by_side(
    family: str, changes: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """To the bit: rows that come while others are in flight, that share a prompt, of one or several blocks, short ones
    run together and long ones alone."""
    decoder = Decoder(tiny_model(family, max_position_embeddings=2400, **changes).to(BF16))
    decoder.prepare_for_cpu()
    assert decoder.joins_prompts
    prompts = [[5 + length % 40, *(7 + token % 20 for token in range(length - 1))] for length in lengths]
    rows = [Request(prompt, SamplingParams(max_new_tokens=3 + row)) for row, prompt in enumerate(prompts)]
    got = drawn_logits(decoder, rows)
    decoder.stack = None
    want = drawn_logits(decoder, rows)
    assert len(got) > 8 and all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@multiplying
@pytest.mark.parametrize(("family", "changes"), [("llama", {"num_key_value_heads": 1}), ("opt", {}), ("qwen3", {})])
@torch.inference_mode()
def test_prompts_that_threads_run_apart_are_prompts_of_one_thread(family: str, changes: dict[str, Any]) -> None:
    """To the bit: groups of prompts, each run by one thread in memory of its own, and one group by one thread."""
    decoder = Decoder(tiny_model(family, max_position_embeddings=200, **changes).to(BF16))
    decoder.prepare_for_cpu()
    assert decoder.stack is not None
    lengths = (95, 90, 85, 80, 75, 70, 60, 60)
    prompts = [[5 + length % 40, *(7 + token % 20 for token in range(length - 1))] for length in lengths]
    rows = [Request(prompt, SamplingParams(max_new_tokens=3 + row)) for row, prompt in enumerate(prompts)]
    before, logits, memory = torch.get_num_threads(), [], []
    numbers_of = decoder.stack._prompts_workspace
    most = 0

    def noted(*addresses: int) -> int:
        nonlocal most
        numbers: int = numbers_of(*addresses)
        most = max(most, numbers)
        return numbers

    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            most = 0
            with mock.patch.object(decoder.stack, "_prompts_workspace", noted):
                logits.append(drawn_logits(decoder, rows))
            memory.append(most)
    finally:
        torch.set_num_threads(before)
    assert memory[1] > memory[0]  # two groups at once: the longer one's memory twice
    assert len(logits[0]) > 8 and all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def rounded_numbers(stack: NativeStack, tokens: int) -> int:
    """Of a workspace for so many tokens, as threads have it side by side."""
    return -(-stack._step_workspace(ctypes.addressof(stack._layers[0]), tokens) // 32) * 32


@multiplying
@pytest.mark.parametrize(
    ("threads", "lengths", "groups", "most"),
    [
        (16, [56] * 16, 1, 224),  # 64 tokens a thread are needed: all threads run four groups of 256 tokens or so
        (16, [56] * 32, 16, 112),
        (2, [95, 90, 85, 80, 75, 70, 60, 60], 2, 345),
        (2, [130] * 5, 1, 260),  # three prompts of one thread, two of the other: too uneven
        (2, [1500, *[20] * 60], 1, 1500),  # a long prompt would leave one thread to work alone
        (16, [300, *[50] * 30], 1, 300),
        (4, [20], 1, 20),
        (1, [56] * 16, 1, 224),
    ],
)
def test_prompts_that_all_threads_run_are_cut_into_groups_of_256_tokens(
    threads: int, lengths: list[int], groups: int, most: int
) -> None:
    """However many threads there are: each group reads all weights. groups: that threads run at once."""
    decoder = Decoder(tiny_model("llama").to(BF16))
    decoder.prepare_for_cpu()
    stack = decoder.stack
    assert stack is not None
    starts = torch.tensor([0, *itertools.accumulate(lengths)])
    stack._prompts.starts, stack._prompts.prompts = starts.data_ptr(), len(lengths)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = stack._prompts_workspace(ctypes.addressof(stack._layers[0]), ctypes.addressof(stack._prompts))
    finally:
        torch.set_num_threads(before)
    assert got == groups * rounded_numbers(stack, most)


@multiplying
@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.inference_mode()
def test_a_prefix_computed_once_changes_no_more_than_rounding(family: str) -> None:
    """Logits of prompts one behind another, and of a step over what the prefill has left in the cache."""
    decoder = Decoder(tiny_model(family, max_position_embeddings=400).to(BF16))
    decoder.prepare_for_cpu()
    assert decoder.joins_prompts
    prefix = [5 + token % 17 for token in range(100)]
    ends = ([7, 9], [8], list(range(5, 28)), [8], [11, 12, 13])
    rows = [Request([*prefix, *end], SamplingParams(max_new_tokens=6)) for end in ends]
    logits_of, kept = decoder.logits, []

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(logits_of(hidden))
        return kept[-1]

    for before in ((), prefix):
        engine = Engine(decoder, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), ())
        engine.open(len(rows), max(len(row.prompt_ids) for row in rows), 6)
        with mock.patch.object(decoder, "logits", keep):
            engine.admit(rows, before)
            for row in engine.rows:
                row.tokens[-1] = 6
            engine.step()
    want, got = kept[:2], kept[-2:]
    assert len(kept) == 5  # the prefix has a pass of its own
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.05 * float(other.float().abs().max()))


@multiplying
def test_with_amx_the_librarys_products_run() -> None:
    with mock.patch.object(library, "has_amx", return_value=True):
        decoder = Decoder(tiny_model("llama").to(BF16))
        decoder.prepare_for_cpu()
    assert isinstance(decoder.head.product, PackedProduct) and decoder.greedy_steps is None
    engine = Engine(decoder, ScheduleSpec().build(LAYERS), frozenset())
    rows = [Request([5, 6, 7], SamplingParams(max_new_tokens=4))]
    [answer] = generate(engine, rows, budget_bytes=2**40, max_rows=4)
    assert len(answer.token_ids) == 4
