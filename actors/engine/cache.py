"""KV cache that follows the schedule: a layer has slots only for the positions at which the layer runs.

Because depth never rises, layer l runs for the first n_l generated tokens of a row and never again. The buffer of layer
l has P + n_l slots per row (P: longest prompt), or none if n_l = 0. A token's slot is its position in the row. Buffers
are allocated once, and never grow.
Shapes: R rows in the cache, B rows of a pass, H key/value heads, D head size, S tokens per row in a pass, K slots that
a pass attends to, C tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.engine.schedule.schedule import Schedule

Buffers = tuple[Tensor, Tensor]  # keys and values


class SlotShape(NamedTuple):
    """The shape of a KV cache for `rows` rows, each with at most `prompt_tokens` and `max_new_tokens` tokens."""

    schedule: Schedule
    rows: int
    prompt_tokens: int
    max_new_tokens: int

    @property
    def slots(self) -> list[int]:
        """For each layer, the number of slots per row: 0 if no decode step runs the layer."""
        uses = (self.schedule.uses(layer, self.max_new_tokens) for layer in range(self.schedule.num_layers))
        return [self.prompt_tokens + used if used else 0 for used in uses]

    def bytes(self, token_bytes: int) -> int:
        """Return the exact size of the whole cache in bytes. token_bytes: cache bytes per token and layer."""
        return self.rows * sum(self.slots) * token_bytes


class PrefixKeys:
    """Holds the keys and values of a shared prefix, for each layer: [1, KV heads, tokens, head size]."""

    def __init__(self) -> None:
        self.layers: dict[int, Buffers] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Buffers:
        """Store a layer's keys and values. Return them unchanged, because a prefix attends only to itself."""
        # copy views, because a view would keep the queries in memory too
        self.layers[layer_idx] = (keys.contiguous(), values.contiguous())
        return keys, values


