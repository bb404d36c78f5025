"""Checkpoints with weights of 8 bits, against what the libraries expand of them, and refusals of all others."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_checkpoints import compressed, expanded, scheme
from hypothesis import given, settings
from hypothesis import strategies as st
from random_adapter import random_adapter
from safetensors.torch import load_file, save_file
from tiny_checkpoint import LAYERS, tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engine.cpu import library
from actors.engine.cpu.executor import StackDecoder
from actors.engine.cpu.products import PackedLinear, QuantizedProduct, quantize_weight
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.model.compressed import CODES, LIMIT, Kind, scales_of
from actors.engine.model.loading import inspect, load_decoder, memory_needed
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator

CPU = torch.device("cpu")
PROMPTS = ["name[Zizzi]", "food[French], area[city centre]", "The Eagle"]
native = pytest.mark.skipif(not library.quantizes(torch.bfloat16, CPU), reason="no kernel for 8 bits")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`compressed` of the base, each once."""
    known: dict[str, Path] = {}

    def make(kind: str, **how: Any) -> Path:
        name = f"{kind} {how}"
        if "groups" in how:
            how = {**how, "groups": [scheme(kind, **group) for group in how["groups"]]}
        if name not in known:
            known[name] = compressed(base, tmp_path_factory.mktemp("made") / "checkpoint", kind, **how)
        return known[name]

    return make


@torch.inference_mode()
def logits(decoder: Decoder) -> torch.Tensor:
    ids = torch.tensor([[5, 9, 3, 7, 250, 11]])
    hidden, rotary = decoder.embed(ids, torch.arange(6)[None])
    for layer in range(decoder.num_layers):
        hidden = decoder.run_layer(layer, hidden, rotary[layer], None)
    return decoder.logits(hidden[0]).float()


WAYS: dict[str, dict[str, Any]] = {
    "channel": {},
    "tensor": {"strategy": "tensor"},
    "static inputs": {"inputs": "static"},
    "weights alone": {"inputs": None, "layout": "naive-quantized"},
    "shards": {"shards": "20KB"},
    "short scales": {"dtype": torch.bfloat16},
    "all layers": {"ignore": ()},
    "some layers": {"ignore": ("lm_head", "re:.*layers.0.*", "model.layers.1.self_attn.q_proj")},
    "all but the first layer": {"ignore": ("lm_head", "re:.*layers.0.*")},
    "groups of layers": {"groups": ({"targets": "re:.*self_attn.*"}, {"targets": "re:.*mlp.*", "strategy": "tensor"})},
}
PACKED: dict[str, dict[str, Any]] = {  # int8 alone; the library's choice for weights alone
    **{way: WAYS[way] for way in ("channel", "tensor", "short scales", "shards", "all layers")},
    "group": {"strategy": "group"},
    "asymmetric": {"symmetric": False},
    "asymmetric tensor": {"symmetric": False, "strategy": "tensor"},
    "asymmetric group": {"symmetric": False, "strategy": "group"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CODES)
def test_weights_in_float32_are_those_that_the_libraries_expand(
    made: Callable[..., Path], kind: Kind, way: str, tmp_path: Path
) -> None:
    check_expanded(made(kind, **WAYS[way]), way, tmp_path)


@pytest.mark.parametrize("way", PACKED)
def test_packed_weights_are_those_that_the_libraries_expand(
    made: Callable[..., Path], way: str, tmp_path: Path
) -> None:
    folder = made("int8", **PACKED[way], inputs=None)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    check_expanded(folder, way, tmp_path)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
def test_asymmetric_weights_that_are_not_packed(made: Callable[..., Path], strategy: str, tmp_path: Path) -> None:
    """Products of their codes would need the zero points too: they are expanded."""
    folder = made("int8", symmetric=False, strategy=strategy)
    check_expanded(folder, strategy, tmp_path)
    stored = inspect(folder).stored
    assert stored is not None and not stored.multiplied
    assert not any(products(generator(folder).engine.decoder))
    decoder = load_decoder(folder, torch.bfloat16, CPU, keep_codes=True)
    kept = [module for module in decoder.model.modules() if scales_of(module) is not None]
    assert not kept or strategy == "tensor"  # of one scale a zero point may happen to be 0


def check_expanded(folder: Path, way: str, tmp_path: Path) -> None:
    """Weights, logits and planned memory of the checkpoint are those of its expansion by the libraries."""
    assert inspect(folder).stored is not None and (way != "shards" or len(list(folder.glob("*.safetensors"))) > 2)
    plain = expanded(folder, tmp_path / "plain")
    got, want = (load_decoder(path, torch.float32, CPU) for path in (folder, plain))
    state, wanted = (one.model.state_dict() for one in (got, want))
    assert state.keys() == wanted.keys()
    for name, weight in state.items():
        rounding = 2**-8 if way == "short scales" else 0  # theirs are in the dtype of their scales
        torch.testing.assert_close(weight, wanted[name], rtol=rounding, atol=0)
    assert torch.equal(logits(got), logits(want)) or way == "short scales"
    assert memory_needed(inspect(folder), "float32", 0, on_gpu=False) == memory_needed(
        inspect(plain), "float32", 0, on_gpu=False
    )


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 100),
    exponent=st.integers(-30, 10),
    wide=st.booleans(),
    seed=st.integers(0, 999),
)
def test_codes_are_found_again_in_expanded_weights(
    outputs: int, inputs: int, exponent: int, wide: bool, seed: int
) -> None:
    """Of any scale, whether stored in float32 or bfloat16: all codes there are."""
    chance = torch.Generator().manual_seed(seed)
    scales = (torch.rand(outputs, generator=chance) + 0.5) * 2.0**exponent
    scales = scales if wide else scales.bfloat16().float()
    codes = torch.randint(-128, 128, (outputs, inputs), generator=chance).to(torch.int8)
    weight = (codes.float() * scales[:, None]).bfloat16()
    found, kept = quantize_weight(weight, scales)
    assert torch.equal(found[:, :inputs], codes) and torch.equal(kept, scales)


