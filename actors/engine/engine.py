"""The engine: admit rows, step them one token further, retire those that have ended. Start reading here.

    open(...)                            # memory for so many rows of such lengths
    admit(requests)                      # the prompts' own pass; it yields each row's first token
    while rows in flight:
        step()                           # one token a row, each row at its own depth; ended rows retire

Which rows are admitted when is for `scheduler` to say.
Rows lie oldest first. Depth never rises along a row, so the rows that a layer runs for are the youngest
ones, one contiguous slice; the paper's lock-step batch is the case in which all rows have one age.
Knows nothing of Ray, Parquet or text: token ids in, token ids out.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence

import torch

from actors.engine.cache import PrefixKeys, SkipCache, cache_bytes_per_row, compaction
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.row import Row
from actors.engine.sampling import RowSampling, sample
from actors.engine.schedule import Schedule
from actors.engine.types import Completion, EngineStats, Request, SamplingParams


class Engine:
    """Generates with one decoder and one schedule.

    stop_ids: tokens that end a row. compact_every: steps after which ended rows give up their place; in
    between they ride along. cumulative_logprob: whether completions tell theirs. Raises ValueError if the schedule is
    for another number of layers.
    """

    rounds_to_warm = 1  # rounds over the same rows after which nothing is compiled any more
    grows = False  # whether rows take memory as they grow: then `fitting` says how many more there is room for

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        stop_ids: Collection[int],
        *,
        compact_every: int = 1,
        cumulative_logprob: bool = True,
    ) -> None:
        if schedule.num_layers != decoder.num_layers:
            raise UserError(f"schedule for {schedule.num_layers} layers, model has {decoder.num_layers}")
        self.decoder = decoder
        self.schedule = schedule
        self.stop_ids = frozenset(stop_ids)
        self.compact_every = compact_every
        self.cumulative_logprob = cumulative_logprob
        self.stats = EngineStats()
        self.rows: list[Row] = []
        self.cache: SkipCache | None = None
        self._memory: torch.Tensor | None = None
        self._prefix: tuple[tuple[int, ...], PrefixKeys] | None = None
        self._steps = 0
        self._tickets = 0

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Exact cache bytes of a row in a batch with these as its longest prompt and most new tokens."""
        decoder = self.decoder
        return cache_bytes_per_row(
            self.schedule, prompt_tokens, max_new_tokens, decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize
        )

    def new_tokens_limit(self, request: Request) -> int:
        """Most tokens this row can be given: its own limit, or what the context leaves; for choices, the longest's.

        Raises ValueError for a prompt that is empty or fills the context, and for choices that do not fit.
        """
        length = len(request.prompt_ids)
        if length == 0:
            raise UserError("empty prompt")
        room = self.decoder.context_length - length
        if room < 1:
            raise UserError(f"prompt of {length} tokens leaves no room in a context of {self.decoder.context_length}")
        if request.choices is not None:
            if request.choices.most_tokens > room:
                raise UserError(f"choices of up to {request.choices.most_tokens} tokens; the context leaves {room}")
            return request.choices.most_tokens
        return min(request.sampling.max_new_tokens, room)

    def at(self, schedule: Schedule) -> Engine:
        """An engine of the same decoder under another schedule, with buffers of its own; only one of the two may have
        rows in flight."""
        self.release()  # what only its own next batch would use
        return Engine(self.decoder, schedule, self.stop_ids, cumulative_logprob=self.cumulative_logprob)

    def take_stats(self) -> EngineStats:
        """Counts since the last call."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    def open(self, rows: int, prompt_slots: int, max_new_tokens: int) -> None:
        """Make room for `rows` rows at once, none with a longer prompt or more new tokens than said."""
        assert not self.rows, "rows are in flight"
        decoder = self.decoder
        self.cache = None  # what is too small goes before the new comes
        if self._memory is not None and self._memory.nbytes < rows * self.row_bytes(prompt_slots, max_new_tokens):
            self._memory = None
        self.cache = SkipCache(
            self.schedule,
            rows,
            prompt_slots,
            max_new_tokens,
            kv_heads=decoder.kv_heads,
            head_dim=decoder.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            windows=decoder.windows,
            kernels=decoder.native_buffers(),
            memory=self._memory,
        )
        self._memory = self.cache.memory
        self.stats.batches += 1
        self.stats.cache_bytes = max(self.stats.cache_bytes, self.cache.bytes)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """Run the prompts' own pass and draw each row's first token; returns a ticket a request.

        A prompt that several rows share is computed once. prefix: beginning of all these prompts.
        May be called while rows are in flight: newcomers are the youngest. Rows that end at once leave with
        the next `retire` or `step`.
        """
        began = time.perf_counter()
        cache, decoder = self.cache, self.decoder
        assert cache is not None, "open() comes first"
        assert len(self.rows) + len(requests) <= cache.capacity, "more rows than open() made room for"
        newcomers = [self._begin(request) for request in requests]
        prompts, sources = distinct(requests)
        lengths = [len(prompt) for prompt in prompts]
        assert max(lengths) <= cache.prompt_slots, "a longer prompt than open() said"
        assert max(row.limit for row in newcomers) <= cache.max_new_tokens, "more new tokens than open() said"
        held = self._held_prefix(prefix)
        own = sum(lengths) - len(prefix) * len(prompts)
        if decoder.joins_prompts:
            ends = itertools.accumulate(length - len(prefix) for length in lengths)
            starts = torch.tensor([0, *ends], device=decoder.device)
            cache.begin_prefill(len(self.rows), sources, held, starts=starts)
            logits, computed = self._prefill_joined(prompts, len(prefix), starts), own
        else:
            cache.begin_prefill(len(self.rows), sources, held)
            logits, computed = self._prefill_padded(prompts, len(prefix)), len(prompts) * (max(lengths) - len(prefix))
        self._draw(newcomers, logits[torch.tensor(sources, device=logits.device)])
        self.rows += newcomers
        self.stats.prompt_tokens += own
        self.stats.shared_prompt_tokens += sum(len(request.prompt_ids) for request in requests) - own
        self.stats.padded_prompt_tokens += computed
        self.stats.prefill_seconds += time.perf_counter() - began
        return [row.ticket for row in newcomers]

    def _prefill_joined(self, prompts: Sequence[tuple[int, ...]], prefix: int, starts: torch.Tensor) -> torch.Tensor:
        """Logits [P, V] at the last token of each prompt; the cache has been told of them. Of each, `prefix` tokens
        have been computed before."""
        device = self.decoder.device
        ids = torch.tensor([[token for prompt in prompts for token in prompt[prefix:]]], device=device)
        positions = torch.cat([torch.arange(prefix, len(prompt), device=device) for prompt in prompts])[None]
        assert self.cache is not None
        return self.decoder.prefill_joined(ids, positions, starts, self.schedule.prompt_layers, self.cache)

    def _prefill_padded(self, prompts: Sequence[tuple[int, ...]], prefix: int) -> torch.Tensor:
        """The same of prompts side by side."""
        device = self.decoder.device
        columns = max(map(len, prompts)) - prefix
        ids = torch.zeros(len(prompts), columns, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - prefix] = torch.tensor(prompt[prefix:])
        assert self.cache is not None
        return self.decoder.prefill(
            ids.to(device),
            torch.arange(prefix, prefix + columns, device=device).expand(len(prompts), -1),
            torch.tensor([len(prompt) - prefix - 1 for prompt in prompts], device=device),
            self.schedule.prompt_layers,
            self.cache,
            prefix_columns=prefix,
        )

    def _held_prefix(self, prefix: Sequence[int]) -> PrefixKeys | None:
        """Keys and values of a prompts' common beginning under this engine's schedule; the last one is kept."""
        if not prefix:
            return None
        if self._prefix is None or self._prefix[0] != tuple(prefix):
            held, device = PrefixKeys(), self.decoder.device
            ids = torch.tensor([list(prefix)], device=device)
            positions = torch.arange(len(prefix), device=device)[None]
            last = torch.tensor([len(prefix) - 1], device=device)
            self.decoder.prefill(ids, positions, last, self.schedule.prompt_layers, held)
            self._prefix = (tuple(prefix), held)
            self.stats.prompt_tokens += len(prefix)
            self.stats.padded_prompt_tokens += len(prefix)
        return self._prefix[1]

    def close(self) -> None:
        """Let rows in flight go; what their steps have counted is taken back. Memory in one piece stays."""
        for row in self.rows:
            steps = len(row.tokens) - 1
            self.stats.decode_steps -= steps
            self.stats.layer_steps -= self.schedule.layer_steps(steps)
            self.stats.full_layer_steps -= self.schedule.num_layers * steps
        self.rows, self.cache = [], None

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of these, in their order, there is room for: all, as `open` has made it."""
        return len(requests)

    def one_pass(self, requests: Sequence[Request], prefix: Sequence[int]) -> int:
        """How many of these, in their order, are admitted before the next step while others are in flight: all."""
        return len(requests)

    def take_put_back(self) -> list[int]:
        """Tickets of rows that must be admitted again; none here."""
        return []

    def release(self) -> None:
        """Give back memory that is kept for the next `open`."""
        self._memory = None

    @torch.inference_mode()
    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        """One token further for every row in flight; returns (ticket, completion) of the rows that ended.

        last: nobody is admitted any more, so that layers which no row will run again give up their buffers.
        """
        began = time.perf_counter()
        cache, decoder, rows = self.cache, self.decoder, self.rows
        assert cache is not None and rows
        if last:
            cache.free(rows[-1].position)
        depths = self._depths()
        places = [len(row.request.prompt_ids) + row.position for row in rows]
        cache.begin_step(places, decoder.device)
        # an ended row that rides along may have left the context
        positions = torch.tensor([min(place, decoder.context_length - 1) for place in places])
        logits = decoder.step(
            torch.tensor([row.tokens[-1] for row in rows]).to(decoder.device)[:, None],
            positions.to(decoder.device)[:, None],
            self._rows_per_layer(depths),
            cache,
        )
        alive = [row.finish is None for row in rows]
        self._draw(rows, logits)
        for live, depth in zip(alive, depths, strict=True):  # a step that ran out of memory counts nothing
            self.stats.decode_steps += live
            self.stats.idle_row_steps += not live
            self.stats.layer_steps += depth * live
            self.stats.full_layer_steps += self.schedule.num_layers * live
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
        return [(row.ticket, row.completion(self.cumulative_logprob)) for row in ended]

    def _depths(self) -> list[int]:
        """Of the rows' next input."""
        depths = [self.schedule.depth(row.position) for row in self.rows]
        assert depths == sorted(depths), "rows must lie oldest first"
        return depths

    def _rows_per_layer(self, depths: Sequence[int]) -> list[int]:
        """How many of the youngest rows each layer runs for."""
        return [len(depths) - bisect_right(depths, rank) for rank in self.schedule.ranks]

    def _begin(self, request: Request) -> Row:
        """A row before its first token."""
        sampling = RowSampling.begin(request.sampling, request.key, request.prompt_ids)
        ends = self.stop_ids_of(request.sampling)
        row = Row(request, self._tickets, self.new_tokens_limit(request), sampling, ends)
        self._tickets += 1
        if request.choices is not None:
            row.node = request.choices.root
            sampling.allowed = request.choices.allowed(row.node)
        elif request.sampling.min_new_tokens > 0:
            sampling.barred = [token for token in ends if token < self.decoder.vocab_size]
        return row

    def stop_ids_of(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a row of these parameters."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.stop_ids

    def _draw(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Draw the token behind each row's input and see whether it ends the row."""
        drawn = sample(logits, [row.sampling for row in rows], logprobs=self.cumulative_logprob)
        for place, row in enumerate(rows):
            row.position += 1
            if row.finish is not None:
                continue
            row.tokens.append(drawn.tokens[place])
            row.sampling.add(drawn.tokens[place])
            row.logprob += drawn.logprobs[place]
            if place in drawn.top:
                row.logprobs.append(drawn.top[place])
            if row.node is not None:
                row.choice_logprob += drawn.choice_logprobs[place]
            row.finish = row.reason_to_end()


def distinct(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The prompts of requests, each once, and which of them each request has."""
    numbers: dict[tuple[int, ...], int] = {}
    sources = [numbers.setdefault(tuple(request.prompt_ids), len(numbers)) for request in requests]
    return list(numbers), sources
