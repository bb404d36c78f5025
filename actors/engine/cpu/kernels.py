"""Builds `kernels.cpp` and `products.cpp` with the machine's C++ compiler, once, and calls it on torch tensors.

The library lies in the cache folder ($SKIPDECODE_CACHE, else ~/.cache/skipdecode) under a name that says its source,
compiler and processor. It runs on torch's threads: g++ links the OpenMP library that torch has loaded. Without a
compiler there is no library, and callers fall back on torch's own operations, whose rounding differs in bfloat16.
Shapes: B rows, Q query heads, H key/value heads, K slots, D head size, E hidden size, I intermediate size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "products.cpp"))
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
BUILD_SECONDS = 300
LARGEST_HEAD = 256  # numbers
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# pointers, 64-bit integers and floats that a kernel takes, in this order, and what it returns
_SIGNATURES: dict[str, tuple[int, int, int, Any]] = {
    "attend": (5, 13, 1, None),
    "append": (5, 8, 0, ctypes.c_bool),
    "rotate": (3, 5, 0, None),
    "normalize": (4, 2, 1, None),
    "gate": (2, 2, 0, None),
    "multiply": (5, 4, 0, None),
}
PANEL = 48  # outputs of a product that lie together in its packed weight


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built library; None, and one warning, where it cannot be built or used."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    try:
        loaded = _declared(ctypes.CDLL(str(_built(compiler))))
        if torch.get_num_threads() == loaded.threads():  # torch first: its first call settles the number
            return loaded
        problem = f"{' '.join(compiler)} links another OpenMP library than torch's"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        problem = f"{' '.join(compiler)}: {lines[0]}"
    # no compiler, no home or none that can be written, a library of something else
    except (OSError, RuntimeError, AttributeError, subprocess.TimeoutExpired) as error:
        problem = f"{' '.join(compiler)}: {' '.join(str(error).split())}"
    log.warning("decode on this CPU takes about twice as long without a C++ compiler (g++, or $CXX): %s", problem)
    return None


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for these numbers here; the first call may take seconds, to build them."""
    return device.type == "cpu" and dtype in _NAMES and library() is not None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `multiply` can, and is the fastest: with AVX512-BF16 and without AMX."""
    loaded = library()
    return device.type == "cpu" and dtype == torch.bfloat16 and loaded is not None and bool(loaded.can_multiply())


def _built(compiler: Sequence[str]) -> Path:
    """The library's file; made where it is not there."""
    run = functools.partial(
        subprocess.run, capture_output=True, text=True, errors="replace", check=True, timeout=BUILD_SECONDS
    )
    version: str = run([*compiler, "--version"]).stdout
    identity = "\0".join(
        (*(one.read_text() for one in SOURCES), version, *compiler, *FLAGS, platform.machine(), _processor())
    )
    folder = Path(os.environ.get("SKIPDECODE_CACHE") or Path.home() / ".cache" / "skipdecode") / "kernels"
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            run([*compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)])
            made.replace(path)  # whole or not at all: another process may be building it too
    return path


def _processor() -> str:
    """Model and instructions, which -march=native follows."""
    told = Path("/proc/cpuinfo")
    if not told.exists():
        return platform.processor()
    telling = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(sorted({line for line in told.read_text().splitlines() if line.startswith(telling)}))


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, (pointers, integers, floats, returned) in _SIGNATURES.items():
        kinds = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
        for dtype in _NAMES.values() if name != "multiply" else ("bfloat16",):
            function = getattr(loaded, f"{name}_{dtype}")
            function.argtypes, function.restype = kinds, returned
    loaded.threads.restype = ctypes.c_int64
    loaded.can_multiply.restype = ctypes.c_bool
    return loaded


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    loaded = library()
    assert loaded is not None, "available() comes first"
    kernel: Callable[..., Any] = getattr(loaded, f"{name}_{_NAMES[dtype]}")
    return kernel


