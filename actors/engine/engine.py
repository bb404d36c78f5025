"""Generates tokens for rows (requests) in KV cache slots: admits rows, runs decode steps, and removes ended rows.

    open(...)                            # allocate slots for a number of rows and their maximum lengths
    admit(requests)                      # prefill, which yields each row's first token
    while rows in flight:
        step()                           # one token per row, each row at its own depth; ended rows are removed

Module `loop` decides when rows are admitted. The engine takes and returns token ids, not text.
Rows are ordered oldest first. The depth of a row (how many layers run) never rises from token to token, so each layer
runs for the youngest rows, which are one contiguous slice. In the paper's lock-step batch all rows have the same age.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache

import torch

from actors.engine.cache import SlotShape, compaction
from actors.engine.cpu.executor import CpuExecutor, StackDecoder
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.row import Row, begin_row, record
from actors.engine.sampling.sampler import greedy, is_greedy, sample
from actors.engine.sampling.state import Drawn
from actors.engine.schedule.schedule import Schedule
from actors.engine.torch.executor import LibraryExecutor
from actors.engine.types import Completion, EngineStats, Request

Ended = list[tuple[int, Completion]]  # (ticket, completion) of rows that have ended


class Engine:
    """Generates tokens for rows in cache slots. Each slot has room for the longest row of the batch.

    Args:
        decoder: The model.
        schedule: The schedule of all rows.
        stop_ids: Tokens that end a row.
        cumulative_logprob: Whether completions hold the sum of their tokens' log-probabilities.

    Raises:
        UserError: Schedule and decoder have different numbers of layers.
    """

    def __init__(
        self, decoder: Decoder, schedule: Schedule, stop_ids: Collection[int], *, cumulative_logprob: bool = True
    ) -> None:
        if schedule.num_layers != decoder.num_layers:
            raise UserError(
                f"the schedule is for {schedule.num_layers} layers, but the model has {decoder.num_layers}: use a "
                "schedule for this model"
            )
        self.decoder = decoder
        self.schedule = schedule
        self.stop_ids = frozenset(stop_ids)
        self.cumulative_logprob = cumulative_logprob
        self.stats = EngineStats()
        self.rows: list[Row] = []
        self.executor = CpuExecutor(decoder) if isinstance(decoder, StackDecoder) else LibraryExecutor(decoder)
        self._tickets = 0
        self._free: list[int] = []  # free slots; the last slot in the list is used next
        # worth caching: few lengths occur, and each needs a sum over all layers
        self._row_bytes = lru_cache(2**14)(
            lambda prompt, new: SlotShape(schedule, 1, prompt, new).bytes(decoder.token_bytes)
        )
        self._shape = SlotShape(schedule, 0, 0, 0)

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return the exact cache bytes of a slot for at most `prompt_tokens` and `max_new_tokens` tokens."""
        return self._row_bytes(prompt_tokens, max_new_tokens)

    def at(self, schedule: Schedule) -> Engine:
        """Return an engine with the same decoder and another schedule. Only one of the two may have rows in flight.

        Raises UserError if the schedule is for another number of layers.
        """
        return Engine(self.decoder, schedule, self.stop_ids, cumulative_logprob=self.cumulative_logprob)

    def take_stats(self) -> EngineStats:
        """Return the counts since the last call of `take_stats`."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    @torch.inference_mode()
    def open(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """Allocate slots for `rows` rows in flight, each with at most `prompt_tokens` and `max_new_tokens` tokens."""
        assert not self.rows, "rows are in flight"
        self._shape = SlotShape(self.schedule, rows, prompt_tokens, max_new_tokens)
        self.executor.open(self._shape)
        self._free = [*reversed(range(rows))]
        self.stats.cache_bytes = max(self.stats.cache_bytes, self._shape.bytes(self.decoder.token_bytes))
        self.stats.batches += 1

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """Run prefill over the prompts and sample each row's first token. Return one ticket (row number) per request.

        A prompt that several requests share is computed once. Other rows may be in flight; the admitted rows become the
        youngest. A row that ends with its first token is returned by the next `retire` or `step`. prefix: token ids
        with which all prompts begin.
        """
        began = time.perf_counter()
        shape = self._shape
        assert len(self.rows) + len(requests) <= shape.rows, "more rows than open() allocated for"
        newcomers = [self._begin(request) for request in requests]
        layers = self.schedule.prompt_layers
        numbers: dict[tuple[int, ...], int] = {}  # each distinct prompt -> its index
        sources = [numbers.setdefault(tuple(request.prompt_ids), len(numbers)) for request in requests]
        prompts = list(numbers)
        assert max(map(len, prompts)) <= shape.prompt_tokens, "a longer prompt than open() allocated for"
        assert max(row.limit for row in newcomers) <= shape.max_new_tokens, "more new tokens than open() allocated for"
        slots = [row.slot for row in newcomers]
        logits, computed, of_prefix = self.executor.prefill(prompts, sources, slots, tuple(prefix), layers)
        record(newcomers, sample(logits, [row.sampling for row in newcomers], logprobs=self.cumulative_logprob))
        self.rows += newcomers
        own = sum(map(len, prompts)) - len(prefix) * len(prompts)
        self.stats.prompt_tokens += own + of_prefix
        self.stats.padded_prompt_tokens += computed + of_prefix
        self.stats.shared_prompt_tokens += sum(len(request.prompt_ids) for request in requests) - own
        self.stats.prefill_seconds += time.perf_counter() - began
        return [row.ticket for row in newcomers]

    def _begin(self, request: Request) -> Row:
        """Make the row for a request, with a new ticket and a free slot."""
        decoder = self.decoder
        self._tickets += 1
        row = begin_row(
            request,
            self._tickets,
            context_length=decoder.context_length,
            vocab_size=decoder.vocab_size,
            stop_ids=self.stop_ids,
        )
        row.slot = self._free.pop()
        return row

    def close(self) -> None:
        """Drop all rows in flight and all slots. Subtract the dropped rows' decode steps from the counts."""
        for row in self.rows:
            self.stats.add_steps(self.schedule, -max(len(row.tokens) - 1, 0))
        self.rows = []
        self.executor.open(None)

    @torch.inference_mode()
    def step(self) -> Ended:
        """Generate one token for every row in flight; return the rows that have ended."""
        began, stats = time.perf_counter(), self.stats
        ended = self.retire()
        rows = self.rows
        if rows:
            depths = [self.schedule.depth(row.position) for row in rows]
            record(rows, self._sampled([len(rows) - bisect_right(depths, rank) for rank in self.schedule.ranks]))
            stats.decode_steps += len(rows)  # counted only now, so that a step that runs out of memory does not count
            stats.layer_steps += sum(depths)
            stats.full_layer_steps += self.schedule.num_layers * len(rows)
            ended += self.retire()
        stats.decode_seconds += time.perf_counter() - began
        return ended

    def _sampled(self, per_layer: Sequence[int]) -> Drawn:
        """Return the rows' next tokens. per_layer: for each layer, the number of youngest rows that run it."""
        rows, samplings = self.rows, [row.sampling for row in self.rows]
        tokens, slots = [row.tokens[-1] for row in rows], [row.slot for row in rows]
        positions = [len(row.request.prompt_ids) + row.position for row in rows]
        argmax = is_greedy(samplings, logprobs=self.cumulative_logprob)
        found = self.executor.decode(tokens, positions, slots, per_layer, greedy=argmax)
        return greedy(found.tolist()) if argmax else sample(found, samplings, logprobs=self.cumulative_logprob)

    def retire(self) -> Ended:
        """Remove all rows that have ended, and free their slots. Return their (ticket, completion) pairs."""
        ended = self._keep([row.finish is None for row in self.rows])
        return [(row.ticket, row.completion(self.cumulative_logprob)) for row in ended]

    def _keep(self, alive: Sequence[bool]) -> list[Row]:
        """Remove and return the rows in flight whose entry in `alive` (one bool per row) is False."""
        if all(alive):
            return []
        left = [row for row, kept in zip(self.rows, alive, strict=True) if not kept]
        slots = [row.slot for row in left]
        self._free += slots
        self.executor.free(slots)
        order = compaction([row.position for row in self.rows], alive)
        self.rows = [self.rows[index] for index in order]
        self.stats.generated_tokens += sum(len(row.tokens) for row in left)
        return left
