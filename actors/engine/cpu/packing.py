"""Weights of linear layers in the blocked order in which CPUs multiply them in bfloat16.

The library's linear layer reorders its weight at every call, which takes a quarter of its time at 32 rows and nearly
half at 8. Here weights are reordered once.
Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from actors.engine.cpu import kernels, library
from actors.engine.cpu.quantization import QuantizedProduct
from actors.engine.model.compressed import Codes, codes_of

ROWS = 32  # the library chooses the order for so many rows; other numbers of rows are about as fast with it


class PlainProduct:
    """x [N, I] -> activation(x W^T + b) + residual [N, O]. activation: none or relu."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [O, I]."""
        self.weight, self.bias = weight, bias

    def __call__(self, hidden: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """[N, I] -> [N, O]; a residual [N, O] requires activation none."""
        assert residual is None or activation == "none"
        output = nn.functional.linear(hidden, self.weight, self.bias)
        if activation == "relu":
            output = output.relu_()
        return output if residual is None else output.add_(residual)


class PanelProduct:
    """`PlainProduct` in bfloat16, of any leading shape, by a kernel; it adds a residual before it rounds the sum."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [O, I], I even; it is copied, and may be freed."""
        self.packed = kernels.pack(weight)
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()

    def __call__(self, hidden: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """[..., I] -> [..., O]; a residual [..., O] requires activation none."""
        assert residual is None or activation == "none"
        return kernels.multiply(hidden, self.packed, self.outputs, self.bias, residual, activation == "relu")


class PackedProduct:
    """`PlainProduct` in bfloat16 in the library's own order, for CPUs on which the kernel is slower or does not run."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [O, I]; it is copied, and may be freed."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self.bias = bias

    def __call__(self, hidden: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """[..., I] -> [..., O]; a residual [..., O] requires activation none."""
        assert residual is None or activation == "none"
        if residual is not None:
            added: Tensor = torch.ops.mkldnn._linear_pointwise.binary(hidden, residual, self.packed, self.bias, "add")
            return added
        output: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, activation, [], "")
        return output


class PackedLinear(nn.Module):
    """A linear layer with a packed weight: x [..., I] -> x W^T + b [..., O]."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        int8: bool = False,
        codes: Codes | None = None,
    ) -> None:
        """weight [O, I]; it is copied, and may be freed. int8, codes: see `product`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.product = product(weight, bias, int8=int8, codes=codes)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.product(hidden)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine multiplies packed weights of this kind."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def give_memory_back() -> None:
    """Return freed memory to the system: packed weights do not fit the holes of freed ones in the C library's heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


Product = PanelProduct | PackedProduct | PlainProduct | QuantizedProduct


def product(weight: Tensor, bias: Tensor | None, *, int8: bool = False, codes: Codes | None = None) -> Product:
    """Return x [..., I] -> x W^T + b [..., O] for weight [O, I], in bfloat16 by the faster product.

    That is this package's kernel; with AMX, and where there is no kernel, the library's.

    Args:
        weight, bias: Of the product.
        int8: With weight and x rounded to 8 bits.
        codes: Those of 8 bits that the weight stands for; x is rounded too.
    """
    if int8 or codes is not None:
        assert codes is None or codes.kind == "int8"
        return QuantizedProduct(weight, bias, None if codes is None else codes.scales)
    if not can_pack(weight.dtype, weight.device):
        return PlainProduct(weight, bias)
    if not library.has_amx() and weight.shape[1] % 2 == 0 and library.multiplies(weight.dtype, weight.device):
        return PanelProduct(weight, bias)
    return PackedProduct(weight, bias)


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight [O, I] of a linear layer; None for another module."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    return module.weight.detach().T if type(module) is Conv1D else None


def pack_linears(module: nn.Module, *, int8: bool = False) -> None:
    """Replace all linear layers below `module` by packed ones; their own weights are freed. int8: see `product`."""
    for name, child in module.named_children():
        weight = linear_weight(child)
        if weight is None:
            pack_linears(child, int8=int8)
        else:
            packed = PackedLinear(weight, child.bias, int8=int8, codes=codes_of(child))  # type: ignore[arg-type]
            setattr(module, name, packed)
