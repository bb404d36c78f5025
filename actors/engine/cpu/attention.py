"""Attention as the library's layers call it, of one new token a row by a kernel; anything else is the library's own.

Over a cache `scaled_dot_product_attention` takes ten times as long on CPUs, at query length 1 in bfloat16, as reading
keys and values does, and reads what lies behind a row's own tokens too.
Shapes: B rows, Q query heads, H key/value heads, S new tokens, K keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from actors.engine.cpu import kernels

NAME = "skipdecode_cpu"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """query [B, Q, S, D], key and value [B, H, K, D], mask [B or 1, 1, S, K] or None -> [B, S, Q, D].

    At S = 1 it is for inference alone, the mask is bool, and the slots that a row's mask lets through lie without gaps.
    """
    if query.shape[2] != 1:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
        return output, None
    assert not torch.is_grad_enabled() and not dropout
    seen = None if attention_mask is None else attention_mask[:, 0, 0]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    return kernels.attend(query[:, :, 0], key, value, seen, scale)[:, None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
