"""Builds `kernels.cpp` with the machine's C++ compiler, once, and loads it.

The library lies in the cache folder ($SKIPDECODE_CACHE, else ~/.cache/skipdecode); its name is a digest of source,
compiler and processor. It runs on torch's threads: g++ links the OpenMP library that torch has loaded. Without a
compiler there is no library, and callers use torch's own operations, whose rounding differs in bfloat16.
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

from actors.engine.errors import flat

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
BUILD_SECONDS = 300
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# for each kernel its numbers of pointers, 64-bit integers and floats, in this order, and its return type
_SIGNATURES: dict[str, tuple[int, int, int, Any]] = {
    "attend": (5, 13, 1, None),
    "append": (5, 8, 0, ctypes.c_bool),
    "rotate": (3, 5, 0, None),
    "normalize": (4, 2, 1, None),
    "normalize_groups": (2, 4, 1, None),
    "gate": (2, 2, 0, None),
    "sample": (14, 5, 0, None),
}
_MULTIPLYING: dict[str, tuple[int, int, int, Any]] = {  # only for bfloat16, on some processors
    "multiply": (5, 4, 0, None),
    "attend_prompts": (7, 8, 1, None),
    "pack_prefix": (4, 3, 0, None),
    "layers_step": (4, 1, 0, ctypes.c_bool),
    "layer_prompts": (2, 0, 0, None),
    "step_workspace": (1, 1, 0, ctypes.c_int64),
    "prompts_workspace": (2, 0, 0, ctypes.c_int64),
}
_QUANTIZING: dict[str, tuple[int, int, int, Any]] = {  # on fewer still
    "multiply_int8": (5, 4, 0, None),
    "likeliest": (6, 4, 0, None),
    "greedy_steps": (8, 2, 0, ctypes.c_bool),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built library; None, and one warning, where it cannot be built or used."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    try:
        loaded = _declared(ctypes.CDLL(str(_built(compiler))))
        if torch.get_num_threads() == loaded.threads():  # torch first: its first call fixes the number
            return loaded
        problem = f"{' '.join(compiler)} links another OpenMP library than torch's"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        problem = f"{' '.join(compiler)}: {lines[0]}"
    # no compiler, no home folder, a read-only one, a library of other contents
    except (OSError, RuntimeError, AttributeError, subprocess.TimeoutExpired) as error:
        problem = f"{' '.join(compiler)}: {flat(error)}"
    log.warning("this CPU is two to six times as fast with a C++ compiler (g++, or $CXX): %s", problem)
    return None


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has kernels for `dtype`; the first call may take seconds, to build them."""
    return device.type == "cpu" and dtype in _NAMES and library() is not None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `multiply` exists: in bfloat16, with AVX512-BF16."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    loaded = library()
    return loaded is not None and bool(loaded.can_multiply())


def has_amx() -> bool:
    """Return whether the processor has AMX in bfloat16, with which the library's products are faster than ours."""
    return "amx_bf16" in _processor()


def quantizes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `multiply_int8` exists: where `multiplies`, with AVX512-VNNI."""
    loaded = library() if multiplies(dtype, device) else None
    return loaded is not None and bool(loaded.can_quantize())


def _built(compiler: Sequence[str]) -> Path:
    """The library's file; built if it does not exist."""
    run = functools.partial(
        subprocess.run, capture_output=True, text=True, errors="replace", check=True, timeout=BUILD_SECONDS
    )
    version: str = run([*compiler, "--version"]).stdout
    source = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = "\0".join((*source, version, *compiler, *FLAGS, platform.machine(), _processor()))
    folder = Path(os.environ.get("SKIPDECODE_CACHE") or Path.home() / ".cache" / "skipdecode") / "kernels"
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            run([*compiler, *FLAGS, str(SOURCE), "-o", str(made)])
            made.replace(path)  # atomic: another process may be building it too
    return path


@functools.cache
def _processor() -> str:
    """Model and instructions of the processor, on which -march=native depends."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(fields)}))


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.threads.restype = ctypes.c_int64
    loaded.can_multiply.restype = loaded.can_quantize.restype = ctypes.c_bool
    signatures = [(f"{name}_{dtype}", what) for name, what in _SIGNATURES.items() for dtype in _NAMES.values()]
    if loaded.can_multiply():
        signatures += [(f"{name}_bfloat16", what) for name, what in _MULTIPLYING.items()]
    if loaded.can_quantize():
        signatures += [(f"{name}_bfloat16", what) for name, what in _QUANTIZING.items()]
    for name, (pointers, integers, floats, returned) in signatures:
        kinds = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
        function = getattr(loaded, name)
        function.argtypes, function.restype = kinds, returned
    return loaded


@functools.cache
def kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """The native function; call `available` or `multiplies` before."""
    loaded = library()
    assert loaded is not None
    function: Callable[..., Any] = getattr(loaded, f"{name}_{_NAMES[dtype]}")
    return function
