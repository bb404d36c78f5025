"""The operations of `Operations` as Triton kernels of fixed shapes, for CUDA graphs.

No kernel needs a value from the host: the kernels themselves read how many tokens a row has, where its pages are, and
whether a lane runs the layer. The tests hold them against `reference`, lane by lane.
"""

from actors.engine.gpu.kernels.attention import append, attend
from actors.engine.gpu.kernels.lanes import begin, finish
from actors.engine.gpu.kernels.residual import add, add_norm, gate, norm, norm_heads
from actors.engine.gpu.kernels.rounding import round_rows, scale_sums
from actors.engine.gpu.kernels.sampling import sample

__all__ = [
    "add",
    "add_norm",
    "append",
    "attend",
    "begin",
    "finish",
    "gate",
    "norm",
    "norm_heads",
    "round_rows",
    "sample",
    "scale_sums",
]
