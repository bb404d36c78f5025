"""Attention for the library's layers: kernels for one new token a row and for whole prompts, the library's own for all
else.

With query length 1 in bfloat16, `scaled_dot_product_attention` takes ten times as long on CPUs as reading keys and
values does, and it reads the slots behind a row's own tokens too.
Shapes: B rows, Q query heads, H key/value heads, S new tokens, K keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from actors.engine.cpu import kernels, library
from actors.engine.library import packed_attention
from actors.engine.library.packed_attention import Attendance

NAME = "skipdecode_cpu"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Attendance | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """query [B, Q, S, D], key and value [B, H, K, D], mask [B or 1, 1, S, K] or None -> [B, S, Q, D].

    With S = 1 it is for inference alone, the mask is bool, and the slots that it allows a row have no gaps. An
    `Attendance` is for `packed_attention`.
    """
    if isinstance(attention_mask, Attendance):
        packed: tuple[Tensor, None] = packed_attention.attend(
            module, query, key, value, attention_mask, dropout, scaling, **settings
        )
        return packed
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if query.shape[2] != 1:
        if attention_mask is None and not dropout and _by_kernel(module, query, key):
            starts = torch.arange(len(query) + 1) * query.shape[2]
            flat = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
            output = kernels.attend_prompts(flat[0], flat[1], flat[2], starts, scale)
            return output.unflatten(0, (len(query), -1)), None
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
        return output, None
    assert not torch.is_grad_enabled() and not dropout
    mask = None if attention_mask is None else attention_mask[:, 0, 0]
    return kernels.attend(query[:, :, 0], key, value, mask, scale)[:, None], None


def _by_kernel(module: Any, query: Tensor, key: Tensor) -> bool:
    """Whether the kernel computes this: causal attention of prompts without a prefix."""
    return (
        not torch.is_grad_enabled()
        and getattr(module, "is_causal", True)
        and query.shape[2] == key.shape[2]
        and query.shape[3] % 2 == 0
        and library.multiplies(query.dtype, query.device)
    )


def register() -> str:
    """Add `attend` to the library's attention implementations; returns its name there."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