def products(decoder: Decoder) -> list[bool]:
    """Return whether each product of the layers has 8 bits: of a stack four a layer, else seven."""
    if isinstance(decoder, StackDecoder):
        return [isinstance(one, QuantizedProduct) for _, parts, _ in decoder.stack._held[0] for one in parts]
    linear = [one for block in decoder.blocks for one in block.modules() if isinstance(one, PackedLinear)]
    return [isinstance(one.product, QuantizedProduct) for one in linear]


def generator(folder: Path, **settings: Any) -> Generator:
    return Generator(str(folder), **{"device": "cpu", "sampling": {"max_new_tokens": 8}, "unadapted": True, **settings})


@native
@pytest.mark.parametrize("way", ["channel", "tensor", "static inputs", "all layers", "some layers", "shards"])
def test_int8_runs_in_8_bits_on_a_cpu(made: Callable[..., Path], way: str) -> None:
    """The layers that the checkpoint has in 8 bits, by its own codes; answers near those of the expanded weights."""
    folder = made("int8", **WAYS[way])
    own = generator(folder).engine.decoder
    if way == "some layers":  # not q of a layer, which a stack has as one product with k and v
        assert not isinstance(own, StackDecoder)
        assert products(own) == [False] * (7 + 1) + [True] * (7 * LAYERS - 8)
    else:
        assert isinstance(own, StackDecoder) and products(own) == [True] * 4 * LAYERS
    assert isinstance(own.head, PackedLinear)
    assert isinstance(own.head.product, QuantizedProduct) == (way == "all layers")
    stored = load_decoder(folder, torch.bfloat16, CPU, keep_codes=True)
    for block in stored.blocks:
        if (kept := scales_of(block.mlp.down_proj)) is not None:
            codes, scales = quantize_weight(block.mlp.down_proj.weight, kept)
            name = f"model.layers.{block.self_attn.layer_idx}.mlp.down_proj"
            theirs = next(
                held for path in folder.glob("*.safetensors") if f"{name}.weight" in (held := load_file(path))
            )
            assert torch.equal(codes[:, :64], theirs[f"{name}.weight"])
            assert torch.equal(scales, theirs[f"{name}.weight_scale"].float().reshape(-1).expand(32))
    reference = logits(load_decoder(folder, torch.float32, CPU))
    error = (logits(own) - reference).abs() / reference.std()
    assert 0 < error.mean() < 0.1 and error.max() < 0.6


