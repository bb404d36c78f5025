"""Prompts through the layers, a piece's worth of them at a time, and what many of them begin with only once.

Shapes: P prompts, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.pages import PagedCache, upload
from actors.engine.gpu.prompts import PrefixPages, Prompts
from actors.engine.schedule import Schedule
from actors.engine.working_memory import KEY_TOKENS, PIECE_TOKENS


class Prefill:
    """Of one decoder and schedule; it keeps the last common beginning."""

    def __init__(self, decoder: Decoder, schedule: Schedule) -> None:
        self.decoder, self.schedule = decoder, schedule
        self._shared: tuple[tuple[int, ...], PrefixPages] | None = None

    def share(self, prefix: Sequence[int]) -> int:
        """Have the keys and values of a prompts' common beginning; how many tokens had to be computed."""
        if not prefix or (self._shared is not None and self._shared[0] == tuple(prefix)):
            return 0
        held = PrefixPages()
        self._run(prefix, Prompts([len(prefix)], [], [], self.decoder.device, held_in=held), None)
        self._shared = tuple(prefix), held
        return len(prefix)

    def forget(self) -> None:
        """Let the common beginning go."""
        self._shared = None

    def __call__(
        self,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        sources: Sequence[int],
        cache: PagedCache,
        prefix: Sequence[int],
    ) -> Tensor:
        """Logits [P, V] at the last token of each prompt; keys and values go to the pages of rows.

        sources: which prompt each row has. prefix: what all prompts begin with, as `share` was told.
        """
        shared, before = None, len(prefix)
        if before:
            assert self._shared is not None and self._shared[0] == tuple(prefix)
            shared = self._shared[1]
        lengths = [len(prompt) - before for prompt in prompts]
        batch = Prompts(lengths, rows, sources, self.decoder.device, prefix=shared, before=before)
        return self._run([token for prompt in prompts for token in prompt[before:]], batch, cache)

    def _run(self, ids: Sequence[int], batch: Prompts, cache: PagedCache | None) -> Tensor:
        decoder = self.decoder
        hidden, rotary = decoder.embed(upload(ids, decoder.device)[None], batch.positions[None])
        states = hidden[0]
        for layer in self.schedule.prompt_layers:
            turns, block = rotary[layer], decoder.blocks[layer]
            assert isinstance(block, FusedLayer)
            block.prompts(states, None if turns is None else (turns[0][0], turns[1][0]), batch, cache)
        return decoder.logits(states[batch.last])


def groups(lengths: Sequence[int], before: int) -> list[tuple[int, int]]:
    """First and end of groups of prompts of at most `PIECE_TOKENS`, with at most `KEY_TOKENS` that they see; one that
    is longer is alone. before: tokens that all have before these lengths."""
    found: list[tuple[int, int]] = []
    first = total = 0
    for place, length in enumerate(lengths):
        seen = total + length + before * (place + 1 - first)
        if place > first and (total + length > PIECE_TOKENS or seen > KEY_TOKENS):
            found.append((first, place))
            first, total = place, 0
        total += length
    return [*found, (first, len(lengths))]
