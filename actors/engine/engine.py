"""The engine: admit rows, step them one token further, retire those that have ended. Start reading here.

    for batch in plan_batches(...):      # similar lengths, under a budget of cache bytes
        admit(batch)                     # the prompts' own pass; it yields each row's first token
        while rows in flight:
            step()                       # one token a row, each row at its own depth; ended rows retire

Rows lie oldest first. Depth never rises along a row, so the rows that a layer runs for are the youngest
ones, one contiguous slice; the paper's lock-step batch is the case in which all rows have one age.
Knows nothing of Ray, Parquet or text: token ids in, token ids out.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from actors.engine.batching import plan_batches
from actors.engine.cache import SkipCache, cache_bytes_per_row, compaction
from actors.engine.decoder import Decoder
from actors.engine.sampling import sample
from actors.engine.schedule import Schedule
from actors.engine.types import Completion, EngineStats, FinishReason, Request


@dataclass
class Row:
    """A row in flight. position: t of the token that the next step takes as input."""

    request: Request
    ticket: int
    position: int = 0
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    finish: FinishReason | None = None


class Engine:
    """Generates with one decoder and one schedule.

    stop_ids: tokens that end a row. compact_every: steps after which ended rows give up their place; in
    between they ride along. Raises ValueError if the schedule is for another number of layers.
    """

    def __init__(
        self, decoder: Decoder, schedule: Schedule, stop_ids: Collection[int], *, compact_every: int = 1
    ) -> None:
        if schedule.num_layers != decoder.num_layers:
            raise ValueError(f"schedule for {schedule.num_layers} layers, model has {decoder.num_layers}")
        self.decoder = decoder
        self.schedule = schedule
        self.stop_ids = frozenset(stop_ids)
        self.compact_every = compact_every
        self.stats = EngineStats()
        self.rows: list[Row] = []
        self.cache: SkipCache | None = None
        self._steps = 0
        self._tickets = 0

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Exact cache bytes of a row in a batch with these as its longest prompt and most new tokens."""
        decoder = self.decoder
        return cache_bytes_per_row(
            self.schedule, prompt_tokens, max_new_tokens, decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize
        )

    def new_tokens_limit(self, request: Request) -> int:
        """Most tokens this row can be given: its own limit, or what the context leaves.

        Raises ValueError for a prompt that is empty or fills the context.
        """
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError("empty prompt")
        room = self.decoder.context_length - length
        if room < 1:
            raise ValueError(f"prompt of {length} tokens leaves no room in a context of {self.decoder.context_length}")
        return min(request.sampling.max_new_tokens, room)

    def take_stats(self) -> EngineStats:
        """Counts since the last call."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def generate(self, requests: Sequence[Request], *, budget_bytes: int, max_rows: int) -> list[Completion]:
        """Answer all requests, in lock-step batches; completions in the order of the requests.

        budget_bytes: cache of one batch. Raises ValueError for a request that cannot be run.
        """
        limits = [self.new_tokens_limit(request) for request in requests]
        batches = plan_batches(
            [len(request.prompt_ids) for request in requests],
            limits,
            row_bytes=self.row_bytes,
            budget_bytes=budget_bytes,
            max_rows=max_rows,
        )
        completions: dict[int, Completion] = {}
        for batch in batches:
            longest = max(len(requests[row].prompt_ids) for row in batch)
            self.open(len(batch), longest, max(limits[row] for row in batch))
            tickets = dict(zip(self.admit([requests[row] for row in batch]), batch, strict=True))
            ended = self.retire()
            while self.rows:
                assert self.cache is not None
                self.cache.free(self.rows[-1].position)  # nobody is admitted any more
                ended += self.step()
            completions.update((tickets[ticket], completion) for ticket, completion in ended)
        return [completions[row] for row in range(len(requests))]

    def open(self, rows: int, prompt_slots: int, max_new_tokens: int) -> None:
        """Make room for `rows` rows at once, none with a longer prompt or more new tokens than said."""
        assert not self.rows, "rows are in flight"
        self.cache = None  # the old buffers go before the new ones come
        decoder = self.decoder
        self.cache = SkipCache(
            self.schedule,
            rows,
            prompt_slots,
            max_new_tokens,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.stats.batches += 1
        self.stats.cache_bytes = max(self.stats.cache_bytes, self.cache.bytes)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> list[int]:
        """Run the prompts' own pass and draw each row's first token; returns a ticket a request.

        May be called while rows are in flight: newcomers are the youngest. Rows that end at once leave with
        the next `retire` or `step`.
        """
        began = time.perf_counter()
        cache, decoder = self.cache, self.decoder
        assert cache is not None, "open() comes first"
        assert len(self.rows) + len(requests) <= cache.capacity, "more rows than open() made room for"
        lengths = [len(request.prompt_ids) for request in requests]
        limits = [self.new_tokens_limit(request) for request in requests]
        assert max(lengths) <= cache.prompt_slots and max(limits) <= cache.max_new_tokens, "more than open() said"
        columns = max(lengths)
        ids = torch.zeros(len(requests), columns, dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        cache.begin_prefill(len(self.rows))
        logits = decoder.prefill(
            ids.to(decoder.device),
            torch.arange(columns, device=decoder.device).expand(len(requests), -1),
            torch.tensor(lengths, device=decoder.device) - 1,
            self.schedule.prompt_layers,
            cache,
        )
        newcomers = [Row(request, self._tickets + place, position=-1) for place, request in enumerate(requests)]
        self._tickets += len(requests)
        self._draw(newcomers, logits)
        self.rows += newcomers
        self.stats.prompt_tokens += sum(lengths)
        self.stats.padded_prompt_tokens += columns * len(requests)
        self.stats.prefill_seconds += time.perf_counter() - began
        return [row.ticket for row in newcomers]

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Completion]]:
        """One token further for every row in flight; returns (ticket, completion) of the rows that ended."""
        began = time.perf_counter()
        cache, decoder, rows = self.cache, self.decoder, self.rows
        assert cache is not None and rows
        depths = [self.schedule.depth(row.position) for row in rows]
        assert depths == sorted(depths), "rows must lie oldest first"
        places = [len(row.request.prompt_ids) + row.position for row in rows]
        cache.begin_step(places, decoder.device)
        # an ended row that rides along may have left the context
        positions = torch.tensor([min(place, decoder.context_length - 1) for place in places])
        logits = decoder.step(
            torch.tensor([row.tokens[-1] for row in rows]).to(decoder.device)[:, None],
            positions.to(decoder.device)[:, None],
            [len(rows) - bisect_right(depths, rank) for rank in self.schedule.ranks],
            cache,
        )
        for row, depth in zip(rows, depths, strict=True):
            live = row.finish is None
            self.stats.decode_steps += live
            self.stats.idle_row_steps += not live
            self.stats.layer_steps += depth * live
            self.stats.full_layer_steps += self.schedule.num_layers * live
        self._draw(rows, logits)
        ended = self.retire()
        self.stats.decode_seconds += time.perf_counter() - began
        return ended

    def retire(self) -> list[tuple[int, Completion]]:
        """Take out the rows that have ended and close the gaps they leave; returns (ticket, completion) of each."""
        assert self.cache is not None
        self._steps += 1
        last = max((row.position for row in self.rows), default=0) >= self.cache.max_new_tokens - 1
        alive = [row.finish is None for row in self.rows]
        if all(alive) or (any(alive) and self._steps % self.compact_every and not last):
            return []
        ended = [row for row in self.rows if row.finish is not None]
        order = compaction([row.position for row in self.rows], alive)
        moved = [(source, target) for target, source in enumerate(order) if source != target]
        if moved:
            self.cache.move(*zip(*moved, strict=True))
        self.rows = [self.rows[row] for row in order]
        self.stats.generated_tokens += sum(len(row.tokens) for row in ended)
        completions = []
        for row in ended:
            assert row.finish is not None
            completions.append((row.ticket, Completion(tuple(row.tokens), row.finish, row.logprob)))
        return completions

    def _draw(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Draw the token behind each row's input and see whether it ends the row."""
        tokens, logprobs = sample(
            logits,
            [row.request.sampling for row in rows],
            [row.request.key for row in rows],
            [row.position + 1 for row in rows],
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.position += 1
            if row.finish is not None:
                continue
            row.tokens.append(token)
            row.logprob += logprob
            if token in self.stop_ids:
                row.finish = FinishReason.STOP
            elif len(row.tokens) >= self.new_tokens_limit(row.request):
                row.finish = FinishReason.LENGTH
