"""The side of a peer that runs in a Python of its own: workloads come as lines of JSON, seconds go back.

Imports nothing of the engine and needs nothing but the standard library, for it runs where the peer is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

Answer = Callable[[list[list[int]], list[int]], int]


def forget_peak() -> None:
    """Reset the peak to the memory that is resident now. Return freed memory to the system first."""
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


def serve(start: Callable[[str, int, int], tuple[Answer, str]]) -> None:
    """start: (checkpoint, threads, most rows in flight) -> what answers prompts with so many new tokens each and says
    how many it made, and the peer's version.

    What the peer itself prints goes to standard error.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer, version = start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"version": version}), file=replies)
    for line in sys.stdin:
        asked = json.loads(line)
        forget_peak()
        began = time.perf_counter()
        tokens = answer(asked["prompts"], asked["new"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak_bytes()}), file=replies)
