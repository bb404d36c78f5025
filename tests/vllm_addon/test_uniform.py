"""A schedule in which every token runs the same layers is a shallower model, which vLLM runs as any other."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import torch
import vllm_cases as cases
from random_adapter import random_adapter
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import _model_to_pp_missing_layer_names

from actors.engine.schedule.file import save_spec
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator
from actors.settings import EngineSettings
from actors.vllm import worker
from actors.vllm.worker import KEPT_LAYERS

ROOT = Path(__file__).parents[2]
UNIFORM = {
    "2x": ScheduleSpec(depths=(3,), keep_order=(0, 5, 2, 1, 4, 3), prompt="first"),
    "without layer 0": ScheduleSpec(depths=(2,), keep_order=(3, 1, 5, 0, 4, 2), warmup=0, prompt="first"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.checkpoint(tmp_path_factory.mktemp("models"), "llama")


def settings(spec: ScheduleSpec) -> dict[str, Any]:
    return {**spec.to_dict(), "unadapted": True}


def shallower_answers(
    folder: Path, layers: tuple[int, ...], prompts: cases.Prompts, limits: list[int]
) -> list[list[int]]:
    """The greedy answers of transformers' model with these layers only, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.model.layers = torch.nn.ModuleList([model.model.layers[layer] for layer in layers])
    model.config.num_hidden_layers = len(layers)
    answers = []
    for prompt, limit in zip(prompts, limits, strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(limit):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answers.append(ids[len(prompt) :])
    return answers


# vLLM changes transformers' OLMo 2 classes for the rest of the process, so `test_answers` alone can test this family
@pytest.mark.parametrize("model_type", sorted(cases.SHAPES.keys() - {"olmo2"}))
def test_families_answer_as_the_library_engine_and_as_wrapped_layers(tmp_path: Path, model_type: str) -> None:
    """Eager. The second pass finds prompts, and the third one whole answers, in the prefix cache."""
    model = cases.checkpoint(tmp_path, model_type)
    prompts, limits = cases.rows(6, shortest=33)
    built = {name: spec.build(cases.LAYERS) for name, spec in UNIFORM.items()}
    if model_type in cases.MODELS:
        wanted = {name: cases.library_answers(model, spec, prompts, limits) for name, spec in UNIFORM.items()}
    else:
        wanted = {name: shallower_answers(model, one.prompt_layers, prompts, limits) for name, one in built.items()}
    assert len({str(answers) for answers in wanted.values()}) == len(UNIFORM)
    with cases.engine(model) as llm:  # one that began with a schedule that falls
        for name, schedule in built.items():
            llm.collective_rpc("set_schedule", args=(schedule,))
            assert cases.answers(llm, prompts, limits) == wanted[name], name
    for name, spec in UNIFORM.items():
        kept = list(built[name].prompt_layers)
        # by default, vLLM keeps of a prompt alone what a window reads
        how: dict[str, Any] = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None}
        with cases.engine(model, settings(spec), **how) as llm:
            for _ in range(2):
                assert cases.answers(llm, prompts, limits) == wanted[name], name
            assert cases.skipper(llm) is None
            longer = [[*prompt, *answer] for prompt, answer in zip(prompts, wanted[name], strict=True)]
            found = llm.generate(
                [{"prompt_token_ids": ids} for ids in longer],
                cases.vllm.SamplingParams(max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
            cached = sum(output.num_cached_tokens or 0 for output in found)
            assert cached > sum(len(prompt) // cases.BLOCK * cases.BLOCK for prompt in prompts)
            worker = cases.worker(llm)
            registered = worker.vllm_config.compilation_config.static_forward_context
            assert {int(part) for name in registered for part in name.split(".") if part.isdigit()} == set(kept)
            assert len(worker.get_kv_cache_spec()) == len(kept)


def test_vllm_compiles_each_depth_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two depths in one process and one cache of compiled code; only the checkpoint's file tells them apart.

    The keys are compared because vLLM on a CPU compiles again even where it finds code under the key.
    """
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = cases.checkpoint(tmp_path, "gemma3_text")
    prompts, limits = cases.rows(6)
    wanted = {name: cases.library_answers(model, spec, prompts, limits) for name, spec in UNIFORM.items()}
    keys, mutants = set(), set()
    for name, spec in UNIFORM.items():
        save_spec(spec, cases.LAYERS, model)
        with cases.engine(model, {"unadapted": True}, enforce_eager=False) as llm:
            assert cases.answers(llm, prompts, limits) == wanted[name], name
            config = cases.worker(llm).vllm_config
            assert config.compilation_config.mode > 0
            keys.add(config.compute_hash())
            del config.additional_config[KEPT_LAYERS]
            mutants.add(config.compute_hash())
    assert (len(keys), len(mutants)) == (2, 1)  # the kept layers alone tell the keys of compiled code apart


def test_an_adapter_is_merged_or_serves_some_requests(folder: Path, tmp_path: Path) -> None:
    """As a speed adapter, and as vLLM's LoRA adapter, of which the dropped layers' part is left out."""
    spec = UNIFORM["2x"]
    adapter = random_adapter(folder, tmp_path / "adapter", spec)
    prompts, limits = cases.rows(5, seed=4)
    wanted = cases.library_answers(folder, spec, prompts, limits, adapter)
    without = cases.library_answers(folder, spec, prompts, limits)
    assert wanted != without
    with cases.engine(folder, {"speed_adapter": str(adapter)}) as llm:
        assert cases.answers(llm, prompts, limits) == wanted
    with cases.engine(folder, settings(spec), enable_lora=True, max_lora_rank=8) as llm:
        assert cases.answers(llm, prompts, limits) == without
        assert cases.answers(llm, prompts, limits, lora_request=LoRARequest("adapter", 1, str(adapter))) == wanted


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")
def test_two_workers_share_each_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = UNIFORM["without layer 0"]
    prompts, limits = cases.rows(6, seed=8)
    wanted = cases.library_answers(folder, spec, prompts, limits)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests/vllm_addon", ROOT / "tests/engine")))
    )
    with cases.engine(folder, settings(spec), tensor_parallel_size=2) as llm:
        assert cases.answers(llm, prompts, limits) == wanted


def test_a_draft_model_keeps_its_layers(folder: Path) -> None:
    """Speculative decoding: the whole model drafts for three of its layers."""
    spec = UNIFORM["2x"]
    prompts, limits = cases.rows(4, seed=9)
    wanted = cases.library_answers(folder, spec, prompts, limits)
    draft = {"model": str(folder), "method": "draft_model", "num_speculative_tokens": 2}
    with cases.engine(folder, settings(spec), speculative_config=draft, num_gpu_blocks_override=64) as llm:
        assert cases.answers(llm, prompts, limits) == wanted


def test_dummy_weights_are_loaded(folder: Path) -> None:
    with cases.engine(folder, settings(UNIFORM["2x"]), load_format="dummy") as llm:
        assert [len(answer) for answer in cases.answers(llm, [[5, 6]], [4])] == [4]


def test_a_model_that_keeps_a_wrong_layer_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = worker.use_loader
    monkeypatch.setattr(worker, "use_loader", lambda config, adapter, dropped: use(config, adapter, [1, 2, 3]))
    with pytest.raises(AssertionError), cases.engine(folder, settings(UNIFORM["2x"])):
        pass


def test_a_generator_loads_one_engine_after_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule that falls, one of constant depth, 1x, another constant depth, and the first one again."""
    model = str(cases.text_checkpoint(tmp_path))
    common: dict[str, Any] = {"unadapted": True, "sampling": {"max_new_tokens": 12}, "dtype": "float32", "max_batch": 4}
    specs = {"falling": ScheduleSpec(speedup=2, horizon=8), "1x": ScheduleSpec(), **UNIFORM}
    schedules = {name: spec.build(cases.LAYERS) for name, spec in specs.items()}
    library = Generator(EngineSettings(model, schedule=schedules["1x"], device="cpu", cache_bytes=2**26, **common))
    texts = ["The Eagle serves", "name[Zizzi], food[French]", "a"]
    prompts = [library.builder.prompt(text) for text in texts]
    wanted = {name: library.at(schedule).answer(prompts) for name, schedule in schedules.items()}
    options = {"block_size": cases.BLOCK, "enforce_eager": True, "max_model_len": 192}
    one = Generator(EngineSettings(model, schedule=schedules["falling"], cache_bytes=2**26, vllm=options, **common))
    models = []
    try:
        with caplog.at_level(logging.WARNING):
            for number, name in enumerate(("falling", "2x", "1x", "without layer 0", "falling")):
                assert one.at(schedules[name]).answer(prompts) == wanted[name], name
                messages = [record.message for record in caplog.records if "another is loaded" in record.message]
                assert len(messages) == number
                loaded = one.engine.vllm.engine_core.engine_core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
                models.append(weakref.ref(loaded.model_runner.get_model()))
                del loaded
        assert not _model_to_pp_missing_layer_names
        assert [model() is None for model in models] == [True] * 4 + [False]
    finally:
        one.engine.close()
    gc.collect()
    assert models[-1]() is None
