"""How the kernels are compiled, and the layout that they expect."""

from __future__ import annotations

import triton
from torch import Tensor

# once for all layers and lane counts: Triton would compile ranks that are 1 or divide by 16, and slices of lanes, apart
compiled_once = triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["slots", "positions", "depths"])


def check_contiguous(*tensors: Tensor) -> None:
    """Kernels compute addresses without strides."""
    assert all(tensor.is_contiguous() for tensor in tensors)
