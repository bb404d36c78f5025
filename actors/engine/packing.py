"""Weights of linear layers in the blocked order in which CPUs multiply them in bfloat16.

The library's linear layer brings its weight into that order at every call: at 32 rows that is a quarter of its time,
at 8 nearly half. Packed once, the same product costs the same arithmetic and nothing else.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

ROWS = 32  # for which the library chooses the order; others run as well with it


class PackedLinear(nn.Module):
    """x [..., I] -> x W^T + b [..., O] in bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [O, I]; it is copied, and may be let go."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        return output


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine multiplies packed weights of this kind."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def give_memory_back() -> None:
    """To the system: packed weights do not fit the holes that freed ones leave in the C library's heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def pack_linears(module: nn.Module) -> None:
    """Put packed layers in the place of all linear ones below `module`; their own weights are let go."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight.detach(), child.bias))
        elif type(child) is Conv1D:
            setattr(module, name, PackedLinear(child.weight.detach().T, child.bias))
        else:
            pack_linears(child)
