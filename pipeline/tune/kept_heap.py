"""Memory that a training step frees stays with the process for the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from actors.engine.cpu.packing import give_memory_back

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGEST = 32 * 2**20  # bytes; the C library's own limit of MMAP_THRESHOLD
DEFAULT = 128 * 2**10


@contextmanager
def kept_heap() -> Iterator[None]:
    """In the block the C library returns no memory to the system, but for pieces above `LARGEST` bytes.

    Activations are freed in the backward pass and needed again by the next step: without this the system clears each of
    their pages at every step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if mallopt is None:
        yield
        return
    mallopt(TRIM_THRESHOLD, 2**31 - 1)
    mallopt(MMAP_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        mallopt(TRIM_THRESHOLD, DEFAULT)
        mallopt(MMAP_THRESHOLD, DEFAULT)
        give_memory_back()
