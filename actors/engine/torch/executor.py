"""The executor that runs transformers' layers: the reference for the CPU kernels, used where the kernels cannot run.

An executor has the methods `open`, `prefill`, `decode`, `free` and `used_bytes`. It holds the KV cache of the rows in
flight, and runs forward passes. It identifies a row by its slot number, and knows nothing of requests or sampling.
Shapes: R rows of a prefill, P prompts, B rows of a decode step, E hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engine.cache import PrefixKeys, SkipCache, SlotShape
from actors.engine.decoder import Decoder
from actors.engine.sampling.sampler import argmax


class LibraryExecutor:
    """Runs a decoder's layers one by one. `open` makes a new KV cache."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._shape: SlotShape | None = None
        self._cache: Any = None
        self._rows: list[int] = []  # slot number of each row of the cache; -1: the cache row is free
        self._prefix: tuple[object, Any] | None = None

    def open(self, shape: SlotShape | None) -> None:
        """Replace all slots by new slots of `shape`; None: drop all slots (the CPU executor keeps their memory)."""
        self._cache, self._shape, self._rows = None, shape, []
        if shape is not None:
            self._cache, self._rows = self._allocated(shape), [-1] * shape.rows

    def _allocated(self, shape: SlotShape) -> Any:
        """Return a new cache."""
        decoder = self.decoder
        return SkipCache(
            shape,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            windows=decoder.windows,
        )

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],  # P different prompts
        sources: Sequence[int],  # for each of R rows, the index of its prompt
        slots: Sequence[int],  # for each row, the free slot that the row takes
        # tokens with which all prompts begin; their keys and values are kept for the next call
        prefix: tuple[int, ...],
        layers: Sequence[int],  # layers that run
    ) -> tuple[Tensor, int, int]:
        """Run the prompts of new rows through `layers`, padded to the same length.

        Returns:
            Logits [R, V] after each row's prompt, number of prompt tokens computed (including padding), and number of
            prefix tokens computed (0 if the prefix was kept from an earlier call).
        """
        device, begins = self.decoder.device, len(prefix)
        shared, new = self._shared(prefix, tuple(layers))
        cache = self._cache
        rows = [row for row, slot in enumerate(self._rows) if slot < 0][: len(slots)]
        for row, slot in zip(rows, slots, strict=True):
            self._rows[row] = slot
        cache.begin_prefill(rows, sources, shared)
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

    def _shared(self, prefix: tuple[int, ...], layers: tuple[int, ...]) -> tuple[Any, int]:
        """Return the keys and values of a prefix in `layers`, and the number of tokens computed: 0 if it was kept."""
        if not prefix:
            return None, 0
        if self._prefix is not None and self._prefix[0] == (prefix, layers):
            return self._prefix[1], 0
        shared = self._run_prefix(prefix, layers)
        self._prefix = (prefix, layers), shared
        return shared, len(prefix)

    def _run_prefix(self, prefix: tuple[int, ...], layers: tuple[int, ...]) -> Any:
        """Run a prefix through `layers`; return its keys and values in the form that `prefill` needs."""
        device, shared = self.decoder.device, PrefixKeys()
        positions = torch.arange(len(prefix), device=device)[None]
        last = torch.tensor([len(prefix) - 1], device=device)
        self.decoder.prefill(torch.tensor([prefix], device=device), positions, last, layers, shared)
        return shared

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        rows_per_layer: Sequence[int],
        *,
        greedy: bool = False,
    ) -> Tensor:
        """Run one token of each row in flight; return logits [B, V], or the likeliest tokens [B] if `greedy`.

        tokens, positions, slots: [B]. rows_per_layer: for each layer, how many of the last rows run the layer.
        """
        order = {slot: row for row, slot in enumerate(self._rows)}
        self._cache.arrange([order[slot] for slot in slots])
        self._rows = [*slots, *[-1] * (len(self._rows) - len(slots))]
        self._cache.begin_step(positions)
        logits = self.decoder.logits(self.decoder.step(tokens, positions, rows_per_layer, self._cache))
        return argmax(logits) if greedy else logits

    def free(self, slots: Collection[int]) -> None:
        """Free the slots of rows that have ended."""
        self._rows = [-1 if slot in slots else slot for slot in self._rows]

    def used_bytes(self) -> int:
        """Return the cache bytes of all slots. Any thread may call this."""
        shape = self._shape
        return 0 if self._cache is None or shape is None else shape.bytes(self.decoder.token_bytes)
