"""A GPU that computes nothing, for machines without one: shapes, devices, waits and compilation are as on a real one.

    with fake_gpu() as gpu:      # before TRITON_INTERPRET is set
        engine over a model on "cuda" ...

Tensors are torch's fake ones, so that two devices in one operation, and sizes that hang on values, are errors. Triton's
kernels are compiled for an H100 as they are launched, and not run. What the host would wait for is noted in `waits`,
and inside a capture, where a graph would hold the host's memory of that moment, copies from or to it are refused.
What the device is asked by name reads as 1, 1.0 and, of flags, as `flags`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, MockTensor

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static impl::DeviceGuardImplRegistrar fake(DeviceType::CUDA, new impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
"""

NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device")


class Gpu(TorchDispatchMode):
    """What has happened on it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []  # what the host has waited for, by operation
        self.capturing = False
        self.captures = self.replays = 0
        self.launches = 0  # of kernels, outside graphs or into them
        self.own_launches = 0  # of those, Triton's
        self.flags = False  # what flags read as
        self.kernels: dict[str, Any] = {}  # compiled, by their hash
        self.peak = 0  # most bytes at once of the tensors made while they were counted
        self.largest: list[int] = []  # of these tensors
        self._held: dict[int, tuple[StorageWeakRef, int]] | None = None
        self.pinned = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.to:  # in inference mode it comes here before it is taken apart
            with self:
                return func.decompose(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        out = func(*args, **kwargs)
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if self._held is not None:
            self._count(made, self._held)
        if self._is_launch(func) and any(one.device.type == "cuda" for one in made):
            self.launches += 1
        devices = {one.device.type for one in [*given, *made] if one.device.type != "cpu" or one.dim()}
        if len(devices) > 1:
            assert not self.capturing, f"{func}: a graph would hold the host's memory of this moment"
            known = func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking")
            upward = bool(given) and given[0].device.type == "cpu"
            if not (known and (not upward or given[0] in self.pinned)):
                self.waits.append(f"{func} of {[(one.device.type, tuple(one.shape)) for one in given]}")
        return out

    def _is_launch(self, func: Any) -> bool:
        """Whether an operation asks anything of the device: not if it is a view, or only takes memory."""
        returns = func._schema.returns
        view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        return not view and func.overloadpacket.__name__ not in NO_LAUNCH

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Tensors made inside are counted in `peak`, until they are gone."""
        self.peak, self._held = 0, {}
        yield
        self._held = None

    def _count(self, made: list[Tensor], held: dict[int, tuple[StorageWeakRef, int]]) -> None:
        storages = [one.untyped_storage() for one in made if one.device.type == "cuda"]
        new = [one for one in storages if one._cdata not in held or held[one._cdata][0].expired()]
        if new:
            for key in [key for key, (one, _) in held.items() if one.expired()]:
                del held[key]
            held.update((one._cdata, (StorageWeakRef(one), one.nbytes())) for one in new)
            total = sum(count for _, count in held.values())
            if total > self.peak:
                self.peak, self.largest = total, sorted((count for _, count in held.values()), reverse=True)[:8]

    def pin(self, tensor: Tensor) -> Tensor:
        """As Tensor.pin_memory."""
        copy = tensor.clone()
        self.pinned[copy] = True
        return copy

    def told(self, tensor: Tensor) -> Any:
        """As Tensor.tolist."""
        if tensor.device.type != "cpu":
            self.waits.append("tolist")
        value: Any = self.flags if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1
        for size in reversed(tensor.shape):
            value = [value] * size
        return value

    def launch(self, kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        """Compile, as a launch would, with pointers that are aligned as those of the tensors would be."""
        given = []
        for one in args:
            if isinstance(one, Tensor):
                assert one.device.type == "cuda", "a kernel would read the host's memory"
                assert one.is_contiguous() or one.stride(-1) == 1
                pointer = MockTensor(one.dtype)
                offset = one.storage_offset() * one.element_size() % 16
                pointer.data_ptr = lambda offset=offset: offset  # type: ignore[method-assign]
                given.append(pointer)
            else:
                given.append(one)
        compiled = kernel.run(*given, warmup=True, **kwargs)
        self.kernels[compiled.hash] = compiled
        self.launches += 1
        self.own_launches += 1

    def resources(self, compiled: Any) -> dict[str, int]:
        """Registers, and bytes of stack and of local memory, of a thread of a compiled kernel."""
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}


class _Target:
    """Triton's driver of an H100 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Graph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.captured = gpu, False

    def replay(self) -> None:
        assert self.captured and not self.gpu.capturing
        self.gpu.replays += 1


class _Stream:
    def __init__(self, device: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


def _load_guard() -> None:
    """A CPU's torch has no CUDA device that tensors could say they are on."""
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib", "-lc10"]
        subprocess.run(["g++", str(source), "-o", str(library), *flags], check=True)
        torch.ops.load_library(str(library))


@contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """See above."""
    assert not torch.cuda.is_available()
    if torch.version.cuda is None:
        _load_guard()
    gpu = Gpu()

    @contextmanager
    def graph(captured: _Graph, **_: Any) -> Iterator[None]:
        assert not gpu.capturing
        gpu.capturing = True
        yield
        gpu.capturing, captured.captured = False, True
        gpu.captures += 1

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:
            return original(kernel, *args, grid=grid, warmup=True, **kwargs)
        assert all(0 < side <= (2**31 - 1 if place == 0 else 65_535) for place, side in enumerate(grid))
        return gpu.launch(kernel, *args, grid=grid, **kwargs)

    original: Callable[..., Any] = JITFunction.run
    patches = {
        "CUDAGraph": lambda: _Graph(gpu),
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: gpu.waits.append("synchronize"),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132),
        "get_device_name": lambda *_: "none",
        "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30),
        "empty_cache": lambda: None,
    }
    triton.runtime.driver.set_active(_Target())  # type: ignore[arg-type]
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda one: gpu.pin(one)))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda one: gpu.told(one)))
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=False))
        stack.enter_context(gpu)
        yield gpu
