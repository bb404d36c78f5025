"""What the decoder layers that are written anew for CPU and GPU ask of the library's: what they are, their products.

Shapes: I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.opt.modeling_opt import OPTDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer


def is_opt(layer: Any) -> bool:
    """Whether it is OPT's layer, with weights in its norms."""
    return type(layer) is OPTDecoderLayer and layer.self_attn_layer_norm.weight is not None


def is_llama(layer: Any) -> bool:
    """Whether it is Llama's layer, or one of the same parts: RMS norms, and a feed-forward gated by silu."""
    llamas = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer)
    return type(layer) in llamas and layer.mlp.config.hidden_act in ("silu", "swish")


def side_by_side(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight [O, I] and bias [O] or None of layers over one input, whose outputs lie side by side; of one, its own."""
    if len(layers) == 1:
        bias = layers[0].bias
        return layers[0].weight.detach(), None if bias is None else bias.detach()
    weight = torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    parts = [weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return weight, torch.cat(parts)
