"""Prompts through the layers, pass by pass, and their shared prefix only once.

Shapes: P prompts, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.pages import PagedCache, shared_tokens, upload
from actors.engine.gpu.prompts import PrefixKeys, Prompts, Riders
from actors.engine.schedules.schedule import Schedule
from actors.engine.working_memory import CHUNK_TOKENS, KEY_TOKENS


class Prefill:
    """Passes over prompts of one decoder and schedule; the last shared prefix is kept."""

    def __init__(self, decoder: Decoder, schedule: Schedule) -> None:
        self.decoder, self.schedule = decoder, schedule
        self._shared: tuple[tuple[int, ...], PrefixKeys] | None = None

    def share(self, prefix: tuple[int, ...], row: int, cache: PagedCache) -> int:
        """Keep the keys and values of a shared prefix, and write them to its pages where that has not been done.

        Returns how many tokens had to be computed. row: slot of a row that begins with the prefix.
        """
        computed = 0
        if prefix and (self._shared is None or self._shared[0] != prefix):
            self._shared = None  # freed first: memory is planned for one
            shared, computed = PrefixKeys(), len(prefix)
            self._run(prefix, Prompts([computed], [], [], self.decoder.device, keep_in=shared), None)
            self._shared = prefix, shared
        layers = cache.take_unwritten(prefix)
        if layers:
            first = self.decoder.blocks[0]
            assert self._shared is not None and isinstance(first, FusedLayer)
            self._shared[1].write(layers, row, shared_tokens(len(prefix)), cache, first.operations)
        return computed

    def forget(self) -> None:
        """Free the shared prefix."""
        self._shared = None

    def __call__(
        self,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        sources: Sequence[int],
        cache: PagedCache,
        prefix: tuple[int, ...],
        riders: Riders | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logits [P, V] at the last token of each prompt, and [B, V] of the riders.

        Keys and values are written to the pages of rows.

        Args:
            prompts: Token ids.
            rows: Slots of the rows.
            sources: Number of each row's prompt.
            cache: Pages of the rows.
            prefix: Tokens with which all prompts begin; `share` has been called with them.
            riders: Rows in flight that make a step in this pass.
        """
        shared, before = None, len(prefix)
        if before:
            assert self._shared is not None and self._shared[0] == prefix
            shared = self._shared[1]
        lengths = [len(prompt) - before for prompt in prompts]
        batch = Prompts(lengths, rows, sources, self.decoder.device, prefix=shared, before=before, riders=riders)
        return self._run([token for prompt in prompts for token in prompt[before:]], batch, cache)

    def _run(self, ids: Sequence[int], batch: Prompts, cache: PagedCache | None) -> tuple[Tensor, Tensor]:
        decoder, riders, schedule = self.decoder, batch.riders, self.schedule
        hidden, rotary = decoder.embed(upload(ids, decoder.device)[None], batch.positions[None])
        states, riding, last = hidden[0], 0, batch.last
        if riders is not None:
            riding = len(riders)
            states = torch.cat((riders.hidden, states))
            last = torch.cat((last + riding, torch.arange(riding, device=last.device)))
        for layer, rank in enumerate(schedule.ranks):
            rope, block = rotary[layer], decoder.blocks[layer]
            assert isinstance(block, FusedLayer)
            if layer in schedule.prompt_layers:
                block.prompts(states, None if rope is None else (rope[0][0], rope[1][0]), batch, cache, rank)
            elif riders is not None and riders.counts[layer]:
                assert cache is not None
                count = riders.counts[layer]
                lanes = riders.lanes.youngest(count)
                block.step(states[riding - count : riding], lanes, cache, rank, riders.splits[layer])
        logits = decoder.logits(states[last])
        return logits[: len(batch.last)], logits[len(batch.last) :]


def passes(lengths: Sequence[int], before: int) -> list[tuple[int, int]]:
    """First and end of the prompts of each pass: at most `CHUNK_TOKENS` tokens and `KEY_TOKENS` keys, or one longer
    prompt. before: tokens of the prefix, which come before each of these lengths."""
    bounds: list[tuple[int, int]] = []
    first = total = 0
    for prompt, length in enumerate(lengths):
        keys = total + length + before * (prompt + 1 - first)
        if prompt > first and (total + length > CHUNK_TOKENS or keys > KEY_TOKENS):
            bounds.append((first, prompt))
            first, total = prompt, 0
        total += length
    return [*bounds, (first, len(lengths))]
