"""Key/value cache in the shape of the schedule: a layer holds only the positions at which it runs.

Because depth never rises, layer l runs for the first n_l generated tokens of a row and never again. Its
buffer has P + n_l slots (P: the longest prompt), none at all if n_l = 0, and the slot of a token is its
place in the row. Buffers are allocated once; nothing is ever concatenated.
Shapes: R rows of capacity, B live rows, H key/value heads, D head size, K slots attended to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engine.cpu import kernels
from actors.engine.cpu.native_layer import Place, PromptPlace
from actors.engine.cpu.native_stack import buffer_table
from actors.engine.schedule import Schedule


def cache_slots(schedule: Schedule, prompt_slots: int, max_new_tokens: int) -> list[int]:
    """Slots of each layer. A layer that no decode step runs needs none once the prompt has passed it."""
    uses = (schedule.uses(layer, max_new_tokens) for layer in range(schedule.num_layers))
    return [prompt_slots + used if used else 0 for used in uses]


def cache_bytes_per_row(
    schedule: Schedule, prompt_slots: int, max_new_tokens: int, kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Bytes of keys and values that one row holds, exactly; `itemsize`: bytes a number."""
    return sum(cache_slots(schedule, prompt_slots, max_new_tokens)) * kv_heads * head_dim * 2 * itemsize


class PrefixKeys:
    """Keys and values [1, H, C, D] of a beginning of C tokens that many prompts share, layer by layer.

    Filled by the pass over that beginning, which is its own whole context.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._packed: dict[int, kernels.PackedPrefix] = {}

    @property
    def tokens(self) -> int:
        """C."""
        return next(iter(self.layers.values()))[0].shape[2]

    def packed(self, layer: int) -> kernels.PackedPrefix:
        """The layer's, as the CPU's kernels read them."""
        if layer not in self._packed:
            self._packed[layer] = kernels.PackedPrefix.of(*self.layers[layer])
        return self._packed[layer]

    def mask(self, layer: int, rows: int) -> Tensor | None:
        raise AssertionError("a prefix takes no decode step")

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep keys and values [1, H, C, D]; they are all there is to attend to."""
        self.layers[layer_idx] = (keys.contiguous(), values.contiguous())  # not views that hold the queries too
        return keys, values


