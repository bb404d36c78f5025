"""Tiny models with random weights, and their sizes: one or more of each family."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LAYERS = 6
VOCAB = 97
CONTEXT = 64
WINDOW = 5  # far shorter than prompts and answers

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
GATED = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 2}
OPT = {**SHAPE, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "initializer_range": 0.5}
NEOX = {**SHAPE, "intermediate_size": 64, "rotary_pct": 0.5, "initializer_range": 0.8}
GEMMA = {**GATED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"] * 2

# name: model_type, keys of its config
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GATED),
    "opt": ("opt", OPT),
    # the shape of OPT-350M: post-norm and a narrower embedding
    "opt-post-norm": (
        "opt",
        {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "initializer_range": 0.3},
    ),
    "mistral": ("mistral", {**GATED, "sliding_window": WINDOW, "head_dim": 12}),
    "mistral-full": ("mistral", {**GATED, "sliding_window": None}),
    "qwen2": ("qwen2", GATED),
    "qwen2-window": ("qwen2", {**GATED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", {**GATED, "head_dim": 12, "tie_word_embeddings": True}),
    "gemma": ("gemma", {**GATED, "head_dim": 16}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": MIXED, "rope_local_base_freq": 100.0}),
    "gpt-neox": ("gpt_neox", NEOX),
    "gpt-neox-serial": ("gpt_neox", {**NEOX, "use_parallel_residual": False}),
    "gpt2": ("gpt2", {**SHAPE, "scale_attn_by_inverse_layer_idx": True, "initializer_range": 0.8}),
    "phi3": ("phi3", {**GATED, "sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", GATED),
    # full layers alone stretch their positions
    "olmo3": ("olmo3", {**GATED, "sliding_window": WINDOW, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "smollm3": ("smollm3", {**GATED, "use_sliding_window": True, "sliding_window": WINDOW}),
}

# without the windows that only the CPU's layers know
WINDOWLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3-full": ("phi3", {**GATED, "sliding_window": None, "partial_rotary_factor": 0.5}),
    "smollm3-full": ("smollm3", GATED),
}


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """Random weights, fp32, large enough that tokens differ. changes: keys of its config, in place of those above."""
    torch.manual_seed(11)
    model_type, keys = {**MODELS, **WINDOWLESS}[name]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**keys, **changes}))
    for weight in model.parameters():
        if weight.dim() == 1:  # biases and norms, which would else all be 0 or 1
            torch.nn.init.normal_(weight, float(weight.detach().mean()), 0.5)
    if model.config.tie_word_embeddings:  # else a token is likeliest to follow itself
        model.get_input_embeddings().weight.data.mul_(0.3)
    return model.eval().requires_grad_(False)
