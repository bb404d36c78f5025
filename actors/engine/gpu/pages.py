"""Key/value cache in pages that rows take as they grow, and give back layer by layer as their depth falls.

A row holds pages only in layers that it will still run: at position t those with t < n_l, for the tokens that it has,
not for those that it may come to. What it gives back another row may take at once; nothing is ever copied to close a
gap. Page 0 is nobody's: what must be written nowhere is written there.
Shapes: L layers, R rows, W pages of the longest row, H key/value heads, T tokens of a page, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.errors import UserError
from actors.engine.schedule import Schedule

PAGE_TOKENS = 16
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
    """n_l of a row without an end [L]."""
    return np.array([schedule.uses(layer, 2**31) for layer in range(schedule.num_layers)])


def layer_uses(schedule: Schedule, max_new_tokens: int) -> Numbers:
    """n_l of each layer [L]."""
    return np.minimum(_all_uses(schedule), max(0, max_new_tokens - 1))


@lru_cache(maxsize=2**16)
def row_pages(schedule: Schedule, prompt_tokens: int, max_new_tokens: int, ahead: int = 1) -> int:
    """Most pages that such a row holds at any time, over all layers, if it is given `ahead` tokens at a time."""
    uses = layer_uses(schedule, max_new_tokens)
    # just before a layer is given back, and at the end of what is given then
    positions = np.unique(np.maximum(uses - 1, 0))
    return int(pages_at(uses, np.full(len(positions), prompt_tokens), positions, ahead).sum(axis=0).max())


def page_bytes(kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of a page's keys and values."""
    return 2 * kv_heads * PAGE_TOKENS * head_dim * itemsize


class PagePool:
    """The memory of pages, taken once for all engines of one device that are used one after the other.

    Whoever takes part has a method `let_go`, which is called when the memory is to go.
    """

    def __init__(self) -> None:
        self.memory: tuple[Tensor, Tensor] | None = None  # keys, values
        self.users: WeakSet[Any] = WeakSet()

    def drop(self) -> None:
        """Give the memory back, for all."""
        self.memory = None
        for user in self.users:
            user.let_go()

    @property
    def keys(self) -> Tensor | None:
        """Of the last time."""
        return None if self.memory is None else self.memory[0]

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Keys and values of this shape: those of the last time if they are as large."""
        if self.memory is None or self.memory[0].shape != shape:
            self.drop()  # before the new comes
            # zeros: a masked slot that was never written must not hold a NaN, which no weight of 0 removes
            keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            self.memory = keys, values
        return self.memory


class PagedCache:
    """`count` pages: `keys` and `values` [count + 1, H, T, D], and of each layer and row its pages: `table`
    [L, R + 1, W]; row R is nobody's and has page 0 alone.

    Raises ValueError if there are no pages at all.
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
        self.keys, self.values = (pool or PagePool()).take(shape, dtype, device)
        self.table = torch.zeros(schedule.num_layers, rows + 1, width, dtype=torch.int32, device=device)
        self._table: NDArray[np.int32] = np.zeros(self.table.shape, dtype=np.int32)  # the host's own
        self._held: Numbers = np.zeros((schedule.num_layers, rows), dtype=np.int64)
        self._free: NDArray[np.int32] = np.arange(pages, 0, -1, dtype=np.int32)  # a stack: the first ones come first
        self.count = self._left = pages
        self.most = 0  # held at once

    @property
    def longest(self) -> int:
        """Tokens of the longest row there can be."""
        return self.table.shape[2] * self.keys.shape[2]

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._left

    @property
    def bytes(self) -> int:
        """Of all pages."""
        return self.keys.nbytes + self.values.nbytes

    def held(self, row: int) -> int:
        """Pages of a row, over all layers."""
        return int(self._held[:, row].sum())

    def grow(self, rows: Sequence[int], prompt: Sequence[int], positions: Sequence[int], ahead: int) -> bool:
        """Give `rows` the pages of `ahead` more tokens each, and take back those of layers that they will not run
        again. False if there are too few: nothing is given then."""
        index = np.asarray(rows, dtype=np.int64)
        wanted = pages_at(self.uses, np.asarray(prompt), np.asarray(positions), ahead)
        held = self._held[:, index]
        self._give_back(index, (wanted == 0) & (held > 0))
        held = self._held[:, index]
        missing = np.maximum(wanted - held, 0)
        total = int(missing.sum())
        if total > self._left:
            return False
        if total:
            layers, places = np.nonzero(missing)
            counts = missing[layers, places]
            within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
            columns = np.repeat(held[layers, places], counts) + within
            self._left -= total
            taken = self._free[self._left : self._left + total]
            self._write(np.repeat(layers, counts), np.repeat(index[places], counts), columns, taken)
            self._held[:, index] += missing
            self.most = max(self.most, self.count - self._left)
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Take back all pages of rows that have ended."""
        index = np.asarray(rows, dtype=np.int64)
        self._give_back(index, self._held[:, index] > 0)

    def _give_back(self, index: Numbers, which: NDArray[np.bool_]) -> None:
        """All pages of the layers and rows of which [L, N]. The table keeps their numbers: nobody reads them there."""
        layers, places = np.nonzero(which)
        for layer, row in zip(layers.tolist(), index[places].tolist(), strict=True):
            count = int(self._held[layer, row])
            self._free[self._left : self._left + count] = self._table[layer, row, :count]
            self._left += count
            self._held[layer, row] = 0

    def _write(self, layers: Numbers, rows: Numbers, columns: Numbers, pages: NDArray[np.int32]) -> None:
        """Into both tables; the device's is not waited for."""
        self._table[layers, rows, columns] = pages
        flat = (layers * self._table.shape[1] + rows) * self._table.shape[2] + columns
        self.table.view(-1).index_copy_(0, upload(flat, self.table.device), upload(pages.copy(), self.table.device))


def upload(numbers: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """To the device, without waiting for it; whole numbers of a list as int64."""
    host = numbers if isinstance(numbers, Tensor) else torch.as_tensor(np.asarray(numbers))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
