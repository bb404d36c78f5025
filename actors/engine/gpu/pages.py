"""Paged key/value cache: rows allocate pages as they grow, and free them layer by layer as their depth falls.

A row has pages only in layers that it will still run: at position t those with t < n_l, for the tokens that it has
so far. A page that is freed can be allocated again immediately; pages are never copied. Page 0 belongs to no row:
lanes without a row write there. Pages hold keys and values in the model's dtype, or their codes of 8 bits with a scale
for each token and head, see `operations.LayerPages`.
Shapes: L layers, R rows, W pages of the longest row, H key/value heads, T tokens of a page, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.errors import UserError
from actors.engine.gpu.operations import LayerPages
from actors.engine.schedules.schedule import Schedule
from actors.engine.working_memory import PAGE_TOKENS

SCALE = torch.float32  # dtype of the codes' scales
SHRINK_SHARE = 12  # the cache loses one page in so many when GPU memory runs out, 8%
Numbers = NDArray[np.int64]


def pages_at(uses: Numbers, prompt: Numbers, positions: Numbers, ahead: int) -> Numbers:
    """Pages [L, N] that N rows need for `ahead` more tokens; 0 in layers that they will not run again.

    uses: n_l of each layer [L]. prompt: tokens [N]. positions: t of the rows' next input [N].
    """
    last = uses[:, None]
    tokens = np.minimum(prompt + positions + ahead, prompt + last)
    return np.where(positions < last, -(-tokens // PAGE_TOKENS), 0)


@cache
def _all_uses(schedule: Schedule) -> Numbers:
    """n_l [L] of a row without a limit."""
    return np.array([schedule.uses(layer, 2**31) for layer in range(schedule.num_layers)])


def layer_uses(schedule: Schedule, max_new_tokens: int) -> Numbers:
    """n_l [L] of a row with at most so many new tokens."""
    return np.minimum(_all_uses(schedule), max(0, max_new_tokens - 1))


@lru_cache(maxsize=2**16)
def row_pages(schedule: Schedule, prompt_tokens: int, max_new_tokens: int, ahead: int = 1) -> int:
    """Most pages that such a row has at any time, over all layers, if it allocates for `ahead` tokens at a time."""
    uses = layer_uses(schedule, max_new_tokens)
    # the count is largest just before a layer's pages are freed
    positions = np.unique(np.maximum(uses - 1, 0))
    return int(pages_at(uses, np.full(len(positions), prompt_tokens), positions, ahead).sum(axis=0).max())


def token_bytes(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a token's key and value in one layer. itemsize: of a number; 1: of a code, and scales count too."""
    return 2 * kv_heads * (head_dim * itemsize + (SCALE.itemsize if itemsize == 1 else 0))


