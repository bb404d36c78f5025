"""The products of a layer and of the head: in 16 bits, or with weights of 8 bits, which are half the bytes of a step.

With 8 bits both factors are rounded: a weight by one scale an output, its inputs by one scale a token. int8: sums by
`torch._int_mm` are exact, and one operation more applies scales and bias. fp8 (e4m3): `torch._scaled_mm` with a scale
for each row and column does it all. On a CPU the same numbers come from plain torch.
Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from actors.engine.checkpoint.compressed import LIMITS, Codes, Kind, codes_of, largest_scales
from actors.engine.checkpoint.layer_weights import Projection
from actors.engine.gpu import reference
from actors.engine.gpu.operations import Operations

ALIGNMENT = 16  # of I and O, for tensor cores
LEAST_ROWS = 32  # torch's int8 product of 2.11 to 2.13 refuses 16 and fewer
DTYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EightBits:
    """Which products have 8 bits.

    Args:
        kind: of the codes.
        all_layers: all linear layers and the head; else those with codes of the checkpoint.
    """

    kind: Kind
    all_layers: bool = True


class Product:
    """x [N, I] -> x W^T + b [N, O]; relu: whether the product itself ends with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool = False) -> None:
        self.weight, self.bias = weight, bias
        self.relu = relu

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        if not self.relu:
            return linear(hidden, self.weight, self.bias)
        if self.bias is None:
            return torch.relu(linear(hidden, self.weight))
        return torch._addmm_activation(self.bias, hidden, self.weight.t())  # what torch's own compiler uses


class EightBitProduct:
    """`Product` with both factors rounded to 8 bits; requires `fits`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, codes: Codes, relu: bool = False, operations: Operations = reference
    ) -> None:
        """weight [O, I], which may be freed. codes: its scales."""
        assert fits(weight)
        self.bias, self.relu, self.operations = bias, relu, operations
        self.codes = _codes(weight, codes)
        self.scales = codes.scales.contiguous()

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        least = LEAST_ROWS if self.codes.dtype == torch.int8 else 0
        rounded, scales = self.operations.round_rows(hidden.contiguous(), self.codes.dtype, least)
        if self.codes.dtype == torch.int8:
            multiply = torch._int_mm if hidden.is_cuda else _int_mm
            sums = multiply(rounded, self.codes.t())
            return self.operations.scale_sums(sums, scales, self.scales, self.bias, hidden.dtype, relu=self.relu)
        scaled: Callable[..., Tensor] = torch._scaled_mm if hidden.is_cuda else _scaled_mm
        how = {"bias": self.bias, "out_dtype": hidden.dtype, "use_fast_accum": True}
        output = scaled(rounded, self.codes.t(), scales[:, None], self.scales[None], **how)
        return output.relu_() if self.relu else output


class EightBitHead(nn.Module):
    """The vocabulary head: hidden states [..., E] -> logits [..., V]."""

    def __init__(self, product: EightBitProduct) -> None:
        super().__init__()
        self.product = product

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., V]."""
        return self.product(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)


def product_of(
    projection: Projection, eight_bits: EightBits | None, operations: Operations = reference, relu: bool = False
) -> Product | EightBitProduct:
    """The product of joined linear layers; weights are copied, or shared where their layout stays."""
    weight, bias = projection.joined()
    codes = None if eight_bits is None else _chosen(weight, projection.codes(), eight_bits)
    if codes is None:
        return Product(weight, bias, relu)
    return EightBitProduct(weight, bias, codes, relu, operations)


def head_of(head: nn.Linear, eight_bits: EightBits, operations: Operations = reference) -> EightBitHead | None:
    """The head with 8 bits; None: it stays as it is."""
    codes = _chosen(head.weight, codes_of(head), eight_bits)
    if codes is None:
        return None
    return EightBitHead(EightBitProduct(head.weight, head.bias, codes, operations=operations))


def fits(weight: Tensor) -> bool:
    """Whether tensor cores multiply such a weight [O, I] with 8 bits."""
    return weight.shape[0] % ALIGNMENT == weight.shape[1] % ALIGNMENT == 0


def _chosen(weight: Tensor, codes: Codes | None, eight_bits: EightBits) -> Codes | None:
    """The scales that a weight [O, I] is rounded by; None: it is not."""
    if codes is None and not eight_bits.all_layers:
        return None
    if not fits(weight):
        log.info("a product of %d x %d numbers stays in 16 bits: no multiples of %d", *weight.shape, ALIGNMENT)
        return None
    assert codes is None or codes.kind == eight_bits.kind
    return codes or Codes(eight_bits.kind, largest_scales(weight, eight_bits.kind))


def _codes(weight: Tensor, codes: Codes) -> Tensor:
    """The codes [O, I] of a weight; those from which it has been expanded are found again exactly."""
    wide = weight.detach().float() / codes.scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if codes.kind == "int8":
        return wide.round_().to(torch.int8)
    return wide.clamp_(-LIMITS["fp8"], LIMITS["fp8"]).to(DTYPES["fp8"])


def _int_mm(left: Tensor, right: Tensor) -> Tensor:
    """`torch._int_mm` by float64, in which the sums of int8 products are exact."""
    return (left.double() @ right.double()).int()


def _scaled_mm(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, *, bias: Tensor | None, **how: object
) -> Tensor:
    """`torch._scaled_mm` by float64: codes [N, I] and [I, O], scales [N, 1] and [1, O] -> [N, O]."""
    sums = (left.double() @ right.double()).float() * (left_scales * right_scales)
    dtype = how["out_dtype"]
    assert isinstance(dtype, torch.dtype)
    return (sums if bias is None else sums + bias).to(dtype)
