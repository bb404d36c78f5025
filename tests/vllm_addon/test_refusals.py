"""The add-on refuses what it would answer wrongly, in one line, before vLLM loads a weight where it can."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import vllm
import vllm_cases as cases
from random_adapter import random_adapter
from torch import Tensor, nn
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.vllm import loader, worker
from actors.vllm.layers import LayerSkipper
from actors.vllm.scheduler import PromptCache
from actors.vllm.settings import Settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.checkpoint(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def config(folder: Path) -> Any:
    return EngineArgs(str(folder), **{**cases.ENGINE, "worker_cls": "auto"}).create_engine_config()


FALLING = ScheduleSpec(speedup=2, horizon=9).build(cases.LAYERS)
UNIFORM = ScheduleSpec(max_depth=3, prompt="first").build(cases.LAYERS)
ALWAYS = (  # also if depth is constant
    *("KV cache transfer", "pipeline parallelism", "expert load balancing"),
    "fast prefill with a shared KV cache",
)


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("", {"speculative_config": object()}, "speculative decoding"),
        ("", {"lora_config": object()}, "LoRA adapters"),
        ("", {"kv_transfer_config": object()}, "KV cache transfer"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ("parallel_config", {"enable_eplb": True}, "expert load balancing"),
        ("parallel_config", {"enable_expert_parallel": True}, "expert parallelism"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
        ("model_config", {"enforce_eager": False}, "compilation and CUDA graphs: pass enforce_eager"),
        ("model_config", {"runner_type": "pooling"}, "pooling"),
        ("cache_config", {"kv_sharing_fast_prefill": True}, "fast prefill with a shared KV cache"),
        ("scheduler_config", {"scheduler_cls": None}, "pass scheduler_cls=actors.vllm.scheduler.SkipAsyncScheduler"),
    ],
)
def test_settings_that_skipping_breaks_are_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch, part: str, changes: dict[str, Any], reason: str
) -> None:
    monkeypatch.setitem(vars(config.cache_config), "enable_prefix_caching", True)
    worker.refuse_unsupported(config, FALLING)
    for name, value in changes.items():
        monkeypatch.setitem(vars(getattr(config, part) if part else config), name, value)
    with pytest.raises(UserError, match=re.escape(reason)) as refused:
        worker.refuse_unsupported(config, FALLING)
    assert "\n" not in str(refused.value)
    if reason in ALWAYS:
        with pytest.raises(UserError, match=re.escape(reason)):
            worker.refuse_unsupported(config, UNIFORM)
    else:
        worker.refuse_unsupported(config, UNIFORM)


def test_encoders_are_refused() -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, enable_eplb=False),
        model_config=SimpleNamespace(is_encoder_decoder=True),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
    )
    with pytest.raises(UserError, match="cannot be combined with encoders"):
        worker.refuse_unsupported(config, UNIFORM)


@pytest.mark.parametrize("version", ["0.33.0", "0.31.2", "1.32.0", "0.320.0"])
def test_another_minor_version_of_vllm_is_refused(config: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UserError, match=rf"vLLM {version} is installed, but 0\.32 is needed"):
        worker.refuse_unsupported(config, UNIFORM)


def attention(kind: type, target: str | None = None) -> Any:
    layer = kind.__new__(kind)
    layer.__dict__["kv_sharing_target_layer_name"] = target
    return layer


def test_layers_and_attention_that_are_not_known_are_refused() -> None:
    class Layer(nn.Module):
        def forward(self, positions: Tensor, hidden_states: Tensor, per_layer_input: Tensor) -> Tensor:
            return hidden_states

    skipper = LayerSkipper(ScheduleSpec(speedup=2, horizon=4).build(1), {}, lambda common: common)
    with pytest.raises(UserError, match=r"layer 0 takes the arguments positions, hidden_states, per_layer_input; the"):
        skipper.wrap([Layer()])
    with pytest.raises(UserError, match="attention by SimpleNamespace is not supported"):
        skipper.watch(SimpleNamespace(requires_block_table_width=True))
    with pytest.raises(UserError, match=r"layers\.1\.attn reads the keys and values of another layer"):
        worker.attention_layers({"layers.1.attn": attention(Attention, "layers.0.attn")})
    with pytest.raises(UserError, match=r"layers\.0\.attn is a ChunkedLocalAttention, which is not supported"):
        worker.attention_layers({"layers.0.attn": attention(ChunkedLocalAttention)})
    with pytest.raises(UserError, match="has 0 lists of 6 modules, not one"):
        loader.decoder_layers(nn.ModuleList([nn.Linear(1, 1)]), 6)
    layers = nn.ModuleList([Layer()])
    with pytest.raises(UserError, match="ModuleList does not support pipeline parallelism in vLLM, so it cannot leave"):
        loader.drop_layers(layers, layers, [0], None)
    with pytest.raises(UserError, match=r"layer 0 takes the arguments positions, hidden_states, per_layer_input; the"):
        loader.DroppedLayer(0, layers[0])


def test_a_layer_that_reads_a_dropped_layers_keys_is_refused() -> None:
    gone, reader = nn.Linear(1, 1), nn.Linear(1, 1)
    reader.kv_sharing_target_layer_name = "layers.0.attn"  # type: ignore[assignment]
    registered = {"layers.0.attn": gone, "layers.1.attn": reader}
    with pytest.raises(UserError, match=r"layers\.1\.attn reads the keys and values of layers\.0\.attn, which the sch"):
        loader._unregister(registered, [nn.ModuleList([gone])])


def test_a_model_without_training_and_a_foreign_adapter_are_refused_before_weights_load(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.PlatformWorker, "load_model", None)
    with (
        pytest.raises(UserError, match="is not adapted to the schedule"),
        cases.engine(folder, {"speedup": 2, "horizon": 9}),
    ):
        pass
    other = cases.checkpoint(tmp_path, "opt")
    adapter = random_adapter(other, tmp_path / "adapter", ScheduleSpec(speedup=2, horizon=9))
    with (
        pytest.raises(UserError, match="trained for a base with weights"),
        cases.engine(folder, {"speed_adapter": str(adapter)}),
    ):
        pass


def test_input_that_streams_into_a_request_is_refused() -> None:
    with pytest.raises(UserError, match="input that streams into a request is not supported"):
        PromptCache.add_request(SimpleNamespace(is_uniform=False), SimpleNamespace(resumable=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "fp8"}, "speed_adapter cannot be merged into fp8 weights"),
        ({"model": "owner/name"}, "speed_adapter needs a base model in a folder, but owner/name is not a folder"),
    ],
)
def test_a_speed_adapter_needs_plain_weights_in_a_folder(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = config.model_config.model
    adapter = random_adapter(Path(folder), tmp_path / "adapter", ScheduleSpec(max_depth=3, prompt="first"))
    monkeypatch.setattr(config, "additional_config", {"skipdecode": {"speed_adapter": str(adapter)}})
    for name, value in changes.items():
        monkeypatch.setitem(vars(config.model_config), name, value)
    with pytest.raises(UserError, match=message):
        worker.SkipWorker(config)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "TokenizersBackend"])
def test_a_tokenizer_that_vllm_reads_otherwise_is_a_warning(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cases.text_checkpoint(tmp_path)
    cases.name_tokenizer(folder, name)
    with cases.engine(folder, {"speedup": 1}, skip_tokenizer_init=False):
        pass
    said = [record.getMessage() for record in caplog.records if record.name == worker.log.name]
    assert (f"{folder}: transformers' GPT2Tokenizer cuts" in " ".join(said)) == (name == "GPT2Tokenizer")


def test_load_formats_that_hold_no_layers_by_name_are_refused() -> None:
    with pytest.raises(UserError, match="load_format tensorizer cannot be combined with a speed_adapter or"):
        loader.use_loader(SimpleNamespace(load_format="tensorizer"), None, [1])


def test_a_running_engine_of_one_speed_refuses_another_and_foreign_weights() -> None:
    running: Any = SimpleNamespace(skipper=None, skip_settings=Settings(UNIFORM, speed_adapter="adapter"))
    with pytest.raises(UserError, match="this engine runs 3 of 6 layers for every token and cannot change its speed: "):
        worker.SkipWorker.set_schedule(running, FALLING)
    with pytest.raises(UserError, match="reload_weights cannot merge the speed_adapter into other weights"):
        worker.SkipWorker.reload_weights(running, weights_path="other")
