"""Attention of one new token a row over a contiguous cache, for CPUs; anything else is the library's own.

In bfloat16 `scaled_dot_product_attention` takes ten times as long there at query length 1 as reading keys and values
does; two batched products come close to that, if their operands lie in one piece (what does not is copied first).
Shapes: B rows, Q query heads, H key/value heads, G = Q / H, S new tokens, K keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "skipdecode_cpu"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """query [B, Q, S, D], key and value [B, H, K, D], mask [B or 1, 1, S, K] or None -> [B, S, Q, D]."""
    added = attention_mask is not None and attention_mask.dtype != torch.bool
    if query.shape[2] != 1 or dropout or added or torch.is_grad_enabled():
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
        return output, None
    rows, heads, keys, size = key.shape
    group = query.shape[1] // heads
    scale = size**-0.5 if scaling is None else scaling
    before = query.dtype == torch.float16  # whose range unscaled scores may leave; the others lose digits by it
    queries = (query * scale if before else query).reshape(rows * heads, group, size)
    scores = torch.bmm(queries, key.reshape(rows * heads, keys, size).transpose(1, 2))
    weights = scores.view(rows, heads, group, keys).float()
    if not before:
        weights *= scale
    if attention_mask is not None:
        weights = weights.masked_fill_(~attention_mask, -torch.inf)
    weights = weights.softmax(dim=-1).to(value.dtype).view(rows * heads, group, keys)
    output = torch.bmm(weights, value.reshape(rows * heads, keys, size))
    return output.view(rows, 1, heads * group, size), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
