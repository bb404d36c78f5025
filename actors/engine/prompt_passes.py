"""The prompts' own pass through the decoder, into a cache of slots; what all prompts begin with is computed once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from actors.engine.cache import PrefixKeys, SkipCache
from actors.engine.decoder import Decoder
from actors.engine.types import EngineStats


class PromptPasses:
    """Keeps the last beginning that prompts shared. decoder: The model."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._prefix: tuple[tuple[tuple[int, ...], tuple[int, ...]], PrefixKeys] | None = None

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        sources: Sequence[int],
        prefix: Sequence[int],
        layers: Sequence[int],
        cache: SkipCache,
        first_row: int,
        stats: EngineStats,
    ) -> tuple[torch.Tensor, int]:
        """Logits [R, V] behind the prompt of each row, and how many tokens of prompts were computed, with padding.

        Args:
            prompts: P prompts that differ.
            sources: The prompt of each of R rows.
            prefix: Tokens with which all the prompts begin.
            layers: That they run.
            cache: Where keys and values go, for the rows from `first_row` on.
            first_row: The number of the first row in the cache.
            stats: Counts the tokens of `prefix`, if they are computed.
        """
        shared = self._shared(prefix, layers, stats)
        lengths = [len(prompt) - len(prefix) for prompt in prompts]
        device = self.decoder.device
        if self.decoder.stack is not None:
            starts = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
            cache.begin_prefill(first_row, sources, shared, starts=starts)
            logits, computed = self._joined(prompts, len(prefix), starts, layers, cache), sum(lengths)
        else:
            cache.begin_prefill(first_row, sources, shared)
            logits, computed = self._padded(prompts, len(prefix), layers, cache), len(prompts) * max(lengths)
        return logits[torch.tensor(sources, device=logits.device)], computed

    def _joined(
        self,
        prompts: Sequence[tuple[int, ...]],
        prefix: int,
        starts: torch.Tensor,
        layers: Sequence[int],
        cache: SkipCache,
    ) -> torch.Tensor:
        """Logits [P, V] at the last token of each prompt, after `cache.begin_prefill`; joined without padding.

        prefix: first tokens of each prompt whose keys and values exist already. starts: int64 [P + 1].
        """
        device = self.decoder.device
        ids = torch.tensor([[token for prompt in prompts for token in prompt[prefix:]]], device=device)
        positions = torch.cat([torch.arange(prefix, len(prompt), device=device) for prompt in prompts])[None]
        return self.decoder.prefill_joined(ids, positions, starts, layers, cache)

    def _padded(
        self, prompts: Sequence[tuple[int, ...]], prefix: int, layers: Sequence[int], cache: SkipCache
    ) -> torch.Tensor:
        """Logits [P, V] at the last token of each prompt, after `cache.begin_prefill`; prompts padded to one length."""
        device = self.decoder.device
        columns = max(map(len, prompts)) - prefix
        ids = torch.zeros(len(prompts), columns, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - prefix] = torch.tensor(prompt[prefix:])
        return self.decoder.prefill(
            ids.to(device),
            torch.arange(prefix, prefix + columns, device=device).expand(len(prompts), -1),
            torch.tensor([len(prompt) - prefix - 1 for prompt in prompts], device=device),
            layers,
            cache,
            prefix_columns=prefix,
        )

    def _shared(self, prefix: Sequence[int], layers: Sequence[int], stats: EngineStats) -> PrefixKeys | None:
        """Keys and values of the prompts' common beginning in these layers; the last one is kept."""
        if not prefix:
            return None
        if self._prefix is None or self._prefix[0] != (tuple(prefix), tuple(layers)):
            decoder, device = self.decoder, self.decoder.device
            shared = PrefixKeys(decoder.kv_heads, len(prefix), decoder.head_dim, decoder.dtype)
            ids = torch.tensor([list(prefix)], device=device)
            positions = torch.arange(len(prefix), device=device)[None]
            if decoder.stack is not None:
                decoder.prefill_joined(ids, positions, torch.tensor([0, len(prefix)]), layers, shared)
            else:
                decoder.prefill(ids, positions, torch.tensor([len(prefix) - 1], device=device), layers, shared)
            self._prefix = ((tuple(prefix), tuple(layers)), shared)
            stats.prompt_tokens += len(prefix)
            stats.padded_prompt_tokens += len(prefix)
        return self._prefix[1]
