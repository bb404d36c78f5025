"""How the kernels are compiled, and the layout that they expect."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from actors.engine.gpu.operations import Lanes, LayerPages

# once for all layers and lane counts: Triton would compile ranks that are 1 or divide by 16, and slices of lanes, apart
compiled_once = triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["slots", "positions", "depths"])


def check(tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Assert dtype and shape, and that the tensor is contiguous: kernels compute addresses without strides."""
    assert tensor.dtype == dtype and tensor.shape == shape, (tensor.dtype, tensor.shape, dtype, shape)
    assert tensor.is_contiguous()


def check_lanes(lanes: Lanes, count: int) -> None:
    """Assert the layout of the lanes of `count` rows; their rotary is left to the kernels that use it."""
    check(lanes.slots, torch.int64, count)
    check(lanes.positions, torch.int64, count)
    check(lanes.depths, torch.int32, count)


def check_pages(pages: LayerPages, dtype: torch.dtype, head_dim: int) -> None:
    """Assert the layout of a layer's pages; rows of the table may lie apart. dtype: of numbers that are no codes."""
    count, kv_heads, tokens, _ = pages.keys.shape
    if pages.scales is not None:
        dtype = pages.keys.dtype
        assert dtype.itemsize == 1
        for scales in pages.scales:
            check(scales, torch.float32, count, kv_heads, tokens)
    check(pages.keys, dtype, count, kv_heads, tokens, head_dim)
    check(pages.values, dtype, count, kv_heads, tokens, head_dim)
    assert pages.table.dtype == torch.int32 and pages.table.stride(1) == 1
