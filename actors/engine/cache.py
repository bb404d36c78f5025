"""Key/value cache in the shape of the schedule: a layer holds only the positions at which it runs.

Because depth never rises, layer l runs for the first n_l generated tokens of a row and never again. Its
buffer has P + n_l slots (P: the longest prompt), none at all if n_l = 0. A token's slot is its position in the row.
Buffers are allocated once; nothing is ever concatenated.
Shapes: R rows of capacity, B rows of a pass, H key/value heads, D head size, S tokens of a pass, K slots attended to, C
tokens of a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from actors.engine.schedule.schedule import Schedule

Buffers = tuple[Tensor, Tensor]  # keys and values


def cache_slots(schedule: Schedule, prompt_slots: int, max_new_tokens: int) -> list[int]:
    """Slots of each layer. A layer that no decode step runs needs none once the prompt has passed it."""
    uses = (schedule.uses(layer, max_new_tokens) for layer in range(schedule.num_layers))
    return [prompt_slots + used if used else 0 for used in uses]


def cache_bytes_per_row(schedule: Schedule, prompt_slots: int, max_new_tokens: int, token_bytes: int) -> int:
    """Exact bytes of one row's keys and values; token_bytes: of a token in one layer."""
    return sum(cache_slots(schedule, prompt_slots, max_new_tokens)) * token_bytes


class SlotShape(NamedTuple):
    """The shape of slots: `rows` of them, for prompts and new tokens of at most these numbers under `schedule`."""

    schedule: Schedule
    rows: int
    prompt_tokens: int
    max_new_tokens: int

    def bytes(self, token_bytes: int) -> int:
        """Return the bytes of all slots; token_bytes: of a token in one layer."""
        return self.rows * cache_bytes_per_row(self.schedule, self.prompt_tokens, self.max_new_tokens, token_bytes)

    def holds(self, other: SlotShape) -> bool:
        """Return whether slots of this shape hold rows of another."""
        return (
            self.rows >= other.rows
            and self.prompt_tokens >= other.prompt_tokens
            and self.max_new_tokens >= other.max_new_tokens
            and self.schedule.covers(other.schedule)
        )


class CacheKernels(Protocol):
    """The addresses of one cache's buffers, for kernels that read and write them."""

    def attach(self, buffers: Sequence[Buffers | None]) -> None:
        """Called once, with each layer's buffers [R, H, P + n_l, D]."""
        ...

    def detach(self, layer: int) -> None:
        """Called when a layer's buffers are dropped."""
        ...


