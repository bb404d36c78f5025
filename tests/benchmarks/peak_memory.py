"""The most memory that a process held while it answered; Linux alone. Needs nothing but the standard library."""

from __future__ import annotations

import ctypes
from pathlib import Path


def forget_peak() -> None:
    """Begin anew, from what is resident now; freed memory that the C library keeps is given back first."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most bytes resident at once since `forget_peak`: of the whole process, interpreter and libraries included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")