class SkipCache:
    """Buffers of [R, H, P + n_l, D] of keys and of values for every layer that decode runs.

    windows: of each layer, how many keys a token sees, its own counted; None is all. Older keys stay in their
    slots, but are not read. native: read and written by the CPU's kernels, in one piece of memory; `memory`: an
    earlier cache's that is large enough. Rows lie oldest first. A pass is
    announced by `begin_prefill` or `begin_step`; then the model's attention layers call `update`.
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
        native: bool = False,
        memory: Tensor | None = None,
    ) -> None:
        self.capacity = rows
        self.prompt_slots = prompt_slots
        self.max_new_tokens = max_new_tokens
        self.slots = cache_slots(schedule, prompt_slots, max_new_tokens)
        self.uses = [schedule.uses(layer, max_new_tokens) for layer in range(schedule.num_layers)]
        self.windows = [None] * schedule.num_layers if windows is None else list(windows)
        self._native = native
        self._width = 0  # slots attended to, in every layer that has so many
        self.memory: Tensor | None = None  # what all buffers lie in, if they do
        if native:  # new memory would be cleared page by page; the kernel reads no slot that was not written
            numbers = 2 * sum(self.slots) * rows * kv_heads * head_dim
            self.memory = torch.empty(numbers, dtype=dtype, device=device) if memory is None else memory
            assert len(self.memory) >= numbers
        taken = 0

        def buffer(slots: int) -> Tensor:
            nonlocal taken
            shape = (rows, kv_heads, slots, head_dim)
            if self.memory is None:
                # zeros: a slot that is masked but was never written must not hold a NaN, which no weight of 0 removes
                return torch.zeros(shape, dtype=dtype, device=device)
            first, taken = taken, taken + math.prod(shape)
            return self.memory[first:taken].view(shape)

        self.buffers: list[tuple[Tensor, Tensor] | None] = [
            (buffer(slots), buffer(slots)) if slots else None for slots in self.slots
        ]
        self.table = buffer_table(self.buffers) if native else None
        self._used = [0] * schedule.num_layers  # places that have held a row
        self._first = 0  # row at which the announced prefill begins
        self._sources: list[int] = []  # prompt of each of its rows
        self._prefix: PrefixKeys | None = None
        self._starts: Tensor | None = None
        self._sources_of_rows = torch.empty(0, dtype=torch.int64)
        self._index: tuple[Tensor, Tensor] | None = None  # row and slot [B] of the announced step; None: prefill
        # of the announced step, by window: the first slot that any row sees, and the mask [B, 1, 1, K] from there on
        self._seen: dict[int | None, tuple[int, Tensor | None]] = {}

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
        """The next pass is the prompts of new rows, from `first_row` on.

        sources: which of the pass's prompts each new row has. prefix: what all of them begin with; the pass is
        what follows it. starts: int64 [P + 1], of prompts that lie one behind another, and not side by side; the first
        token of each, and how many there are.
        """
        self._first, self._sources, self._prefix, self._index = first_row, list(sources), prefix, None
        self._starts, self._sources_of_rows = starts, torch.tensor(self._sources)
        if starts is not None:
            lengths = starts.diff()
            longest = int(lengths.max()) + (0 if prefix is None else prefix.tokens)
            assert int(lengths.min()) > 0 and longest <= self.prompt_slots
            assert int(starts[0]) == 0 and min(sources) >= 0 and max(sources) < len(lengths)
            self._width = max(self._width, longest)

    def begin_step(self, places: Sequence[int], device: torch.device) -> None:
        """The next pass is one token for each of B rows; `places`: their places in their rows."""
        slots = torch.tensor(places, device=device)
        self._index = (torch.arange(len(places), device=device), slots)
        shortest, longest = min(places) + 1, max(places) + 1
        self._width = longest
        for window in set(self.windows):
            first = 0 if window is None else max(0, shortest - window)
            mask = None  # where no row is shorter, all see every slot from the first up to the width
            if shortest < self._width:
                keys, place = torch.arange(first, self._width, device=device), slots[:, None, None, None]
                mask = keys <= place
                if window is not None:
                    mask &= keys > place - window
            self._seen[window] = first, mask

    def step_slots(self) -> tuple[Tensor, Tensor | None, int]:
        """Of the announced step, without windows: the tokens' slots [B], the mask [B, 1, 1, K] or None, and K."""
        assert self._index is not None
        first, mask = self._seen[None]
        assert first == 0
        return self._index[1], mask, self._width

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Mask [rows, 1, 1, K] of the announced step for the `rows` youngest rows; None: all of K is seen."""
        first, mask = self._seen[self.windows[layer]]
        return None if mask is None else mask[-rows:, :, :, : self.slots[layer] - first]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, H, S, D] of the announced pass; return those to attend to [B, H, K, D]."""
        buffers = self.buffers[layer_idx]
        rows = len(keys)
        if self._index is None:
            assert self._starts is None, "prompts one behind another are for layers that know of them"
            if self._prefix is not None:
                before = [one.expand(rows, -1, -1, -1) for one in self._prefix.layers[layer_idx]]
                keys, values = torch.cat((before[0], keys), dim=2), torch.cat((before[1], values), dim=2)
            if buffers is not None:
                alone = self._sources == list(range(rows))
                for buffer, new in zip(buffers, (keys, values), strict=True):
                    end = self._first + len(self._sources)
                    buffer[self._first : end, :, : new.shape[2]] = new if alone else new[self._sources]
                    if not self._native:  # the library reads masked slots, and no weight of 0 removes a NaN
                        buffer[self._first : min(end, self._used[layer_idx]), :, new.shape[2] :] = 0
                self._used[layer_idx] = max(self._used[layer_idx], end)
                self._width = max(self._width, keys.shape[2])
            return keys, values
        place = self.place(layer_idx, rows)
        assert isinstance(place, Place)
        held = place.keys, place.values
        if self._native:
            kernels.append(keys[:, :, 0], values[:, :, 0], *held, place.slots)
        else:
            row = self._index[0][:rows]
            for buffer, new in zip(held, (keys, values), strict=True):
                buffer[row, :, place.slots] = new[:, :, 0]
        keys, values = (buffer[:, :, place.first : place.width] for buffer in held)
        return keys, values

    def place(self, layer: int, rows: int) -> Place | PromptPlace | None:
        """Where keys and values of the announced pass go: of a step's `rows` youngest rows, or of prompts one behind
        another; None: of prompts side by side."""
        buffers = self.buffers[layer]
        if self._index is None:
            if self._starts is None:
                return None
            return self._prompt_place(layer, buffers, self._starts)
        assert buffers is not None, f"layer {layer} is run past its last use"
        row, slots = self._index
        keys, values = (buffer[len(row) - rows : len(row)] for buffer in buffers)
        first, _ = self._seen[self.windows[layer]]
        return Place(keys, values, slots[-rows:], first, min(self._width, self.slots[layer]))

    def _prompt_place(self, layer: int, buffers: tuple[Tensor, Tensor] | None, starts: Tensor) -> PromptPlace:
        """Of prompts one behind another; what lies before all of them is copied to each row's beginning."""
        prefix, end = self._prefix, self._first + len(self._sources)
        held = None if buffers is None else (buffers[0][self._first : end], buffers[1][self._first : end])
        if prefix is None:
            return PromptPlace(starts, self._sources_of_rows, held)
        if held is not None:
            for buffer, shared in zip(held, prefix.layers[layer], strict=True):
                buffer[:, :, : prefix.tokens] = shared
            held = held[0][:, :, prefix.tokens :], held[1][:, :, prefix.tokens :]
        return PromptPlace(starts, self._sources_of_rows, held, prefix.packed(layer))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows `sources` to `targets`, all at once, as far as any row was attended to."""
        for buffer in (one for pair in self.buffers if pair is not None for one in pair):
            buffer[torch.tensor(targets), :, : self._width] = buffer[torch.tensor(sources), :, : self._width]

    def free(self, position: int) -> None:
        """Drop the layers that no row at `position` or later will run, and their memory if it is their own."""
        for layer, uses in enumerate(self.uses):
            if uses <= position:
                self.buffers[layer] = None
                if self.table is not None:
                    self.table[layer].keys = None


def compaction(positions: Sequence[int], alive: Sequence[bool]) -> list[int]:
    """New order of the live rows, as old row numbers: still oldest first, with as few rows moved as can be.

    positions: generated-token position of each row, never rising. Rows at one position may trade places, so
    a hole is filled by the last row of its group and only the groups behind it shift.
    """
    order: list[int] = []
    row = 0
    while row < len(positions):
        end = row
        while end < len(positions) and positions[end] == positions[row]:
            end += 1
        group = [one for one in range(row, end) if alive[one]]
        places = range(len(order), len(order) + len(group))
        staying = set(group) & set(places)
        moving = iter([one for one in group if one not in staying])
        order += [place if place in staying else next(moving) for place in places]
        row = end
    return order
