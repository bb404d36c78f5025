"""Models of real shapes with random weights: speed does not ask what the weights are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DEMO = Path(__file__).parents[2] / "configs/demo/checkpoint"


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=4 * hidden, **more
    )


def _llama(hidden: int, layers: int, head_dim: int, intermediate: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=128_256,
        max_position_embeddings=8192,
        **{"num_attention_heads": 32, "num_key_value_heads": 8, **more},
    )


SHAPES = {
    "tiny": lambda: _llama(256, 6, 32, 512, tie_word_embeddings=True),
    "demo": lambda: AutoConfig.from_pretrained(DEMO),
    "opt-125m": lambda: _opt(768, 12, 12),
    "opt-350m": lambda: _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": lambda: _opt(2048, 24, 32),
    "opt-6.7b": lambda: _opt(4096, 32, 32),
    "llama-3.2-1b": lambda: _llama(2048, 16, 64, 8192, tie_word_embeddings=True),
    "llama-3-8b": lambda: _llama(4096, 32, 128, 14_336),
    "llama-32b": lambda: _llama(5120, 64, 128, 27_648, num_attention_heads=40),
}


def write_unfilled(shape: str, folder: Path) -> None:
    """Write a checkpoint for vLLM's `load_format: dummy`: config, the demo's tokenizer, and weights without bytes.

    The file of weights has a header, as readers of its sizes need it, and takes no room on the disk.
    """
    config = SHAPES[shape]()
    config.dtype = torch.bfloat16
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = dict[str, Any](), 0
    for name, weight in model.named_parameters():
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end := end + weight.nbytes]}
    described = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.truncate(8 + len(described) + end)


def write(shape: str, folder: Path) -> PretrainedConfig:
    """A checkpoint without a tokenizer, bfloat16, in `folder`; its config."""
    config: PretrainedConfig = SHAPES[shape]()
    config.dtype = torch.bfloat16
    config.use_cache = True  # the demo's says no, and its generation config, which is not written here, yes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return config
