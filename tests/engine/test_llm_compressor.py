"""Checkpoints that llm-compressor writes, the program with which compressed-tensors checkpoints are published.

It is no development dependency: its versions forbid the newest transformers. To run these tests, install it beside an
older transformers that this project takes too: `pip install llmcompressor`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_checkpoints import expanded
from tiny_checkpoint import SENTENCES, tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.cpu import library
from actors.engine.cpu.executor import StackDecoder
from actors.engine.errors import UserError
from actors.engine.model.loading import inspect, load_decoder
from actors.generator import Generator

pytest.importorskip("llmcompressor", reason="llm-compressor is not installed: no version of it takes this transformers")
CPU = torch.device("cpu")
PROMPTS = list(SENTENCES)


def scheme(kind: str = "int", strategy: str = "channel", *, targets: str = "Linear", **changes: Any) -> dict[str, Any]:
    """A config group of weights, and of inputs if `changes` has them."""
    inputs = changes.pop("inputs", None)
    numbers = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": False}
    group = {"targets": [targets], "weights": {**numbers, "strategy": strategy, **changes}}
    return {**group, "input_activations": {**numbers, **inputs}} if inputs else group


TOKENS = {"strategy": "token", "dynamic": True}
RUN: dict[str, dict[str, Any]] = {  # arguments of the modifier: names of schemes that it has, and groups
    "W8A8": {"scheme": "W8A8"},
    "FP8": {"scheme": "FP8"},
    "FP8_DYNAMIC": {"scheme": "FP8_DYNAMIC"},
    "cache too": {"scheme": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    "ignored layers": {"scheme": "W8A8", "ignore": ["lm_head", "re:.*down_proj"]},
    "groups by name": {
        "config_groups": {
            "attention": scheme(targets="re:.*self_attn.*", inputs=TOKENS),
            "mlp": scheme(strategy="tensor", targets="re:.*mlp.*", inputs=TOKENS),
        }
    },
    "static inputs": {"config_groups": {"all": scheme(inputs={"strategy": "tensor", "symmetric": False})}},
    "asymmetric": {"config_groups": {"all": scheme(symmetric=False, inputs=TOKENS)}},
    "fp8 weights": {"config_groups": {"all": scheme("float")}},
    "int8 weights": {"config_groups": {"all": scheme()}},
    "int8 weights, asymmetric": {"config_groups": {"all": scheme(symmetric=False)}},
    "int8 weights, tensor": {"config_groups": {"all": scheme(strategy="tensor")}},
    "int8 weights, group": {"config_groups": {"all": scheme(strategy="group", group_size=16)}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "strategy block": {"scheme": "FP8_BLOCK"},
    "4 bits": {"config_groups": {"all": scheme(strategy="group", group_size=16, num_bits=4)}},
    "several schemes": {
        "config_groups": {
            "attention": scheme(targets="re:.*self_attn.*", inputs=TOKENS),
            "mlp": scheme("float", targets="re:.*mlp.*", inputs=TOKENS),
        }
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


def written(base: Path, folder: Path, recipe: dict[str, Any], modifier: str = "QuantizationModifier") -> Path:
    """The checkpoint as a publisher would write it: calibrated, compressed, in bfloat16."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers import quantization

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(base)
    samples = [tokenizer(f"{prompt} {response}")["input_ids"] for prompt, response in SENTENCES.items()]
    data = Dataset.from_list([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples])
    how = {"targets": "Linear"} if "scheme" in recipe else {}
    steps = getattr(quantization, modifier)(**{"ignore": ["lm_head"], **how, **recipe})
    oneshot(model=model, tokenizer=tokenizer, recipe=steps, dataset=data, max_seq_length=48, num_calibration_samples=3)
    model.save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)
    return folder


def check_weights(folder: Path, plain: Path) -> None:
    """Weights in bfloat16 are the bits of the expanded checkpoint."""
    got, want = (load_decoder(path, torch.bfloat16, CPU).model.state_dict() for path in (folder, plain))
    assert got.keys() == want.keys()
    for name, weight in got.items():
        assert torch.equal(weight, want[name]), name


@pytest.mark.parametrize("way", RUN)
def test_weights_are_those_that_the_libraries_expand(base: Path, way: str, tmp_path: Path) -> None:
    """bfloat16 is the type of the scales, to which the libraries and `expand` round once. The engine answers, too."""
    folder = written(base, tmp_path / "checkpoint", RUN[way])
    stored = inspect(folder).stored
    assert stored is not None
    check_weights(folder, expanded(folder, tmp_path / "plain"))
    settings: dict[str, Any] = {"device": "cpu", "sampling": {"max_new_tokens": 8}, "schedule": {"speedup": 1.0}}
    answers = Generator(str(folder), **settings)({"prompt": PROMPTS})
    assert len(answers["generated_text"]) == len(PROMPTS) and set(answers["finish_reason"]) <= {"stop", "length"}


def test_calibrated_by_gptq(base: Path, tmp_path: Path) -> None:
    """W8A8 is mostly published so; its format is the same, and the CPU multiplies its codes."""
    folder = written(base, tmp_path / "checkpoint", {"scheme": "W8A8"}, "GPTQModifier")
    check_weights(folder, expanded(folder, tmp_path / "plain"))
    assert library.quantizes(torch.bfloat16, CPU) == products_have_eight_bits(folder)


def products_have_eight_bits(folder: Path) -> bool:
    from actors.engine.cpu.products import QuantizedProduct

    decoder = Generator(str(folder), device="cpu", schedule={"speedup": 1.0}).engine.decoder
    held = decoder.stack._held[0] if isinstance(decoder, StackDecoder) else ()
    return bool(held) and all(isinstance(one, QuantizedProduct) for _, products, _ in held for one in products)


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_refused_by_name(base: Path, reason: str, tmp_path: Path) -> None:
    folder = written(base, tmp_path / "checkpoint", REFUSED[reason])
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    )
    with pytest.raises(UserError, match=rf"quantized weights \(compressed-tensors, {reason}\) are not supported"):
        inspect(folder)
