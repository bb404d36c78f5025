"""Linear layers with packed weights, in float32, bfloat16 or 8 bits.

torch's linear layer reorders the weight in every call. In bfloat16, this takes a quarter of the layer's time for 32
rows, and nearly half for 8 rows. Here a weight is reordered only once. 8-bit weights have one scale per output. The
inputs are also rounded to 8 bits, with one scale for every `GROUP` numbers of a token (as in ZeroQuant, Yao et al.,
2022, https://arxiv.org/abs/2206.01861). With one scale per token, the error would be three times as large.
Shapes: N rows, I inputs, G groups of inputs (the last one is padded with zeros), O outputs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from actors.engine.cpu.kernels import PANEL, kernel, multiplies, quantizes

ROWS = 32  # number of rows for which oneDNN optimizes a weight's layout; other numbers of rows are about as fast
LIMIT = 127  # 8-bit codes are -127 ... 127
GROUP = 64  # number of inputs that share a scale; must equal GROUP in products.h
PAGE = 2**21  # bytes of a huge page; where huge pages have another size, some memory is wasted
ALIGNED = 64  # alignment of weights in bytes, which the kernels need
GIVEN_BACK = 2**24  # number of freed bytes after which `to_huge_pages` returns freed memory to the system


class PanelProduct:
    """Computes x W^T + b [..., O] from x [..., I] with a CPU kernel, in float32 or bfloat16."""

    kernel = "multiply"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy of `weight` [O, I]; the caller may free the original. In bfloat16, size I must be even."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()
        self.packed = self.pack(weight)

    @staticmethod
    def pack(weight: Tensor) -> Tensor:
        """Reorder a weight [O, I] to [O / 48 rounded up, I / F, 48, F]. F is 1 for float32, and 2 for bfloat16."""
        outputs, inputs = weight.shape
        factors = 4 // weight.dtype.itemsize
        packed = torch.zeros(-(-outputs // PANEL), inputs // factors, PANEL, factors, dtype=weight.dtype)
        for number, panel in enumerate(weight.detach().split(PANEL)):
            packed[number, :, : len(panel)] = panel.view(-1, inputs // factors, factors).transpose(0, 1)
        return packed

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output: [..., I] -> [..., O]."""
        hidden = hidden.contiguous()
        output = torch.empty(*hidden.shape[:-1], self.outputs, dtype=hidden.dtype)
        assert hidden.shape[-1] == self.inputs and (self.bias is None or self.bias.dtype == hidden.dtype)
        assert self.packed.dtype in (hidden.dtype, torch.uint8) and self.packed.data_ptr() % ALIGNED == 0
        kernel(self.kernel, hidden.dtype)(
            hidden.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            None,
            output.data_ptr(),
            *(hidden.numel() // self.inputs, self.inputs, self.outputs, 0),
        )
        return output


class QuantizedProduct(PanelProduct):
    """A `PanelProduct` for bfloat16 that rounds W and x to 8 bits.

    A kernel computes the product if `kernels.quantizes` is true. Otherwise torch does, which takes several times as
    long as a product in bfloat16.
    """

    kernel = "multiply_int8"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy of bfloat16 `weight` [O, I]; the caller may free the original."""
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()
        codes, scales = quantize_weight(weight)
        self.native = quantizes(weight.dtype, weight.device)
        self.packed = pack_codes(codes, scales) if self.native else codes
        self.scales = None if self.native else scales

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output: [..., I] -> [..., O]."""
        if self.scales is None:
            return super().__call__(hidden)
        output = rounded(hidden.reshape(-1, self.inputs)) @ self.packed.float().T * self.scales
        if self.bias is not None:
            output += self.bias
        return output.view(*hidden.shape[:-1], self.outputs).to(hidden.dtype)


class LibraryProduct:
    """Computes x W^T + b in bfloat16 with oneDNN, on CPUs where the kernel of `PanelProduct` is slower or missing."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Pack a copy of `weight` [O, I]; the caller may free the original."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        self.bias = bias

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output: [..., I] -> [..., O]."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.packed, self.bias, "none", [], "")
        return output


Product = PanelProduct | LibraryProduct


def product(weight: Tensor, bias: Tensor | None, *, int8: bool = False) -> Product | None:
    """Return the fastest function x [..., I] -> x W^T + b [..., O]; None if torch's linear layer is fastest.

    Args:
        weight, bias: W [O, I] and b [O].
        int8: Whether to round W and x to 8 bits.
    """
    if int8:
        return QuantizedProduct(weight, bias)
    if multiplies(weight.dtype, weight.device) and weight.shape[1] % (4 // weight.dtype.itemsize) == 0:
        return PanelProduct(weight, bias)
    return LibraryProduct(weight, bias) if packs(weight.dtype, weight.device) else None


def packs(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN can multiply with packed weights of this dtype on this device."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear(nn.Module):
    """A linear layer whose weight is packed: x [..., I] -> x W^T + b [..., O]."""

    def __init__(self, product: Product, outputs: int, inputs: int) -> None:
        super().__init__()
        self.product, self.out_features, self.in_features = product, outputs, inputs

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer's output: [..., I] -> [..., O]."""
        return self.product(hidden)


def packed_linear(module: nn.Module, *, int8: bool = False) -> nn.Module:
    """Return a packed copy of a linear layer; return `module` itself if it is not linear or packing is not faster."""
    if type(module) is nn.Linear:
        weight = module.weight.detach()
    elif type(module) is Conv1D:
        weight = module.weight.detach().T
    else:
        return module
    made = product(weight, module.bias, int8=int8)
    return module if made is None else PackedLinear(made, *weight.shape)


def pack_linears(module: nn.Module, *, int8: bool = False) -> None:
    """Replace all linear layers inside `module` by packed ones, and free the old weights. int8: see `product`."""
    for name, child in module.named_children():
        pack_linears(child, int8=int8)
        setattr(module, name, packed_linear(child, int8=int8))


def give_memory_back() -> None:
    """Return freed heap memory to the system. Packed weights are too large for the gaps that the old weights leave."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has malloc_trim
    if trim is not None:
        trim(0)


def to_huge_pages(tensors: list[Tensor]) -> None:
    """Replace `tensors` by copies in one region of memory, with huge pages if the system has them.

    A decode step reads every weight once. With pages of 4 KiB, the processor must translate thousands of page
    addresses, and a decode step of one row takes a fifth to a third longer. Each tensor is freed as soon as it is
    copied, so that memory never holds all weights twice.

    Raises:
        MemoryError: The system has no memory for the copies.
    """
    sizes = [-(-one.nbytes // ALIGNED) * ALIGNED for one in tensors]
    size = sum(sizes) + 2 * PAGE  # room for alignment; pages that are never written take no memory
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot allocate {size} bytes for weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # raised on a system without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)  # a tensor that keeps `region` alive
    first, freed = -memory.data_ptr() % PAGE, 0
    for number, aligned in enumerate(sizes):
        one = tensors[number]
        tensors[number] = memory[first : first + one.nbytes].view(one.dtype).view(one.shape).copy_(one)
        del one
        first, freed = first + aligned, freed + aligned
        if freed >= GIVEN_BACK:
            give_memory_back()
            freed = 0


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [O, I] to 8 bits: return int8 codes [O, G * 64] and float32 scales [O]; weight ≈ codes * scales.

    Each output's largest code is `LIMIT`.
    """
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1) / LIMIT
    codes = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    return nn.functional.pad(codes, (0, -weight.shape[1] % GROUP)), scales


