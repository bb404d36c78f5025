"""What safetensors headers tell, and that files which are not whole are known by them."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from tiny_models import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.errors import UserError
from actors.engine.model.fitting import check_tensors
from actors.engine.model.loading import inspect, load_decoder, memory_needed
from actors.engine.model.weights import (
    ALLOWANCE,
    INDEX,
    Need,
    StoredTensor,
    check_free,
    file_tensors,
    folder_tensors,
    need,
    weight_files,
)

SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=8), st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5
)


def tensors_of(data: bytes) -> dict[str, StoredTensor]:
    return file_tensors(lambda count, first: data[first : first + count], len(data), "file")


@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_headers_tell_what_the_library_wrote(shapes: dict[str, list[int]], dtype: torch.dtype) -> None:
    data = save({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, {"format": "pt"})
    assert tensors_of(data) == {name: ("file", tuple(shape)) for name, shape in shapes.items()}


@given(SHAPES, st.data())
def test_a_file_cut_short_or_continued_is_refused(shapes: dict[str, list[int]], data: st.DataObject) -> None:
    whole = save({name: torch.ones(shape) for name, shape in shapes.items()})
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0"):
        with pytest.raises(ValueError, match=r"^file: [^\n]*$"):
            tensors_of(wrong)


@given(st.binary(max_size=60))
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^file: [^\n]*$"):
        tensors_of(len(data).to_bytes(8, "little") + data + b"x")


def test_an_index_names_the_files(tmp_path: Path) -> None:
    def refused(match: str, names: list[str]) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            weight_files(tmp_path, names)
        assert "\n" not in str(caught.value)

    index = tmp_path / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"}}))
    assert weight_files(tmp_path, [INDEX, "y.safetensors", "x.safetensors", "z.safetensors"]) == [
        "x.safetensors",
        "y.safetensors",
    ]
    refused(
        "model.safetensors lies beside .*index.json and its shards, and .*: remove one", [INDEX, "model.safetensors"]
    )
    refused(r"1 of 2 shards in .*index\.json are missing, e\.g\. y\.safetensors: fetch", [INDEX, "x.safetensors"])
    for outside in ("../x.safetensors", "/x.safetensors", "folder/x.safetensors", "x.bin", 7):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        refused("which is no safetensors file in its folder", [INDEX, "x.safetensors"])
    index.write_text('{"weight_map": {}}')
    refused(r"index\.json: names no file: fetch", [INDEX])
    for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": []}}'):
        index.write_text(text)
        refused("not an index of weights", [INDEX])


def save_checkpoint(folder: Path, model: torch.nn.Module, **how: str) -> Path:
    model.save_pretrained(folder, **how)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_need_is_what_the_loaded_model_holds(tmp_path: Path, family: str) -> None:
    """OPT's head is its embedding: once in memory, whether it is stored once or twice. On a CPU the head is also packed
    and in 8 bits."""
    model = tiny_model(family)
    save_checkpoint(tmp_path, model, max_shard_size="20KB")
    found = memory_needed(inspect(tmp_path), "bfloat16", 1000, on_gpu=True)
    loaded = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu")).model
    held = sum(parameter.numel() for parameter in loaded.parameters())
    assert (found.parameters, found.weights) == (held, 2 * held)
    assert found.total == 2 * held + 1000 + ALLOWANCE
    packed = memory_needed(inspect(tmp_path), "bfloat16", 1000, on_gpu=False).weights - found.weights
    assert packed == 97 * 32 * 2 + 97 * 32 * 17 // 16
    if family == "opt":
        twice = {**folder_tensors(tmp_path), "lm_head.weight": StoredTensor("head", (97, 32))}
        assert need(twice, tied=True, dtype="float32", cache_bytes=0).parameters == held
        head_only = {name: one for name, one in twice.items() if not name.endswith("embed_tokens.weight")}
        assert len(head_only) == len(twice) - 1
        assert need(head_only, tied=True, dtype="float32", cache_bytes=0).parameters == held


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    one = save_checkpoint(tmp_path / "one", tiny_model("llama"))
    many = save_checkpoint(tmp_path / "many", tiny_model("llama"), max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 2 and not (many / "model.safetensors").exists()
    loaded = [load_decoder(folder, torch.float32, torch.device("cpu")).model.state_dict() for folder in (one, many)]
    assert loaded[0].keys() == loaded[1].keys()
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])
    shard = sorted(many.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name}: .* bytes, but its header says .*: cut short or damaged"):
        memory_needed(inspect(many), "float32", 0, on_gpu=False)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"1 of \d+ shards in .* are missing, e\.g\. {shard.name}"):
        inspect(many)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder, metadata={"format": "pt"})


def refusal_of(folder: Path) -> str:
    """That of the headers; a load says the same."""
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        check_tensors(inspect(folder).config, folder_tensors(folder), str(folder))
    with pytest.raises(UserError) as loaded:
        load_decoder(folder, torch.float32, torch.device("cpu"))
    assert str(loaded.value) == str(caught.value)
    return str(caught.value)


def test_a_tensor_of_two_files_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_model("llama"), max_shard_size="20KB")
    first, second = sorted(folder.glob("*.safetensors"))[1:3]
    name = next(iter(load_file(first)))
    saved(second, {**load_file(second), name: torch.zeros(3, 4)})
    refused = refusal_of(folder)
    assert refused.startswith(f"{first}: {name} [") and f"is also in {second}, [3, 4]: only one can" in refused


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "reason"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", (60, 32), "[60, 32], not [64, 32]"),
        ("llama", "model.embed_tokens.weight", (99, 32), "[99, 32], not [97, 32]"),
        ("llama", "model.layers.6.mlp.up_proj.weight", (64, 32), "no weight of this llama model"),
        ("gpt2", "transformer.h.9.mlp.c_fc.bias", (128,), "no weight of this gpt2 model"),
        ("llama", "model.layers.0.self_attn.q_proj.bias", (32,), "no weight of this llama model"),
        ("llama", "model.layers.0.self_attn.q_norm.weight", (8,), "no weight of this llama model"),
        ("llama", "lm_head.bias", (97,), "no weight of this llama model"),
    ],
)
def test_tensors_that_are_not_the_configs_are_refused_before_they_are_read(
    tmp_path: Path, name: str, tensor: str, shape: tuple[int, ...], reason: str
) -> None:
    folder = save_checkpoint(tmp_path, tiny_model(name))
    check_tensors(inspect(folder).config, folder_tensors(folder), "m")
    path = folder / "model.safetensors"
    saved(path, {**load_file(path), tensor: torch.zeros(shape)})
    assert f"{path}: {tensor} does not fit config.json ({reason})" in refusal_of(folder)


def test_a_missing_weight_is_known_from_the_headers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_model("llama"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    saved(path, tensors)
    assert refusal_of(folder).startswith(f"{folder}: model.norm.weight does not fit config.json (missing)")


@pytest.mark.parametrize(
    ("name", "prefix", "more"),
    [
        ("gpt2", "transformer.", {"h.0.attn.bias": (1, 1, 8, 8), "h.0.attn.masked_bias": ()}),
        ("llama", "model.", {"layers.0.self_attn.rotary_emb.inv_freq": (4,), "score.weight": (1, 32)}),
        ("gpt-neox", "gpt_neox.", {"layers.0.attention.bias": (1, 1, 8, 8), "layers.0.attention.masked_bias": ()}),
    ],
)
def test_names_without_prefix_and_constants_of_older_files_are_taken(
    tmp_path: Path, name: str, prefix: str, more: dict[str, tuple[int, ...]]
) -> None:
    folder = save_checkpoint(tmp_path, tiny_model(name))
    path = folder / "model.safetensors"
    plain = {key.removeprefix(prefix): tensor for key, tensor in load_file(path).items()}
    saved(path, plain | {key: torch.zeros(shape) for key, shape in more.items()})
    check_tensors(inspect(folder).config, folder_tensors(folder), "m")
    load_decoder(folder, torch.float32, torch.device("cpu"))


def test_a_gpu_that_is_too_full_is_said_in_one_line() -> None:
    needed = Need(10**9, 2 * 10**9, 2**30)
    check_free(needed, needed.total, 2**34)
    with pytest.raises(ValueError, match=r"needs 3\.4 GiB of GPU memory \(weights 1\.9 GiB, cache 1\.0 GiB") as caught:
        check_free(needed, needed.total - 1, 2**34)
    assert "are free: lower actors.cache_bytes" in str(caught.value) and "\n" not in str(caught.value)


@contextmanager
def own_memory() -> Iterator[list[int]]:
    """Bytes of this process's own memory, not of mapped files, sampled while it lasts."""
    found: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")))

    def samples() -> None:
        while not ended.wait(0.001):
            sample()

    sample()
    thread = threading.Thread(target=samples)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_weights_are_loaded_in_their_dtype_without_a_copy_between(tmp_path: Path) -> None:
    """fp32 on disk, bf16 in memory: never more than the latter and a few tensors."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8
    )
    save_checkpoint(tmp_path, LlamaForCausalLM(config))
    weights = memory_needed(inspect(tmp_path), "bfloat16", 0, on_gpu=True).weights
    assert weights > 40 * 2**20
    load_decoder(tmp_path, torch.bfloat16, torch.device("cpu"))  # imports, pools
    gc.collect()  # a model is part of a cycle: freed while the next one is loaded, it would hide that one's memory
    with own_memory() as sampled:
        model = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu")).model
        assert {(one.dtype, one.device.type) for one in model.parameters()} == {(torch.bfloat16, "cpu")}
        decoder = fastest_decoder(model)
    assert decoder.dtype == torch.bfloat16
    grown = max(sampled) - sampled[0]
    assert grown < 1.5 * weights, f"{grown / weights:.2f} times the weights"
