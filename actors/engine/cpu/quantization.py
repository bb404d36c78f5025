"""Linear layers with weights of 8 bits: half the bytes of bfloat16, and more products an instruction.

Weights have one scale an output. Activations are rounded to 8 bits too, each token's by one scale for every `GROUP` of
its numbers (the groups of ZeroQuant, Yao et al., 2022, https://arxiv.org/abs/2206.01861); one scale a token would lose
three times as much. Nothing is calibrated.
Shapes: N rows, I inputs, G groups of inputs (the last one filled with zeros), O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actors.engine.cpu import library
from actors.engine.cpu.kernels import PANEL
from actors.engine.model.compressed import largest_scales

GROUP = 64  # GROUP of quantized.h
LIMIT = 127  # codes are -127 ... 127


def quantize_weight(weight: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> int8 codes [O, G * 64] and scales [O] in float32; weight ≈ codes * scales.

    scales: of the codes, -128 ... 127, from which the weight has been expanded. These are found again exactly: the
    weight's rounding to bfloat16 is at most a quarter of its scale. None: the largest code of an output is 127.
    """
    weight = weight.detach().float()
    if scales is None:
        scales = largest_scales(weight, "int8")
    codes = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return nn.functional.pad(codes, (0, -weight.shape[1] % GROUP)), scales


def rounded(hidden: Tensor) -> Tensor:
    """hidden [N, I] -> what its 8 bits stand for, [N, G * 64] in float32. A group with a number that is not finite is
    NaN."""
    groups = nn.functional.pad(hidden.float(), (0, -hidden.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    highest = groups.abs().amax(dim=2, keepdim=True)
    inverse = torch.where(highest > 0, torch.tensor(float(LIMIT)) / highest, 0.0)  # a number / x is number * (1 / x)
    scales = torch.where(highest.isfinite(), highest / LIMIT, torch.nan)
    found: Tensor = ((groups * inverse).round() * scales).flatten(1)
    return found


class QuantizedProduct:
    """x [..., I] -> activation(x W^T + b) + residual [..., O] with W and x rounded to 8 bits, in bfloat16.

    By a kernel where the CPU has one (AVX512-VNNI); elsewhere by torch, several times slower than bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> None:
        """weight [O, I], bfloat16; it is copied, and may be freed. scales: see `quantize_weight`."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()
        codes, scales = quantize_weight(weight, scales)
        self.native = library.quantizes(weight.dtype, weight.device)
        self.packed = pack(codes, scales) if self.native else codes  # layer.h reads it
        self.scales = None if self.native else scales

    def __call__(self, hidden: Tensor, activation: str = "none", residual: Tensor | None = None) -> Tensor:
        """[..., I] -> [..., O]; a residual [..., O] requires activation none."""
        assert residual is None or activation == "none"
        if not self.native:
            return self._by_torch(hidden, activation, residual)
        hidden = hidden.contiguous()
        output = torch.empty(*hidden.shape[:-1], self.outputs, dtype=hidden.dtype)
        assert hidden.dtype == torch.bfloat16 and hidden.shape[-1] == self.inputs
        if residual is not None:
            residual = residual.contiguous()
            assert residual.dtype == hidden.dtype and residual.shape == output.shape
        library.kernel("multiply_int8", hidden.dtype)(
            hidden.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            output.data_ptr(),
            *(hidden.numel() // self.inputs, self.inputs, self.outputs, activation == "relu"),
        )
        return output

    def _by_torch(self, hidden: Tensor, activation: str, residual: Tensor | None) -> Tensor:
        assert self.scales is not None
        output = rounded(hidden.reshape(-1, self.inputs)) @ self.packed.float().T * self.scales
        if self.bias is not None:
            output += self.bias
        if activation == "relu":
            output = output.relu_()
        output = output.view(*hidden.shape[:-1], self.outputs)
        return (output if residual is None else output + residual).to(hidden.dtype)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [O, G * 64] and scales [O] -> uint8 [O / 48 rounded up, bytes], the panels of quantized.h.

    A panel is its 48 scales, then for each group 48 corrections and the codes [16, 48, 4]. x is shifted by 128 in the
    kernel, whose products are of unsigned with signed bytes; a correction is -128 times an output's codes.
    """
    outputs, columns = codes.shape
    panels, groups = -(-outputs // PANEL), columns // GROUP
    codes = nn.functional.pad(codes, (0, 0, 0, -outputs % PANEL)).view(panels, PANEL, groups, GROUP)
    scales = nn.functional.pad(scales, (0, -outputs % PANEL)).view(panels, PANEL)
    corrections = codes.sum(dim=3, dtype=torch.int32).mul_(-128).transpose(1, 2)  # [panels, G, 48]
    quads = codes.view(panels, PANEL, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4).flatten(2)
    by_group = torch.cat([corrections.contiguous().view(torch.uint8), quads.contiguous().view(torch.uint8)], dim=2)
    packed = torch.cat([scales.contiguous().view(torch.uint8), by_group.flatten(1)], dim=1)
    assert packed.data_ptr() % 64 == 0 and packed.shape[1] % 64 == 0
    return packed
