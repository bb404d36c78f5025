"""Speed adapters: merged as peft merges them, left out at full depth, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from random_adapter import random_adapter, with_random_adapters
from safetensors.torch import load_file, save_file
from tiny_checkpoint import tiny_checkpoint
from tiny_models import tiny_model

from actors.engine.errors import UserError
from actors.engine.model.loading import inspect, with_adapter
from actors.engine.model.speed_adapter import WEIGHTS, SpeedAdapter, merge, save_record
from actors.engine.schedule.schedule import ScheduleSpec
from actors.generator import Generator
from actors.settings import EngineSettings

SPEC = ScheduleSpec(speedup=2, horizon=4, warmup=2)
PROMPTS = ["name[Zizzi]", "food[French], area[city centre]", "The Eagle"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def made(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(base, tmp_path_factory.mktemp("adapter"), SPEC)


@pytest.fixture
def adapter(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapter"))


def test_the_merged_weights_are_those_of_peft(family: str, tmp_path: Path) -> None:
    with_random_adapters(tiny_model(family)).save_pretrained(tmp_path)
    wanted = with_random_adapters(tiny_model(family)).merge_and_unload().state_dict()
    model = tiny_model(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    merge(model, SpeedAdapter(tmp_path, "", 3, 5 / 3))
    merged = model.state_dict()
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    assert len(changed) >= 4 * model.config.num_hidden_layers  # not a comparison of two unchanged models


def test_the_sum_is_computed_in_fp32(tmp_path: Path) -> None:
    with_random_adapters(tiny_model("llama")).save_pretrained(tmp_path)
    model = tiny_model("llama").bfloat16()
    wanted = with_random_adapters(tiny_model("llama").bfloat16().float()).merge_and_unload().bfloat16().state_dict()
    merge(model, SpeedAdapter(tmp_path, "", 3, 5 / 3))
    assert all(torch.equal(weight, wanted[name]) for name, weight in model.state_dict().items())


def answers(checkpoint: Path, **settings: object) -> dict[str, list[object]]:
    generator = Generator(
        EngineSettings(str(checkpoint), dtype="float32", device="cpu", sampling={"max_new_tokens": 8}, **settings)
    )  # type: ignore[arg-type]
    return {name: column.tolist() for name, column in generator({"prompt": np.array(PROMPTS)}).items()}


def test_full_depth_answers_are_the_bases(base: Path, made: Path) -> None:
    full = {"schedule": {"speedup": 1.0}}
    assert answers(base, speed_adapter=str(made), **full) == answers(base, **full)


def test_answers_above_1x_are_those_of_the_merged_checkpoint(base: Path, made: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), made).merge_and_unload().save_pretrained(
        whole
    )
    shutil.copy(made / "skipdecode.json", whole)
    fast = answers(base, speed_adapter=str(made))  # at the schedule that the adapter stores
    assert fast == answers(whole)
    assert fast != answers(base, schedule={"speedup": 2, "horizon": 4, "warmup": 2}, unadapted=True)


def test_the_adapters_schedule_takes_the_place_of_the_bases(base: Path, made: Path) -> None:
    assert with_adapter(inspect(base), made).spec == SPEC
    assert inspect(base).spec != SPEC


def refused(base: Path, adapter: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        with_adapter(inspect(base), adapter)
    assert "\n" not in str(caught.value)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "use_dora = 'True' is not what `skipdecode adapt` writes: adapters made elsewhere"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"a_feature_of_the_future": 1}, "a_feature_of_the_future"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"r": 4}, r"_proj.lora_A.weight: shape \(3, \d+\), must be \(4, \d+\)$"),
        ({"r": "8"}, "must be an integer >= 1"),
    ],
)
def test_features_that_cannot_be_merged_are_refused(
    base: Path, adapter: Path, values: dict[str, object], message: str
) -> None:
    edit(adapter / "adapter_config.json", **values)
    refused(base, adapter, message)


def test_weights_that_do_not_fit_are_refused(base: Path, adapter: Path) -> None:
    weights = load_file(adapter / WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"

    def save(values: dict[str, torch.Tensor]) -> None:
        save_file(values, adapter / WEIGHTS)
        save_record(adapter, json.loads((adapter / "speed_adapter.json").read_text())["base"])

    save({**weights, name: torch.zeros(3, 31)})
    refused(base, adapter, r"layers.1.self_attn.q_proj.lora_A.weight: shape \(3, 31\), must be \(3, 32\)$")
    save({key: value for key, value in weights.items() if key != name})
    refused(base, adapter, r"layers.1.self_attn.q_proj.lora_A.weight: shape missing, must be \(3, 32\)$")
    save({**weights, name.replace("q_proj", "wq"): weights[name].clone()})
    refused(base, adapter, r"the model has no linear layer model.layers.1.self_attn.wq .*; it has q_proj, k_proj")
    save({**weights, "base_model.model.lm_head.lora_A.weight": weights[name].clone()})
    refused(base, adapter, r"no linear layer lm_head in its decoder layers")
    save({})
    refused(base, adapter, "holds no adapter")


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS, "speed_adapter.json", "skipdecode.json"])
def test_a_folder_without_one_of_its_files_is_refused(base: Path, adapter: Path, name: str) -> None:
    (adapter / name).unlink()
    refused(base, adapter, f"not a speed adapter: no {name}")


def test_damage_is_refused(base: Path, adapter: Path) -> None:
    data = bytearray((adapter / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (adapter / WEIGHTS).write_bytes(data)
    refused(base, adapter, "damaged: its SHA-256 is not the one")
    (adapter / WEIGHTS).write_bytes(data[:-100])
    save_record(adapter, "x")
    refused(base, adapter, "damaged: ")
    (adapter / "speed_adapter.json").write_text("{}")
    refused(base, adapter, "speed_adapter.json: holds nothing instead of base and weights")


def test_another_base_is_refused_when_the_adapter_would_be_merged(base: Path, made: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"for a base with weights \w{16}, but .*other has \w{16}: give the adapter's"):
        Generator(EngineSettings(str(other), dtype="float32", speed_adapter=str(made)))
    Generator(EngineSettings(str(other), dtype="float32", speed_adapter=str(made), schedule={"speedup": 1.0}))


def test_an_adapter_is_no_checkpoint(made: Path) -> None:
    with pytest.raises(UserError, match=r"is an adapter for .*: give it as model.speed_adapter, and .* as model.path"):
        inspect(made)