def page_bytes(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a page, as `token_bytes`."""
    return PAGE_TOKENS * token_bytes(kv_heads, head_dim, itemsize)


@dataclass(frozen=True)
class PageMemory:
    """`keys` and `values` [count + 1, H, T, D] of all pages; of codes the `scales` [count + 1, H, T] of either."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in (self.keys, self.values, *(self.scales or ())))


class PoolUser(Protocol):
    """An engine that uses the memory of a pool."""

    def drop_pages(self) -> None:
        """Drop every reference to the pool's memory, which is about to be freed."""
        ...


class PagePool:
    """The memory of `pages` pages, allocated once for all engines of one device of which one runs at a time."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.memory: PageMemory | None = None
        self.users: WeakSet[PoolUser] = WeakSet()

    def drop(self) -> None:
        """Free the memory, for all users."""
        self.memory = None
        for user in self.users:
            user.drop_pages()

    def shrink(self, least: int) -> None:
        """Free the memory for all users, and lower `pages` by a twelfth, rounded up, but not below `least`.

        If `pages` is at or below `least`, it does not change. The next `allocate` call allocates memory again.
        """
        self.pages = max(min(least, self.pages), self.pages - -(-self.pages // SHRINK_SHARE))
        self.drop()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> PageMemory:
        """Keys and values of this shape; those of the last call if they have it. A dtype of 8 bits is that of codes."""
        if self.memory is None or self.memory.keys.shape != shape:
            self.drop()  # freed before the new memory is allocated

            # zeros: a masked slot that was never written must not hold a NaN, which a weight of 0 does not remove
            def two(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
                return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

            self.memory = PageMemory(*two(shape, dtype), two(shape[:-1], SCALE) if dtype.itemsize == 1 else None)
        return self.memory


class PagedCache:
    """`count` pages, their `memory`, and the page table [L, R + 1, W] of each layer and row.

    Row R has page 0 alone, for lanes without a row. dtype: of keys and values, or, with 8 bits, of their codes.

    Raises:
        UserError: No pages at all.
    """

    def __init__(
        self,
        schedule: Schedule,
        rows: int,
        pages: int,
        prompt_tokens: int,
        max_new_tokens: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        pool: PagePool | None = None,
    ) -> None:
        if pages < 1:
            raise UserError("no page of cache fits the budget")
        self.max_new_tokens = max_new_tokens
        self.uses = layer_uses(schedule, max_new_tokens)
        width = -(-(prompt_tokens + max_new_tokens) // PAGE_TOKENS)
        shape = (pages + 1, kv_heads, PAGE_TOKENS, head_dim)
        self.memory = (pool or PagePool(pages)).allocate(shape, dtype, device)
        self.table = torch.zeros(schedule.num_layers, rows + 1, width, dtype=torch.int32, device=device)
        self._table: NDArray[np.int32] = np.zeros(self.table.shape, dtype=np.int32)  # the host's copy
        self._counts: Numbers = np.zeros((schedule.num_layers, rows), dtype=np.int64)
        self._free: NDArray[np.int32] = np.arange(pages, 0, -1, dtype=np.int32)  # a stack, the lowest numbers on top
        self.count = self._left = pages
        self.most = 0  # most pages allocated at any time

    @property
    def longest(self) -> int:
        """Tokens of the longest possible row."""
        return self.table.shape[2] * self.memory.keys.shape[2]

    @property
    def free(self) -> int:
        """Pages that are not allocated."""
        return self._left

    @property
    def bytes(self) -> int:
        """Bytes of all pages."""
        return self.memory.bytes

    def layer(self, number: int) -> LayerPages:
        """The pages of a layer."""
        return LayerPages(self.memory.keys, self.memory.values, self.table[number], self.memory.scales)

    def row_total(self, row: int) -> int:
        """Pages of a row, over all layers."""
        return int(self._counts[:, row].sum())

    def grow(self, rows: Sequence[int], prompt: Sequence[int], positions: Sequence[int], ahead: int) -> bool:
        """Allocate pages of `ahead` more tokens for each row, and free those of layers that it will not run again.

        False if there are too few pages; then none is allocated.
        """
        index = np.asarray(rows, dtype=np.int64)
        needed = pages_at(self.uses, np.asarray(prompt), np.asarray(positions), ahead)
        self._free_pages(index, (needed == 0) & (self._counts[:, index] > 0))
        counts = self._counts[:, index]
        missing = np.maximum(needed - counts, 0)
        total = int(missing.sum())
        if total > self._left:
            return False
        if total:
            layers, members = np.nonzero(missing)
            new = missing[layers, members]
            within = np.arange(total) - np.repeat(np.cumsum(new) - new, new)
            columns = np.repeat(counts[layers, members], new) + within
            self._left -= total
            pages = self._free[self._left : self._left + total]
            self._write(np.repeat(layers, new), np.repeat(index[members], new), columns, pages)
            self._counts[:, index] += missing
            self.most = max(self.most, self.count - self._left)
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Free all pages of rows."""
        index = np.asarray(rows, dtype=np.int64)
        self._free_pages(index, self._counts[:, index] > 0)

    def _free_pages(self, index: Numbers, which: NDArray[np.bool_]) -> None:
        """Free the pages of rows index [N] in the layers of which [L, N]. The table keeps their numbers, unread."""
        layers, members = np.nonzero(which)
        for layer, row in zip(layers.tolist(), index[members].tolist(), strict=True):
            count = int(self._counts[layer, row])
            self._free[self._left : self._left + count] = self._table[layer, row, :count]
            self._left += count
            self._counts[layer, row] = 0

    def _write(self, layers: Numbers, rows: Numbers, columns: Numbers, pages: NDArray[np.int32]) -> None:
        """Write page numbers into both tables, without waiting for the GPU's."""
        self._table[layers, rows, columns] = pages
        flat = (layers * self._table.shape[1] + rows) * self._table.shape[2] + columns
        self.table.view(-1).index_copy_(0, upload(flat, self.table.device), upload(pages.copy(), self.table.device))


def upload(numbers: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it; integers of a list become int64."""
    host = numbers if isinstance(numbers, Tensor) else torch.as_tensor(np.asarray(numbers))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
