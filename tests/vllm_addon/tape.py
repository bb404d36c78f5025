"""A stand-in for CUDA graphs on a CPU: records the operators that a function calls, and replays these alone.

As in a CUDA graph, a replay runs no Python of the function: numbers keep their values of the capture, and each operator
reads and writes the memory of the capture. After a replay, all memory that the graph allocated is poisoned, because
other CUDA graphs use it too. Operators that need a value on the host cannot be captured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from vllm.model_executor.layers.attention import attention

HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::equal", "aten::is_nonzero"}
# operators of vLLM that are Python code, which reads the forward context: what they call is recorded
PYTHON = {
    f"vllm::{name}": getattr(attention, name) for name in ("unified_kv_cache_update", "unified_attention_with_output")
}


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []  # operator, arguments, options, new tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name().partition(".")[0]
        assert name not in HOST, f"{name} waits for the device, which a graph cannot do"
        if name in PYTHON:
            with self:
                return PYTHON[name](*args, **kwargs)
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, allocated(out, args, kwargs)))
        return out


def allocated(out: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors of an operator's output that do not share memory with its input."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    used = {one.untyped_storage().data_ptr() for one in tensors}
    results = [one for one in tree_leaves(out) if isinstance(one, Tensor) and one.numel()]
    return [one for one in results if one.untyped_storage().data_ptr() not in used]


class TapeGraphs:
    """The interface of `CudaGraphs`."""

    def __init__(self) -> None:
        # id of a tensor of a capture -> the tensor, and the tensor that a builder has made for its place
        self.exchanged: dict[int, tuple[Tensor, Tensor]] = {}
        self.captured = self.replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with Tape() as tape:
            run()
        self.captured += 1

        def now(one: Tensor) -> Tensor:
            return self.exchanged.get(id(one), (one, one))[1]

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, own in tape.calls:
                args, kwargs = tree_map_only(Tensor, now, (args, kwargs))
                made = allocated(func(*args, **kwargs), args, kwargs)
                for here, new in zip(own, made, strict=True):
                    here.copy_(new)
            for *_, own in tape.calls:
                for one in own:
                    one.fill_(float("nan") if one.is_floating_point() else 1)

        return replay

    def refreshed(self, captured: Any, built: Any) -> None:
        """Check that all that a graph has captured is still there.

        The CPU kernels' schedule is exchanged: it cannot be copied, because it contains pointers to itself.
        """
        for field in dataclasses.fields(captured):
            old, new = getattr(captured, field.name), getattr(built, field.name)
            if field.name == "scheduler_metadata":
                self.exchanged[id(old)] = old, new
            elif isinstance(old, Tensor):
                assert (old.data_ptr(), old.shape, old.stride()) == (new.data_ptr(), new.shape, new.stride()), field
            else:
                assert old == new, field