@native
def test_layers_of_both_kinds_are_one_stack(made: Callable[..., Path]) -> None:
    """A plain first layer, and codes in the others: steps of many rows, more than their prompt has tokens."""
    folder = made("int8", **WAYS["all but the first layer"])
    own = generator(folder, sampling={"max_new_tokens": 4, "n": 64, "temperature": 1.0})
    assert isinstance(own.engine.decoder, StackDecoder)
    assert products(own.engine.decoder) == [False] * 4 + [True] * 4 * (LAYERS - 1)
    answers = own({"prompt": np.array(PROMPTS[-1:])})
    assert len(answers["generated_text"]) == 64


@native
def test_weights_int8_takes_the_head_too(made: Callable[..., Path]) -> None:
    own = generator(made("int8"), weights="int8").engine.decoder
    assert all(products(own)) and isinstance(own.head.product, QuantizedProduct)
    other = generator(made("fp8"), weights="int8").engine.decoder  # its codes are not int8
    assert all(products(other))


@pytest.mark.parametrize(
    ("kind", "way", "settings"),
    [
        ("fp8", "channel", {}),
        ("fp8", "tensor", {}),
        ("int8", "weights alone", {}),
        ("int8", "channel", {"dtype": "float16"}),
        ("int8", "channel", {"dtype": "float32"}),
    ],
)
def test_where_8_bits_do_not_run_weights_are_expanded_and_a_line_says_so(
    made: Callable[..., Path],
    kind: Kind,
    way: str,
    settings: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = made(kind, **WAYS[way])
    with caplog.at_level(logging.INFO):
        got = generator(folder, **settings)
    lines = [line for line in caplog.messages if "expanded" in line]
    assert lines == [f"{folder}: expanded {kind} weights to {settings.get('dtype', 'bfloat16')}"]
    assert all(scales_of(module) is None for module in got.engine.decoder.model.modules())
    if "dtype" in settings:
        return
    plain = AutoModelForCausalLM.from_pretrained(expanded(folder, tmp_path / "plain"), dtype=torch.float32)
    plain.load_state_dict(load_decoder(folder, torch.float32, CPU).model.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    column = {"prompt": np.array(PROMPTS)}
    wanted = generator(tmp_path / "plain")(column)
    assert got(column)["generated_text"].tolist() == wanted["generated_text"].tolist()


@pytest.mark.parametrize("kind", CODES)
def test_tied_heads(base: Path, kind: Kind, tmp_path: Path) -> None:
    """One tensor for embedding and head: plain, in codes, and a plain embedding with a head of its own in codes."""
    tied = Path(shutil.copytree(base, tmp_path / "tied"))
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(tied)
    folder = compressed(tied, tmp_path / "c", kind)
    held, table = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    assert "lm_head.weight" not in held
    got, want = (load_decoder(path, torch.float32, CPU) for path in (folder, expanded(folder, tmp_path / "plain")))
    assert got.model.lm_head.weight is got.model.model.embed_tokens.weight
    assert torch.equal(logits(got), logits(want))
    plain = held[table]
    scales = plain.abs().amax(dim=1) / (LIMIT if kind == "int8" else torch.finfo(torch.float8_e4m3fn).max)
    codes = (plain / scales.clamp(min=1e-9)[:, None]).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    near = codes.float() * scales[:, None]
    for coded, expected in (([table], near), (["lm_head.weight"], plain), ([table, "lm_head.weight"], near)):
        of_codes = {name: codes.clone() for name in coded} | {f"{name}_scale": scales.clone() for name in coded}
        save_file({**held, **of_codes}, folder / "model.safetensors", {"format": "pt"})
        model = load_decoder(folder, torch.float32, CPU).model
        assert torch.equal(model.model.embed_tokens.weight, expected) and torch.equal(model.lm_head.weight, near)


@native
def test_a_speed_adapter_is_merged_into_expanded_weights(
    base: Path, made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers keep 8 bits, by scales of their own; at full depth the checkpoint's."""
    folder = made("int8")
    spec = ScheduleSpec(speedup=2, horizon=4, warmup=2)
    adapter = random_adapter(base, tmp_path / "adapter", spec)
    record = json.loads((adapter / "speed_adapter.json").read_text())
    from actors.engine.model.speed_adapter import base_digest

    (adapter / "speed_adapter.json").write_text(json.dumps({**record, "base": base_digest(folder)}))
    fast = generator(folder, speed_adapter=str(adapter)).engine.decoder
    assert all(products(fast)) and isinstance(fast, StackDecoder)
    plain = generator(folder, speed_adapter=str(adapter), dtype="float32").engine.decoder
    error = (logits(fast) - logits(plain)).abs() / logits(plain).std()
    assert 0 < error.mean() < 0.15
    full = generator(folder, speed_adapter=str(adapter), schedule={"speedup": 1.0}).engine.decoder
    assert torch.equal(logits(full), logits(generator(folder).engine.decoder))


def of_group(weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The entry of config.json with changes of its one group, and of the weights in it."""
    group = scheme("int8") | more
    return {"config_groups": {"group_0": group | {"weights": group["weights"] | (weights or {})}}}


GROUPED = {"strategy": "group", "group_size": 16}
REFUSED: dict[str, dict[str, Any]] = {
    "4 bits": of_group({"num_bits": 4}),
    "actorder group": of_group({**GROUPED, "actorder": "group"}),
    "actorder DYNAMIC": of_group({**GROUPED, "actorder": "DYNAMIC"}),
    "actorder True": of_group({**GROUPED, "actorder": True}),
    "strategy block": of_group({"strategy": "block"}),
    "format marlin-24": of_group(format="marlin-24"),
    "type float in format pack-quantized": of_group({"type": "float"}, format="pack-quantized"),
    "transform_config": {"transform_config": {"config_groups": {"R1": {}}}},
    "sparsity_config": {"sparsity_config": {"format": "sparse-bitmask"}},
    "a scheme that cannot be read": of_group({"type": ["int"]}),
    "several schemes": {"config_groups": {"a": scheme("int8"), "b": {**scheme("fp8"), "format": "float-quantized"}}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(made: Callable[..., Path], name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made("int8"), tmp_path / "c"))
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= REFUSED[name]
    (folder / "config.json").write_text(json.dumps(values))
    refused = rf"^{folder}: quantized weights \(compressed-tensors, {name}\) are not supported; give the bfloat16"
    with pytest.raises(UserError, match=refused) as caught:
        inspect(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CODES)
def test_scales_that_do_not_fit_are_refused(made: Callable[..., Path], kind: Kind, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(kind), tmp_path / "c"))
    whole, name = load_file(folder / "model.safetensors"), "model.layers.2.mlp.up_proj"

    def refused(match: str, **values: torch.Tensor | None) -> None:
        changed = {key: value for key, value in {**whole, **values}.items() if value is not None}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=match) as caught:
            load_decoder(folder, torch.bfloat16, CPU)
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)

    refused(f"no weight_scale for the 8-bit weight of {name}; fetch", **{f"{name}.weight_scale": None})
    refused(
        rf"weight_scale of {name} has shape \[3, 1\], which does not fit the weight \[64, 32\]",
        **{f"{name}.weight_scale": torch.ones(3, 1)},
    )
    refused("model.norm has a weight_scale, but no 8-bit weight", **{"model.norm.weight_scale": torch.ones(1)})
    refused(f"{name} has a weight_scale, but no 8-bit weight", **{f"{name}.weight": torch.ones(64, 32)})
    other = {f"{name}.weight": torch.ones(64, 32).to(torch.float8_e4m3fn if kind == "int8" else torch.int8)}
    refused(rf"the weight of {name} is (I8|F8_E4M3), but config.json says {kind}; fetch", **other)
    table = {
        "model.norm.weight": whole[f"{name}.weight"][:32, 0].contiguous(),
        "model.norm.weight_scale": torch.ones(1),
    }
    refused("but is no linear layer", **table)
    points = f"{name}.weight_zero_point"
    refused(
        f"{points.rpartition('.')[2]} of {name} is not zero, but .* symmetric; fetch", **{points: torch.ones(64, 1)}
    )
    refused(r"weight_zero_point of type torch.float32 and shape \[3, 1\] does not fit", **{points: torch.ones(3, 1)})
    for shape in ((), (16,), (64,), (64, 1), (1, 16, 1)):
        shown = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
        refused(f"torch.int32 and shape {shown} does not", **{points: torch.ones(shape, dtype=torch.int32)})
    for shape in ((0,), (0, 1), (64, 0)):
        shown = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
        refused(f"weight_scale of {name} has shape {shown}, which does", **{f"{name}.weight_scale": torch.ones(shape)})
    if kind == "int8":
        no_weight = {f"{name}.weight": None, f"{name}.weight_packed": torch.ones(64, 7, dtype=torch.int32)}
        refused(rf"weight_packed of {name} has shape \[64, 7\], which does not fit the weight \[64, 32\]", **no_weight)
