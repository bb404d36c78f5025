"""What lies before, between and behind a decode step's products, as Triton kernels of fixed shapes, for CUDA graphs.

Nothing here reads a value back or hangs on one that is not on the device: how many tokens a row has, where they lie and
whether a lane runs the layer at all is read by the kernels. Held against `reference`, lane by lane, whose shapes these
are.
"""

from actors.engine.gpu.kernels.attention import append, attend
from actors.engine.gpu.kernels.lanes import begin, finish
from actors.engine.gpu.kernels.residual import add, add_norm, gate, norm, norm_heads

__all__ = ["add", "add_norm", "append", "attend", "begin", "finish", "gate", "norm", "norm_heads"]
