"""Compiles `kernels.cpp` once with the machine's C++ compiler, and loads the resulting shared library.

The library file is in the cache folder ($SKIPDECODE_CACHE, else ~/.cache/skipdecode). Its name is a digest of source,
compiler and processor. The kernels run in torch's threads, because they use the OpenMP library that torch has loaded.
Without a compiler, the engine runs transformers' layers instead, which round their results differently.
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

from actors.engine.errors import UserError, flat
from actors.engine.model.file_digests import cache_root

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
)
BUILD_SECONDS = 900
PANEL = 48  # number of outputs whose weights are stored together in a packed weight
LARGEST_HEAD = 256  # largest head size that the kernels support
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# kernel -> its number of pointer, 64-bit integer and float arguments; the arguments come in this order
_SIGNATURES = {
    "sample": (1, 0, 0),
    "step": (5, 1, 0),
    "prompts": (2, 0, 0),
    "half": (6, 2, 0),
    "pack_prefix": (4, 3, 0),
    "normalize": (4, 2, 1),
    "multiply": (5, 4, 0),
    "multiply_int8": (5, 4, 0),
    "likeliest": (3, 1, 0),
}
_OUTSIDE, _NO_MEMORY = 1, 2  # must equal `Status` in kernels.cpp


def structure(pointers: str, integers: str, floats: str = "") -> Any:
    """Return a ctypes structure of pointers, then 64-bit integers, then floats. Arguments: field names with spaces."""
    fields: list[tuple[str, Any]] = [(name, ctypes.c_void_p) for name in pointers.split()]
    fields += [(name, ctypes.c_int64) for name in integers.split()]
    fields += [(name, ctypes.c_float) for name in floats.split()]
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the kernel library; compile it if necessary. If this fails, log a warning once and return None."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
        if torch.get_num_threads() == loaded.threads():  # torch's call comes first: it sets the number of threads
            return loaded
        problem = f"{' '.join(compiler)} does not link torch's OpenMP library"
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"status {error.returncode}"]
        problem = f"{' '.join(compiler)}: {lines[0]}"
    # no compiler, a missing or read-only home folder, or a library file without an expected function
    except (OSError, UserError, AttributeError, subprocess.TimeoutExpired) as error:
        problem = f"{' '.join(compiler)}: {flat(error)}"
    log.warning(
        "no CPU kernels, so generation takes two to six times as long: %s; they need g++ or the compiler in $CXX",
        problem,
    )
    return None


def available(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernel `sample` exists for `dtype`. The first call may compile the kernels, for seconds."""
    return device.type == "cpu" and dtype in _NAMES and library() is not None


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernels for matrix products and layers exist for `dtype`.

    They exist for float32 on all CPUs, and for bfloat16 on CPUs without AMX. With AMX, torch's products are faster.
    """
    loaded = library() if device.type == "cpu" and dtype in _NAMES else None
    return loaded is not None and (dtype == torch.float32 or bool(loaded.can_multiply()))


def quantizes(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `multiply_int8` and `likeliest` exist. They need a CPU with AVX512-BF16 and -VNNI, without AMX."""
    loaded = library() if dtype == torch.bfloat16 and multiplies(dtype, device) else None
    return loaded is not None and bool(loaded.can_quantize())


def _built(compiler: Sequence[str]) -> Path:
    """Return the path of the library file; compile the file if it does not exist."""
    run = functools.partial(
        subprocess.run, capture_output=True, text=True, errors="replace", check=True, timeout=BUILD_SECONDS
    )
    version: str = run([*compiler, "--version"]).stdout
    source = [path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h")))]
    identity = "\0".join((*source, version, *compiler, *FLAGS, platform.machine(), _processor()))
    folder = cache_root(None) / "kernels"
    path = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            run([*compiler, *FLAGS, str(SOURCE), "-o", str(made)])
            made.replace(path)  # atomic, because another process may build the same file at the same time
    return path


@functools.cache
def _processor() -> str:
    """Return the processor's model and instruction sets as text. -march=native depends on both."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(fields)}))


@functools.cache
def kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return a kernel as a function. It raises MemoryError if there is no memory for its intermediate results.

    Check first that the kernel exists: with `available` for `sample`, with `quantizes` for `multiply_int8` and
    `likeliest`, and with `multiplies` for all other kernels.
    """
    loaded = library()
    assert loaded is not None
    function = getattr(loaded, f"{name}_{_NAMES[dtype]}")
    pointers, integers, floats = _SIGNATURES[name]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
    function.restype, function.errcheck = ctypes.c_int64, _checked
    return function  # type: ignore[no-any-return]


def _checked(status: int, function: Any, arguments: Any) -> None:
    if status == _NO_MEMORY:
        raise MemoryError(f"the system has no memory for the intermediate results of kernel {function.__name__}")
    assert status != _OUTSIDE, "a token, row or slot is outside its table or buffer, or a layer has no buffers"
