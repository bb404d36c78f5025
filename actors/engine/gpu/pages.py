"""Paged key/value cache: rows allocate pages as they grow, and free them layer by layer as their depth falls.

A row has pages only in layers that it will still run: at position t those with t < n_l, for the tokens that it has
so far. Rows that begin with the same prefix read the same pages of it, see `SharedPages`. A page that is freed can be
allocated again immediately; pages are never copied. Page 0 belongs to no row: lanes without a row write there. Pages
hold keys and values in the model's dtype, or their codes of 8 bits with a scale for each token and head, see
`operations.LayerPages`.
Shapes: L layers, R rows, W pages of the longest row, S of a prefix, H key/value heads, T tokens of a page, D head size.
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


def shared_tokens(prefix_tokens: int) -> int:
    """First tokens of such a prefix whose pages rows share; the others, which fill no page, each row stores itself."""
    return prefix_tokens // PAGE_TOKENS * PAGE_TOKENS


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


class SharedPages:
    """The whole pages of a prefix: the first pages of all rows in flight that begin with it.

    A layer's pages are allocated with its first reader and freed with its last one.

    Attributes:
        pages: int32 [L, S], of layers that have readers.
        readers: int64 [L], rows that read them.
        unwritten: Layers whose pages have been allocated and not been written.
    """

    def __init__(self, prefix: tuple[int, ...], layers: int) -> None:
        self.prefix = prefix
        self.pages = np.zeros((layers, shared_tokens(len(prefix)) // PAGE_TOKENS), dtype=np.int32)
        self.readers = np.zeros(layers, dtype=np.int64)
        self.unwritten: list[int] = []

    @property
    def width(self) -> int:
        """S."""
        return self.pages.shape[1]


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
        self._counts: Numbers = np.zeros((schedule.num_layers, rows), dtype=np.int64)  # shared pages included
        self._shared: dict[tuple[int, ...], SharedPages] = {}  # by prefix
        self._shared_of: dict[int, SharedPages] = {}  # by row
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

    def held_by(self, row: int) -> tuple[int, int]:
        """Pages of a row, over all layers, without those that it shares; and the tokens in these."""
        shared, counts = self._shared_of.get(row), self._counts[:, row]
        width = 0 if shared is None else shared.width
        return int(counts.sum()) - width * int((counts > 0).sum()), width * PAGE_TOKENS

    def missing(self, prefix: tuple[int, ...]) -> int:
        """Pages to allocate, over all layers, before rows can share those of a prefix."""
        shared, width = self._shared.get(prefix), shared_tokens(len(prefix)) // PAGE_TOKENS
        return width * int(((self.uses > 0) & (True if shared is None else shared.readers == 0)).sum())

    def admit(self, rows: Sequence[int], prompt: Sequence[int], ahead: int, prefix: tuple[int, ...] = ()) -> bool:
        """Allocate pages of new rows, for their prompts and `ahead` more tokens.

        They share the whole pages of the prefix, with which all their prompts begin. Layers whose shared pages are new
        are `take_unwritten`'s. False if there are too few pages; then none is allocated.
        """
        width, layers = shared_tokens(len(prefix)) // PAGE_TOKENS, np.flatnonzero(self.uses > 0)
        if width and len(layers):
            index = np.asarray(rows, dtype=np.int64)
            needed = pages_at(self.uses, np.asarray(prompt), np.zeros_like(index), ahead)
            own = int(needed.sum()) - width * len(layers) * len(index)
            if own + self.missing(prefix) > self._left:
                return False
            shared = self._shared.setdefault(prefix, SharedPages(prefix, len(self.uses)))
            new = layers[shared.readers[layers] == 0]
            shared.pages[new] = self._take(len(new) * width).reshape(-1, width)
            shared.unwritten += new.tolist()
            shared.readers[layers] += len(index)
            self._shared_of.update(dict.fromkeys(index.tolist(), shared))
            of_layers, of_rows, columns = np.meshgrid(layers, index, np.arange(width), indexing="ij")
            pages = np.repeat(shared.pages[layers], len(index), axis=0)
            self._write(of_layers.ravel(), of_rows.ravel(), columns.ravel(), pages.ravel())
            self._counts[np.ix_(layers, index)] = width
        return self.grow(rows, prompt, [0] * len(rows), ahead)

    def take_unwritten(self, prefix: tuple[int, ...]) -> list[int]:
        """Layers in which the shared pages of a prefix must be written now."""
        shared = self._shared.get(prefix)
        if shared is None:
            return []
        layers, shared.unwritten = shared.unwritten, []
        return layers

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
            self._write(np.repeat(layers, new), np.repeat(index[members], new), columns, self._take(total))
            self._counts[:, index] += missing
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Free all pages of rows that no other row reads."""
        index = np.asarray(rows, dtype=np.int64)
        self._free_pages(index, self._counts[:, index] > 0)
        for row in index.tolist():
            shared = self._shared_of.pop(row, None)
            if shared is not None and not shared.readers.any():
                self._shared.pop(shared.prefix, None)

    def _free_pages(self, index: Numbers, which: NDArray[np.bool_]) -> None:
        """Free the pages of rows index [N] in the layers of which [L, N]. The table keeps their numbers, unread."""
        layers, members = np.nonzero(which)
        for layer, row in zip(layers.tolist(), index[members].tolist(), strict=True):
            shared, count = self._shared_of.get(row), int(self._counts[layer, row])
            self._put(self._table[layer, row, 0 if shared is None else shared.width : count])
            if shared is not None:
                shared.readers[layer] -= 1
                if not shared.readers[layer]:
                    self._put(shared.pages[layer])
            self._counts[layer, row] = 0

    def _take(self, count: int) -> NDArray[np.int32]:
        """Pages from the stack of free ones, of which there are so many."""
        self._left -= count
        self.most = max(self.most, self.count - self._left)
        return self._free[self._left : self._left + count].copy()

    def _put(self, pages: NDArray[np.int32]) -> None:
        """Pages back on the stack."""
        self._free[self._left : self._left + len(pages)] = pages
        self._left += len(pages)

    def _write(self, layers: Numbers, rows: Numbers, columns: Numbers, pages: NDArray[np.int32]) -> None:
        """Write page numbers into both tables, without waiting for the GPU's."""
        self._table[layers, rows, columns] = pages
        flat = (layers * self._table.shape[1] + rows) * self._table.shape[2] + columns
        self.table.view(-1).index_copy_(0, upload(flat, self.table.device), upload(pages, self.table.device))


def upload(numbers: Tensor | NDArray[Any] | Sequence[int], device: torch.device) -> Tensor:
    """Copy to the device without waiting for it; integers of a list become int64."""
    host = numbers if isinstance(numbers, Tensor) else torch.as_tensor(np.asarray(numbers))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