def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """One token a row: query [B, Q, D] over keys and values [B, H, K, D] -> [B, Q, D].

    seen: bool [B or 1, K], the slots that a row attends to, without gaps; None: all. Other slots are not read.
    """
    rows, heads, width, size = keys.shape
    if query.stride(2) != 1 or query.stride(1) != size:
        query = query.contiguous()
    assert query.dtype == keys.dtype == values.dtype and values.shape == keys.shape and len(query) == rows
    assert size <= LARGEST_HEAD and keys.stride(3) == values.stride(3) == 1
    assert seen is None or (seen.dtype == torch.bool and seen.shape[1] == width and (width == 1 or seen.stride(1) == 1))
    output = torch.empty(rows, query.shape[1], size, dtype=query.dtype)
    _kernel("attend", query.dtype)(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        None if seen is None else seen.data_ptr(),
        output.data_ptr(),
        *(rows, heads, query.shape[1] // heads, width, size, query.stride(0)),
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if seen is None or len(seen) == 1 else seen.stride(0),
        scale,
    )
    return output


def append(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, slots: Tensor) -> None:
    """Write one token a row, keys and values [B, H, D], to slots [B] int64 of buffers [B, H, K, D] of one layout."""
    rows, heads, size = keys.shape
    assert key_buffer.stride() == value_buffer.stride() and key_buffer.stride()[2:] == (size, 1)
    assert keys.dtype == values.dtype == key_buffer.dtype == value_buffer.dtype
    assert slots.dtype == torch.int64 and slots.shape == (rows,) and slots.is_contiguous()
    keys, values = (one if one.stride()[1:] == (size, 1) else one.contiguous() for one in (keys, values))
    inside = _kernel("append", keys.dtype)(
        keys.data_ptr(),
        values.data_ptr(),
        key_buffer.data_ptr(),
        value_buffer.data_ptr(),
        slots.data_ptr(),
        *(rows, heads, size, key_buffer.shape[2], keys.stride(0), values.stride(0), *key_buffer.stride()[:2]),
    )
    assert inside, "a slot lies outside the buffers"


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Turn states [B, heads, D] in place by cosines and sines [B, D], as transformers' `apply_rotary_pos_emb` does."""
    rows, heads, size = states.shape
    assert states.stride()[1:] == (size, 1) and states.dtype == cosines.dtype == sines.dtype
    assert cosines.shape == sines.shape == (rows, size) and cosines.stride() == sines.stride() == (size, 1)
    pointers = states.data_ptr(), cosines.data_ptr(), sines.data_ptr()
    _kernel("rotate", states.dtype)(*pointers, rows, heads, size, states.stride(0), size)


def normalize(hidden: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of hidden [..., E] with a bias [E], RMSNorm without one."""
    size = hidden.shape[-1]
    hidden = hidden.contiguous()
    assert hidden.dtype == weight.dtype and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    output = torch.empty_like(hidden)
    _kernel("normalize", hidden.dtype)(
        hidden.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        *(hidden.numel() // size, size, epsilon),
    )
    return output


def gate(both: Tensor) -> Tensor:
    """[gate, up] of [..., 2 I], contiguous -> silu(gate) * up of [..., I]."""
    size = both.shape[-1] // 2
    assert both.is_contiguous()
    output = torch.empty(*both.shape[:-1], size, dtype=both.dtype)
    _kernel("gate", both.dtype)(both.data_ptr(), output.data_ptr(), output.numel() // size, size)
    return output


def pack(weight: Tensor) -> Tensor:
    """Weight [O, I], I even -> [O / 48 rounded up, I / 2, 48, 2], for `multiply`."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    packed = torch.zeros(panels, inputs // 2, PANEL, 2, dtype=weight.dtype)
    for number, panel in enumerate(weight.detach().split(PANEL)):
        packed[number, :, : len(panel)] = panel.view(-1, inputs // 2, 2).transpose(0, 1)
    return packed


def multiply(
    hidden: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    """hidden [..., I] -> relu(hidden W^T + bias) + residual [..., O] by the packed weight of W [O, I]."""
    inputs = packed.shape[1] * 2
    hidden = hidden.contiguous()
    rows = hidden.numel() // inputs
    output = torch.empty(*hidden.shape[:-1], outputs, dtype=hidden.dtype)
    assert hidden.dtype == packed.dtype == torch.bfloat16 and hidden.shape[-1] == inputs
    assert packed.shape[0] == -(-outputs // PANEL) and packed.is_contiguous() and packed.data_ptr() % 64 == 0
    assert bias is None or (bias.dtype == hidden.dtype and bias.shape == (outputs,) and bias.is_contiguous())
    if residual is not None:
        residual = residual.contiguous()
        assert residual.dtype == hidden.dtype and residual.shape == output.shape
    _kernel("multiply", hidden.dtype)(
        hidden.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        output.data_ptr(),
        *(rows, inputs, outputs, relu),
    )
    return output
