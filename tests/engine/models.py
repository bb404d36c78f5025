"""Tiny models with random weights, and their sizes."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

LAYERS = 6
VOCAB = 97
CONTEXT = 64


def tiny_model(family: str) -> PreTrainedModel:
    """Random weights, fp32, large enough that tokens differ."""
    torch.manual_seed(11)
    shape = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "llama":
        config = LlamaConfig(
            **shape,
            **special,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
        )
        model: PreTrainedModel = LlamaForCausalLM(config)
    elif family == "opt":
        config = OPTConfig(
            **shape, **special, ffn_dim=64, num_attention_heads=4, word_embed_proj_dim=32, init_std=0.3, dropout=0.0
        )
        model = OPTForCausalLM(config)
    else:  # the shape of OPT-350M: post-norm and a narrower embedding
        config = OPTConfig(
            **shape,
            **special,
            ffn_dim=64,
            num_attention_heads=4,
            word_embed_proj_dim=16,
            do_layer_norm_before=False,
            init_std=0.3,
            dropout=0.0,
        )
        model = OPTForCausalLM(config)
    return model.eval().requires_grad_(False)