class SkipCache:
    """Key and value buffers [cache rows, KV heads, slots, head size] of each layer that a decode step runs.

    Call `begin_prefill` or `begin_step` before a pass. During the pass the model's attention layers call `update`.

    windows: for each layer, how many of the latest keys a token attends to, including its own key; None: all keys.
        Keys outside this sliding window stay in their slots, but are not read.
    """

    def __init__(
        self,
        shape: SlotShape,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None],
    ) -> None:
        self.slots, self.windows = shape.slots, windows
        # zeros, because an unwritten slot is masked and gets attention weight 0, but 0 * NaN would be NaN
        self.buffers: list[Buffers | None] = [
            (torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
            if (size := (shape.rows, kv_heads, slots, head_dim))[2]
            else None
            for slots in self.slots
        ]
        self._device = device
        self._width = 0  # number of slots that the longest row uses; a layer with fewer slots uses all its slots
        self._rows = torch.zeros(0, dtype=torch.int64)  # [B], the cache rows of the current pass
        self._sources = self._rows  # [B], for each row of `_rows`, the index of its prompt in the prefill
        self._prefix: PrefixKeys | None = None
        self._positions: Tensor | None = None  # [B, 1], position of each row's token in a decode step; None in prefill
        # number of slots that this decode step's shortest row attends to in a layer without a sliding window
        self._shortest = 0
        # sliding window -> cached result of `_step_mask` for this decode step
        self._masks: dict[int | None, tuple[int, Tensor | None]] = {}

    def begin_prefill(self, rows: Sequence[int], sources: Sequence[int], prefix: PrefixKeys | None = None) -> None:
        """Prepare for a prefill pass over the prompts of new rows.

        Args:
            rows: Indices of the new rows in the cache.
            sources: For each new row, the index of its prompt in the pass.
            prefix: Keys and values of a prefix that all prompts share. The pass runs only the tokens after the prefix.
        """
        self._rows, self._sources = (torch.tensor(list(one), device=self._device) for one in (rows, sources))
        self._prefix, self._positions = prefix, None

    def begin_step(self, positions: Sequence[int]) -> None:
        """Prepare for a decode step that runs one token, at `positions[i]`, in each cache row i < len(positions)."""
        self._positions = torch.tensor(positions, device=self._device)[:, None]
        self._rows = torch.arange(len(positions), device=self._device)
        self._shortest, self._width = min(positions) + 1, max(positions) + 1
        self._masks = {}

    def _step_mask(self, window: int | None) -> tuple[int, Tensor | None]:
        """Return the first slot that a row attends to, and a mask [rows, 1, 1, slots] from this slot on.

        The mask is None if all rows attend to all slots from the first one on.
        """
        if window not in self._masks:
            assert self._positions is not None
            first = 0 if window is None else max(0, self._shortest - window)
            mask = None  # no mask is needed if all rows have equal length
            if self._shortest < self._width:
                keys, own = torch.arange(first, self._width, device=self._device), self._positions[:, None, :, None]
                mask = keys <= own
                if window is not None:
                    mask &= keys > own - window
            self._masks[window] = first, mask
        return self._masks[window]

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Return the decode step's mask [rows, 1, 1, slots] for the `rows` youngest rows; None: attend to all slots."""
        first, mask = self._step_mask(self.windows[layer])
        return None if mask is None else mask[-rows:, :, :, : self.slots[layer] - first]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Buffers:
        """Store new keys and values. Return all that the pass attends to, [rows, KV heads, tokens, head size] each."""
        if self._positions is None:
            return self._store_prompts(keys, values, layer_idx)
        return self._store_step(keys, values, layer_idx, self._positions)

    def _store_prompts(self, keys: Tensor, values: Tensor, layer: int) -> Buffers:
        buffers, prompts = self.buffers[layer], len(keys)
        if self._prefix is not None:
            before = [shared.expand(prompts, -1, -1, -1) for shared in self._prefix.layers[layer]]
            keys, values = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
        if buffers is not None:
            tokens = keys.shape[2]
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[self._rows, :, :tokens] = new[self._sources]
                buffer[self._rows, :, tokens:] = 0  # clear slots in which an earlier row may have left NaN
            self._width = max(self._width, tokens)
        return keys, values

    def _store_step(self, keys: Tensor, values: Tensor, layer: int, positions: Tensor) -> Buffers:
        buffers, rows, batch = self.buffers[layer], len(keys), len(positions)
        assert buffers is not None, f"no decode step runs layer {layer}"
        first, _ = self._step_mask(self.windows[layer])
        width = min(self._width, self.slots[layer])
        held = []
        for buffer, new in zip(buffers, (keys, values), strict=True):
            mine = buffer[batch - rows : batch]
            mine[self._rows[:rows], :, positions[batch - rows :, 0]] = new[:, :, 0]
            held.append(mine[:, :, first:width])
        return held[0], held[1]

    def arrange(self, order: Sequence[int]) -> None:
        """Reorder the cache's rows: row `order[i]` becomes row i."""
        moved = [(source, target) for target, source in enumerate(order) if source != target]
        if moved:
            sources, targets = torch.tensor(moved, device=self._device).T
            for buffer in (buffer for pair in self.buffers if pair is not None for buffer in pair):
                buffer[targets, :, : self._width] = buffer[sources, :, : self._width]


def compaction(ages: Sequence[object], alive: Sequence[bool]) -> list[int]:
    """Return the indices of the `alive` rows, ordered so that few rows get a new index.

    ages: one value per row. Adjacent rows with equal values (the same position) form a group. The groups keep their
    order. Within a group, each row that can keep its index keeps it, and the others fill the gaps.
    """
    order: list[int] = []
    for _, group in groupby(range(len(ages)), ages.__getitem__):
        live = [row for row in group if alive[row]]
        staying = set(live)
        targets = range(len(order), len(order) + len(live))
        moving = iter([row for row in live if row not in targets])
        order += [target if target in staying else next(moving) for target in targets]
    return order
