"""Weights in one region of huge pages, where the system has them.

A step reads every weight once, and with pages of 4 KiB the processor looks up thousands of addresses: a step of one row
takes a fifth to a third longer, and engines of equal weights differ by as much as their pages lie well or badly.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from actors.engine.cpu.products import PanelProduct, give_memory_back

PAGE = 2**21  # bytes; other sizes only waste space
ALIGNED = 64  # bytes, for the kernels
GIVEN_BACK = 2**24  # bytes freed before the C library is asked to give them back


def move(products: Iterable[PanelProduct]) -> None:
    """Move packed weights to one region of huge pages, one after another.

    Each is freed behind its copy, and the C library gives its memory back: there are never two copies of all.
    """
    products, freed = list(products), 0
    for one, place in zip(products, _region([one.packed for one in products]), strict=True):
        one.packed = place.copy_(one.packed)
        freed += one.packed.nbytes
        if freed >= GIVEN_BACK:
            give_memory_back()
            freed = 0


def moved(tensor: Tensor) -> Tensor:
    """Return a copy in huge pages."""
    return _region([tensor])[0].copy_(tensor)


def _region(like: Sequence[Tensor]) -> list[Tensor]:
    """Allocate tensors of these shapes, without setting their values.

    Raises:
        MemoryError: The system has no memory for them.
    """
    sizes = [-(-one.nbytes // ALIGNED) * ALIGNED for one in like]
    # a page more at both ends, which nothing touches and so takes no memory
    size = sum(sizes) + 2 * PAGE
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {size} bytes for weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region alive
    places, first = [], -memory.data_ptr() % PAGE
    for one, aligned in zip(like, sizes, strict=True):
        places.append(memory[first : first + one.nbytes].view(one.dtype).view(one.shape))
        first += aligned
    return places
