from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import LAYERS, tiny_model
from transformers import PreTrainedModel

from actors.engine.errors import UserError
from actors.engine.model.fitting import check_tensors
from actors.engine.model.loading import inspect, load_decoder
from actors.engine.model.weights import folder_tensors
from actors.engine.schedule.file import Trained, save_spec
from actors.engine.schedule.schedule import ScheduleSpec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkpoint_is_looked_at_and_loaded(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    assert (found.num_layers, found.context_length, found.spec) == (LAYERS, 64, None)
    assert found.schedule({}).depths == (LAYERS,)
    decoder = load_decoder(checkpoint, torch.bfloat16, torch.device("cpu"))
    assert (decoder.num_layers, decoder.kv_heads, decoder.head_dim, decoder.dtype) == (LAYERS, 2, 8, torch.bfloat16)


def test_threads_load_at_the_same_time(checkpoint: Path) -> None:
    before = PreTrainedModel.tie_weights, torch.get_default_dtype()
    start = threading.Barrier(4)

    def load(_: int) -> torch.dtype:
        start.wait()
        return load_decoder(checkpoint, torch.bfloat16, torch.device("cpu")).dtype

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(load, range(4))) == [torch.bfloat16] * 4
    assert (PreTrainedModel.tie_weights, torch.get_default_dtype()) == before


def test_a_speed_above_the_trained_ones_is_refused_with_the_largest_of_them(checkpoint: Path) -> None:
    def refusal(**changes: object) -> str:
        with pytest.raises(UserError) as caught:
            inspect(checkpoint).adapted_schedule(changes, "m", "set it")
        return str(caught.value)

    untrained = refusal(speedup=2.0)  # before it asks for a horizon
    assert "m is not adapted to this schedule (it has no skipdecode.json)" in untrained
    assert "run `skipdecode adapt JOB`, or set it" in untrained
    spec = ScheduleSpec(speedup=2, horizon=9)
    save_spec(spec, LAYERS, checkpoint, Trained.on(spec.build(LAYERS), [spec.build(LAYERS)]))
    assert inspect(checkpoint).adapted_schedule({"speedup": 1.5}, "m", "set it").depths[-1] == 3
    lines = [refusal(speedup=2.0, horizon=3), refusal(speedup=3.0)]
    assert all("trained down to" in line for line in lines)
    assert "largest speedup" not in lines[0] and "; the largest speedup is 2.25)" in lines[1]


def test_bad_checkpoints_are_refused_in_one_line(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    def refused(match: str, path: Path = checkpoint) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            inspect(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)

    refused("no such checkpoint folder", checkpoint / "none")
    refused("no config.json", tmp_path_factory.mktemp("empty"))
    edit(checkpoint / "config.json", model_type="bloom")
    refused("'bloom' is not supported; supported: llama, mistral, ")
    edit(checkpoint / "config.json", model_type="nobody-knows")
    refused("nobody-knows")
    edit(checkpoint / "config.json", model_type=None)
    refused("model_type None is not supported; supported: llama, ")
    edit(checkpoint / "config.json", model_type="llama", rms_norm_eps="x")
    refused("Validation error for field 'rms_norm_eps': TypeError: .* expected float, got str")  # the whole message
    edit(checkpoint / "config.json", rms_norm_eps=1e-5, auto_map={"AutoConfig": "x.py"})
    refused("auto_map")
    text = json.loads((checkpoint / "config.json").read_text())
    del text["auto_map"]
    (checkpoint / "config.json").write_text(json.dumps(text))
    (checkpoint / "skipdecode.json").write_text('{"num_layers": 4}')
    refused("made for num_layers = 4, but the model has 6 layers")
    (checkpoint / "skipdecode.json").unlink()
    inspect(checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    refused("no tokenizer")
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused("no safetensors weights .* pytorch_model.bin is a pickle")
    (checkpoint / "config.json").write_text("{")
    refused("not JSON")


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"compression_config": {"format": "int-quantized"}}, "compression_config"),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_name(checkpoint: Path, entry: dict[str, object], name: str) -> None:
    edit(checkpoint / "config.json", **entry)
    with pytest.raises(UserError) as caught:
        inspect(checkpoint)
    assert str(caught.value) == (
        f"{checkpoint}: quantized weights ({name}) run only in vLLM: set model.engine: vllm, or give the publisher's "
        "bfloat16 checkpoint"
    )
    assert not inspect(checkpoint, by_vllm=True).in_library


def test_one_file_of_a_checkpoint_is_refused(checkpoint: Path) -> None:
    for path in (checkpoint / "model.safetensors", "m/model.gguf", checkpoint / "config.json"):
        with pytest.raises(UserError, match=rf"^{path}: is a file; give the folder of the publisher's checkpoint"):
            inspect(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 100_000_000),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "6"),
        ("num_attention_heads", 0),
        ("hidden_size", 2**40),
        ("vocab_size", -1),
        ("intermediate_size", 10**400),
    ],
)
def test_sizes_that_no_model_has_are_refused(checkpoint: Path, name: str, value: object) -> None:
    edit(checkpoint / "config.json", **{name: value})
    with pytest.raises(UserError, match=r"config\.json") as caught:
        check_tensors(inspect(checkpoint).config, folder_tensors(checkpoint), str(checkpoint))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["bloom", "mamba", "mpt"])
def test_vllm_limits_the_context_of_a_model_whose_config_does_not(checkpoint: Path, family: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": family}))
    assert inspect(checkpoint, by_vllm=True).context_length == 2**28


@pytest.mark.parametrize(("family", "name"), [("encodec", "num_hidden_layers"), ("llama", "max_position_embeddings")])
def test_vllm_gets_no_config_that_cannot_be_read(checkpoint: Path, family: str, name: str) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": family, "max_position_embeddings": None}))
    with pytest.raises(UserError, match=rf"^{checkpoint}: config.json: \w+Error: .*{name}") as caught:
        inspect(checkpoint, by_vllm=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "skipdecode.json"])
def test_json_nested_too_deeply_is_refused_in_one_line(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("[" * 100_000)
    with pytest.raises(UserError, match=rf"^{checkpoint}/{name}: JSON is nested too deeply for a checkpoint's file$"):
        inspect(checkpoint)


def test_an_index_or_header_nested_too_deeply_is_refused_in_one_line(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"not an index of weights"):
        inspect(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    with pytest.raises(UserError, match=r"model\.safetensors: not a safetensors file: its header cannot be read"):
        folder_tensors(checkpoint)