class PrefixKeys:
    """Keys and values [1, H, C, D], by layer, of a prefix of C tokens that many prompts share.

    The pass over the prefix fills it.
    """

    def __init__(self, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.layers: dict[int, Buffers] = {}
        self.tokens = tokens
        self._shape, self._dtype = (1, heads, tokens, head_dim), dtype

    def mask(self, layer: int, rows: int) -> Tensor | None:
        raise AssertionError("a prefix takes no decode step")

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Buffers:
        """Keep keys and values [1, H, C, D]; they are also all that the pass attends to."""
        self.layers[layer_idx] = (keys.contiguous(), values.contiguous())  # not views that hold the queries too
        return keys, values

    def joined_prompts(self, layer: int) -> tuple[Buffers, Tensor, Tensor, None]:
        """Return `SkipCache.joined_prompts` of the prefix as the only prompt."""
        keys, values = torch.empty(2, *self._shape, dtype=self._dtype)
        self.layers[layer] = keys, values
        only = torch.zeros(1, dtype=torch.int64)
        return (keys, values), only, only, None


class SkipCache:
    """Buffers of [R, H, P + n_l, D] of keys and of values for every layer that decode runs.

    Rows are numbered oldest first. `begin_prefill` or `begin_step` announces a pass; then the model's attention layers
    call `update`.

    Args:
        windows: of each layer, how many keys a token attends to, its own included; None is all. Older keys stay in
            their slots, but are not read.
        kernels: addresses for kernels that write and read the buffers, which then share one allocation, and find each
            row's place in them, so that a new order of rows copies nothing. None: torch's own operations write and
            read them; row and place are the same.
        memory: an earlier cache's allocation that is large enough, with `kernels`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rows: int,
        prompt_slots: int,
        max_new_tokens: int,
        *,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
        kernels: CacheKernels | None = None,
        memory: Tensor | None = None,
    ) -> None:
        self.capacity = rows
        self._places = torch.arange(rows) if kernels is not None else None  # int64 [R], of each row
        self.prompt_slots = prompt_slots
        self.max_new_tokens = max_new_tokens
        self.slots = cache_slots(schedule, prompt_slots, max_new_tokens)
        self.uses = [schedule.uses(layer, max_new_tokens) for layer in range(schedule.num_layers)]
        self.windows = [None] * schedule.num_layers if windows is None else list(windows)
        self.kernels = kernels
        self._width = 0  # slots attended to, in every layer that has so many
        self.memory: Tensor | None = None  # the allocation that all buffers share
        if kernels is not None:  # empty, not zeros, which clears every page: kernels read no slot that was not written
            numbers = 2 * sum(self.slots) * rows * kv_heads * head_dim
            self.memory = torch.empty(numbers, dtype=dtype, device=device) if memory is None else memory
            assert len(self.memory) >= numbers
        allocated = 0

        def buffer(slots: int) -> Tensor:
            nonlocal allocated
            shape = (rows, kv_heads, slots, head_dim)
            if self.memory is None:
                # zeros: a slot that is masked but was never written must not hold a NaN, which no weight of 0 removes
                return torch.zeros(shape, dtype=dtype, device=device)
            first, allocated = allocated, allocated + math.prod(shape)
            return self.memory[first:allocated].view(shape)

        self.buffers: list[Buffers | None] = [(buffer(slots), buffer(slots)) if slots else None for slots in self.slots]
        if kernels is not None:
            kernels.attach(self.buffers)
        self._used = [0] * schedule.num_layers  # of each layer, rows that have been written
        self._first = 0  # row at which the announced prefill begins
        self._sources: list[int] = []  # prompt of each of its rows
        self._prefix: PrefixKeys | None = None
        self._starts: Tensor | None = None
        self._index: tuple[Tensor, Tensor] | None = None  # rows [B], slots [B, 1] of the announced step; None: prefill
        self._shortest = 0  # slots up to the first of the announced step's
        # of the announced step, by window: the first slot that any row attends to, and the mask [B, 1, 1, K] from there
        self._masks: dict[int | None, tuple[int, Tensor | None]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the buffers that are left."""
        return sum(keys.nbytes + values.nbytes for keys, values in filter(None, self.buffers))

    def begin_prefill(
        self,
        first_row: int,
        sources: Sequence[int],
        prefix: PrefixKeys | None = None,
        *,
        starts: Tensor | None = None,
    ) -> None:
        """Announce a pass over the prompts of new rows.

        Args:
            first_row: the first of the new rows.
            sources: for each new row, which of the pass's prompts it has.
            prefix: what all prompts begin with; the pass is over the tokens behind it.
            starts: int64 [P + 1], for P prompts one behind another: the first token of each, and the number of tokens.
                None: prompts lie side by side.
        """
        self._first, self._sources, self._prefix, self._index = first_row, list(sources), prefix, None
        self._starts = starts
        if starts is not None:
            lengths = starts.diff()
            longest = int(lengths.max()) + (0 if prefix is None else prefix.tokens)
            assert int(lengths.min()) > 0 and longest <= self.prompt_slots
            assert int(starts[0]) == 0 and min(sources) >= 0 and max(sources) < len(lengths)
            self._width = max(self._width, longest)

    def begin_step(self, positions: Sequence[int], device: torch.device, rows: Sequence[int] | None = None) -> None:
        """Announce a pass over one token at each of these positions, of all B rows in their order.

        rows: the row of each token, for kernels that run all layers: see `step_slots`. Tokens of one row follow each
        other.
        """
        index = torch.arange(len(positions), device=device) if rows is None else torch.tensor(rows, device=device)
        self._index = (index, torch.tensor(positions, device=device)[:, None])
        self._shortest, self._width = min(positions) + 1, max(positions) + 1
        self._masks = {}

    def step_slots(self) -> tuple[Tensor, Tensor, int, CacheKernels]:
        """Return the places and slots [B] of the announced step, the most slots that all attend to, and the kernels.

        Requires `kernels`.
        """
        assert self._index is not None and self._places is not None and self.kernels is not None
        rows, slots = self._index
        return self._places[rows], slots[:, 0], self._width, self.kernels

    def _step_mask(self, window: int | None) -> tuple[int, Tensor | None]:
        """The first slot that any row attends to within a window, and the mask [B, 1, 1, K] from there on."""
        if window not in self._masks:
            assert self._index is not None
            slots = self._index[1]
            first = 0 if window is None else max(0, self._shortest - window)
            mask = None  # rows of one length attend to every slot from the first up to the width
            if self._shortest < self._width:
                keys, own = torch.arange(first, self._width, device=slots.device), slots[:, None, :, None]
                mask = keys <= own
                if window is not None:
                    mask &= keys > own - window
            self._masks[window] = first, mask
        return self._masks[window]

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Mask [rows, 1, 1, K] of the announced step for the `rows` youngest rows; None: they attend to all of K."""
        first, mask = self._step_mask(self.windows[layer])
        return None if mask is None else mask[-rows:, :, :, : self.slots[layer] - first]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Buffers:
        """Store keys and values [B, H, S, D] of the announced pass; return those to attend to [B, H, K, D]."""
        if self._index is None:
            return self._store_prompts(keys, values, layer_idx)
        return self._store_step(keys, values, layer_idx, *self._index)

    def _store_prompts(self, keys: Tensor, values: Tensor, layer: int) -> Buffers:
        assert self._places is None, "kernels store prompts one behind another, by `joined_prompts`"
        buffers, rows = self.buffers[layer], len(keys)
        if self._prefix is not None:
            before = [shared.expand(rows, -1, -1, -1) for shared in self._prefix.layers[layer]]
            keys, values = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
        if buffers is not None:
            alone = self._sources == list(range(rows))
            end = self._first + len(self._sources)
            for buffer, new in zip(buffers, (keys, values), strict=True):
                buffer[self._first : end, :, : new.shape[2]] = new if alone else new[self._sources]
                # the library reads masked slots, and no weight of 0 removes a NaN
                buffer[self._first : min(end, self._used[layer]), :, new.shape[2] :] = 0
            self._used[layer] = max(self._used[layer], end)
            self._width = max(self._width, keys.shape[2])
        return keys, values

    def _store_step(self, keys: Tensor, values: Tensor, layer: int, row: Tensor, slots: Tensor) -> Buffers:
        buffers, rows = self.buffers[layer], len(keys)
        assert buffers is not None, f"layer {layer} is run past its last use"
        held = buffers[0][len(row) - rows : len(row)], buffers[1][len(row) - rows : len(row)]
        slots = slots[-rows:]
        assert keys.shape[2] == 1 and self._places is None
        for buffer, new in zip(held, (keys, values), strict=True):
            buffer[row[:rows], :, slots[:, 0]] = new[:, :, 0]
        first, _ = self._step_mask(self.windows[layer])
        width = min(self._width, self.slots[layer])
        return held[0][:, :, first:width], held[1][:, :, first:width]

    def joined_prompts(self, layer: int) -> tuple[Buffers | None, Tensor, Tensor, PrefixKeys | None]:
        """Where to store keys and values of the announced prompts, which lie one behind another.

        Returns:
            The buffers [R, H, K, D] behind the slots of the prefix, or None, if the layer has none; of each new row its
            place and its prompt, int64 [B] each; and the prefix, which has been copied to the rows' first slots.
        """
        assert self._places is not None
        prefix, buffers, sources = self._prefix, self.buffers[layer], torch.tensor(self._sources)
        places = self._places[self._first : self._first + len(self._sources)]
        if buffers is None or prefix is None:
            return buffers, places, sources, prefix
        for buffer, shared in zip(buffers, prefix.layers[layer], strict=True):
            buffer[places, :, : prefix.tokens] = shared
        keys, values = (buffer[:, :, prefix.tokens :] for buffer in buffers)
        return (keys, values), places, sources, prefix

    def arrange(self, order: Sequence[int]) -> None:
        """Give the rows that stay a new order, as old row numbers; they keep what any row was attended to."""
        moved = [(source, target) for target, source in enumerate(order) if source != target]
        if moved and self._places is not None:
            stays = torch.zeros(self.capacity, dtype=torch.bool)
            stays[list(order)] = True
            self._places = torch.cat((self._places[list(order)], self._places[~stays]))
        elif moved:
            sources, targets = torch.tensor(moved).T
            for buffer in (buffer for pair in self.buffers if pair is not None for buffer in pair):
                buffer[targets, :, : self._width] = buffer[sources, :, : self._width]

    def copy_rows(self, other: SkipCache, rows: int) -> None:
        """Take over the first `rows` rows of another cache of the same model, whose tokens all have slots here.

        No row has been written here yet.
        """
        self._width = other._width
        for layer, (new, old) in enumerate(zip(self.buffers, other.buffers, strict=True)):
            if new is None or old is None:
                continue
            width = min(self._width, self.slots[layer], other.slots[layer])
            places = slice(rows) if other._places is None else other._places[:rows]
            for target, source in zip(new, old, strict=True):
                target[:rows, :, :width] = source[places, :, :width]
            self._used[layer] = rows

    def free(self, position: int) -> None:
        """Drop the layers that no row at `position` or later will run, and their memory if it is their own."""
        for layer, uses in enumerate(self.uses):
            if uses <= position and self.buffers[layer] is not None:
                self.buffers[layer] = None
                if self.kernels is not None:
                    self.kernels.detach(layer)


def compaction(ages: Sequence[object], alive: Sequence[bool]) -> list[int]:
    """New order of the live rows, as old row numbers: still oldest first, with as few rows moved as possible.

    ages: equal for rows of one schedule at one position. Such neighbours may change their order, so that the last row
    of a group fills a hole, and only the groups behind it shift.
    """
    order: list[int] = []
    row = 0
    while row < len(ages):
        end = row
        while end < len(ages) and ages[end] == ages[row]:
            end += 1
        group = [member for member in range(row, end) if alive[member]]
        targets = range(len(order), len(order) + len(group))
        staying = set(group) & set(targets)
        moving = iter([member for member in group if member not in staying])
        order += [target if target in staying else next(moving) for target in targets]
        row = end
    return order
