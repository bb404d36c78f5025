"""How the kernels are compiled."""

from __future__ import annotations

import triton

# one for all layers and lane counts: else each rank that is 1 or divides by 16, and each slice of lanes, has its own
compiled_once = triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["slots", "places", "depths"])