def rounded(hidden: Tensor) -> Tensor:
    """Round hidden states [N, I] to 8 bits, as float32 [N, G * 64]. A group that contains inf or NaN becomes NaN."""
    groups = nn.functional.pad(hidden.float(), (0, -hidden.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    highest = groups.abs().amax(dim=2, keepdim=True)
    # LIMIT is a tensor here: torch computes number / tensor as number * reciprocal, which rounds twice
    inverse = torch.where(highest > 0, torch.tensor(float(LIMIT)) / highest, 0.0)
    scales = torch.where(highest.isfinite(), highest / LIMIT, torch.nan)
    found: Tensor = ((groups * inverse).round() * scales).flatten(1)
    return found


def pack_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Pack codes [O, G * 64] and scales [O] into panels of 48 outputs for products.h: uint8 [O / 48 rounded up, bytes].

    A panel holds 48 scales, then for each group 48 corrections and the codes [16, 48, 4]. The kernel adds 128 to the
    codes of x, because it multiplies unsigned by signed bytes. A correction, -128 times the sum of an output's codes in
    a group, cancels this.
    """
    outputs, columns = codes.shape
    panels, groups = -(-outputs // PANEL), columns // GROUP
    codes = nn.functional.pad(codes, (0, 0, 0, -outputs % PANEL)).view(panels, PANEL, groups, GROUP)
    scales = nn.functional.pad(scales, (0, -outputs % PANEL)).view(panels, PANEL)
    corrections = codes.sum(dim=3, dtype=torch.int32).mul_(-128).transpose(1, 2)  # [panels, G, 48]
    quads = codes.view(panels, PANEL, groups, GROUP // 4, 4).permute(0, 2, 3, 1, 4).flatten(2)
    by_group = torch.cat([corrections.contiguous().view(torch.uint8), quads.contiguous().view(torch.uint8)], dim=2)
    packed = torch.cat([scales.contiguous().view(torch.uint8), by_group.flatten(1)], dim=1)
    assert packed.data_ptr() % ALIGNED == 0 and packed.shape[1] % ALIGNED == 0
    return packed
