"""The executor over the CPU's kernels: one native call a decode step, prompts one behind another, memory that is kept.

It differs from the library's executor, which defines the functions, in memory and passes.
Shapes: R rows of a prefill, P prompts, B rows of a decode step, E hidden size, V vocabulary size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.cache import PrefixKeys, SkipCache, SlotShape
from actors.engine.cpu.stack import NativeBuffers
from actors.engine.decoder import Decoder
from actors.engine.errors import is_out_of_memory
from actors.engine.library.executor import LibraryExecutor


class CpuExecutor(LibraryExecutor):
    """Runs a decoder's stack over slots in one allocation, which is kept for the next `open`.

    Args:
        decoder: Decoder with a `stack`.

    Attributes:
        reserved_bytes: Least memory that `open` allocates, if the machine has it: untouched pages cost nothing.
    """

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.stack is not None
        super().__init__(decoder)
        self.stack = decoder.stack
        self._embeds = decoder.family.embeddings(decoder.model) is not None  # whether the stack takes tokens
        self._shape: SlotShape | None = None
        self._memory: Tensor | None = None

    def open(self, shape: SlotShape, held: int = 0, *, allocates: bool = True) -> bool:
        need = shape.bytes(self.decoder.token_bytes)
        if not held:
            self.cache = None  # freed before the new one is allocated
            if self._memory is not None and self._memory.nbytes < need:
                self._memory = None
            if self._memory is None and need <= self.reserved_bytes:
                self._memory = self._reserve()
        fits = self._memory is not None and self._memory.nbytes >= need
        if held and not fits and not allocates:
            return False
        earlier = self.cache
        if earlier is not None and fits:  # the new slots lie in the memory of the old ones
            assert self._shape is not None
            kept = self._slots(self._shape._replace(rows=held), None)
            kept.copy_rows(earlier, held)
            earlier = kept
        self.cache = self._slots(shape, self._memory if fits else None)
        if earlier is not None:
            self.cache.copy_rows(earlier, held)
        self._shape, self._memory = shape, self.cache.memory
        return True

    def _slots(self, shape: SlotShape, memory: Tensor | None) -> SkipCache:
        return self.decoder.slots(shape, NativeBuffers(), memory)

    def _reserve(self) -> Tensor | None:
        """Return memory of `reserved_bytes`; None where there is not so much."""
        dtype = self.decoder.dtype
        try:
            return torch.empty(self.reserved_bytes // dtype.itemsize, dtype=dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return None

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        sources: Sequence[int],
        prefix: tuple[int, ...],
        layers: Sequence[int],
        first_row: int,
    ) -> tuple[Tensor, int, int]:
        cache, begins = self.cache, len(prefix)
        assert cache is not None
        shared, new = self._shared(prefix, layers)
        lengths = [len(prompt) - begins for prompt in prompts]
        starts = torch.tensor([0, *itertools.accumulate(lengths)])
        cache.begin_prefill(first_row, sources, shared, starts=starts)
        logits = self._prompts([prompt[begins:] for prompt in prompts], begins, starts, layers, cache)
        return logits[torch.tensor(sources)], sum(lengths), new

    def _prompts(
        self,
        prompts: Sequence[tuple[int, ...]],
        begins: int,
        starts: Tensor,
        layers: Sequence[int],
        cache: SkipCache | PrefixKeys,
    ) -> Tensor:
        """Run `layers` over prompts one behind another; return logits [P, V] at their last tokens.

        begins: position of each prompt's first token. starts: int64 [P + 1], the first token of each prompt, and N.
        """
        ids = torch.tensor([list(itertools.chain.from_iterable(prompts))])
        positions = torch.cat([torch.arange(begins, begins + len(prompt)) for prompt in prompts])[None]
        hidden, rotary = self.decoder.embed(ids, positions)
        for layer in layers:
            buffers, places, sources, prefix = cache.joined_prompts(layer)
            self.stack.prompts(layer, hidden, rotary[layer], starts, places, sources, buffers, prefix)
        return self.decoder.logits(hidden[0, starts[1:] - 1])

    def _compute_prefix(self, prefix: tuple[int, ...], layers: Sequence[int], shared: PrefixKeys) -> None:
        self._prompts([prefix], 0, torch.tensor([0, len(prefix)]), layers, shared)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], rows_per_layer: Sequence[int]) -> Tensor:
        cache = self.cache
        assert cache is not None
        cache.begin_step(positions, self.decoder.device)
        places, slots, width, buffers = cache.step_slots()
        assert isinstance(buffers, NativeBuffers)
        if self._embeds:
            return self.stack.step(tokens, None, rows_per_layer, places, slots, width, buffers)
        ids, at = (torch.tensor(column)[:, None] for column in (tokens, positions))
        hidden, rotary = self.decoder.embed(ids, at)
        return self.stack.step(hidden[:, 0], rotary[0], rows_per_layer, places, slots, width, buffers)

    def release_memory(self) -> None:
        self._memory = None
