"""The executor over transformers' layers: the oracle, and every family and device that the CPU's kernels lack.

An executor holds the keys and values of the rows in flight, and runs passes over them: `open`, `prefill`, `decode`,
`keep`, `used_bytes`. Rows are numbered in the order of the engine's; it knows neither requests nor sampling.
Shapes: R rows of a prefill, P prompts, B rows of a decode step, E hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.cache import PrefixKeys, SkipCache, SlotShape
from actors.engine.decoder import Decoder


class LibraryExecutor:
    """Runs a decoder's layers one by one, over slots that are allocated anew for each shape."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.cache: SkipCache | None = None
        self.reserved_bytes = 0
        self._prefix: tuple[object, PrefixKeys] | None = None

    def open(self, shape: SlotShape, held: int = 0, *, allocates: bool = True) -> bool:
        """Make slots of a shape for the rows in flight; return False if that takes memory and none may be allocated.

        Args:
            shape: Schedule, rows and lengths of the slots.
            held: Rows in flight, whose keys and values are kept; 0 drops those of an earlier shape first.
            allocates: Whether memory may be allocated while rows are in flight; both caches then exist at once.
        """
        if held and not allocates:
            return False
        if not held:
            self.cache = None  # freed before the new one is allocated
        earlier, self.cache = self.cache, self.decoder.slots(shape)
        if earlier is not None:
            self.cache.copy_rows(earlier, held)
        return True

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        sources: Sequence[int],
        prefix: tuple[int, ...],
        layers: Sequence[int],
        first_row: int,
    ) -> tuple[Tensor, int, int]:
        """Run the prompts of new rows through `layers`, padded to one length.

        Args:
            prompts: P prompts that differ.
            sources: The prompt of each of R rows.
            prefix: Tokens with which all the prompts begin; the keys and values of the last prefix are kept.
            layers: Layers that run.
            first_row: The number of the first of these rows.

        Returns:
            Logits [R, V] behind the prompt of each row, the number of prompt tokens computed, padding included, and the
            tokens of `prefix` if they were computed.
        """
        cache, device, begins = self.cache, self.decoder.device, len(prefix)
        assert cache is not None
        shared, new = self._shared(prefix, layers)
        cache.begin_prefill(first_row, sources, shared)
        columns = max(map(len, prompts)) - begins
        ids = torch.zeros(len(prompts), columns, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - begins] = torch.tensor(prompt[begins:])
        logits = self.decoder.prefill(
            ids.to(device),
            torch.arange(begins, begins + columns, device=device).expand(len(prompts), -1),
            torch.tensor([len(prompt) - begins - 1 for prompt in prompts], device=device),
            layers,
            cache,
            prefix_columns=begins,
        )
        return logits[torch.tensor(sources, device=logits.device)], len(prompts) * columns, new

    def _shared(self, prefix: tuple[int, ...], layers: Sequence[int]) -> tuple[PrefixKeys | None, int]:
        """Return the keys and values of a prefix in these layers, and the number of tokens computed for them."""
        if not prefix:
            return None, 0
        key = prefix, tuple(layers)
        if self._prefix is not None and self._prefix[0] == key:
            return self._prefix[1], 0
        decoder = self.decoder
        shared = PrefixKeys(decoder.kv_heads, len(prefix), decoder.head_dim, decoder.dtype)
        self._compute_prefix(prefix, layers, shared)
        self._prefix = key, shared
        return shared, len(prefix)

    def _compute_prefix(self, prefix: tuple[int, ...], layers: Sequence[int], shared: PrefixKeys) -> None:
        """Run a prefix through `layers`, whose keys and values `shared` takes."""
        device = self.decoder.device
        positions = torch.arange(len(prefix), device=device)[None]
        last = torch.tensor([len(prefix) - 1], device=device)
        self.decoder.prefill(torch.tensor([prefix], device=device), positions, last, layers, shared)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], rows_per_layer: Sequence[int]) -> Tensor:
        """Run one token of each row; return hidden states [B, E] behind the last layer.

        tokens, positions: [B]. rows_per_layer: how many of the last rows each layer runs for.
        """
        assert self.cache is not None
        self.cache.begin_step(positions, self.decoder.device)
        return self.decoder.step(tokens, positions, rows_per_layer, self.cache)

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order, as old row numbers; the slots of all others are free."""
        assert self.cache is not None
        self.cache.arrange(order)

    def free_layers(self, position: int) -> None:
        """Free the slots in layers that no row at `position` or later will run."""
        assert self.cache is not None
        self.cache.free(position)

    def close(self) -> None:
        """Drop all rows."""
        self.cache = None

    def release_memory(self) -> None:
        """Free the memory that is kept for the next `open`: there is none."""

    def used_bytes(self) -> int:
        """Return the bytes of the slots, less those of freed layers; may be called from any thread."""
        cache = self.cache
        return 0 if cache is None else cache.bytes
