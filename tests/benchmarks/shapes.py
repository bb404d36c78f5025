"""Models of real shapes with random weights: speed does not ask what the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, OPTConfig, PretrainedConfig

DEMO = Path(__file__).parents[2] / "configs/demo/checkpoint"


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> OPTConfig:
    return OPTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=4 * hidden, **more
    )


def _llama(hidden: int, layers: int, head_dim: int, intermediate: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=128_256,
        max_position_embeddings=8192,
        **more,
    )


SHAPES = {
    "demo": lambda: AutoConfig.from_pretrained(DEMO),
    "opt-125m": lambda: _opt(768, 12, 12),
    "opt-350m": lambda: _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": lambda: _opt(2048, 24, 32),
    "opt-6.7b": lambda: _opt(4096, 32, 32),
    "llama-3.2-1b": lambda: _llama(2048, 16, 64, 8192, tie_word_embeddings=True),
    "llama-3-8b": lambda: _llama(4096, 32, 128, 14_336),
}


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
