"""The paged engine on a GPU: rows are admitted, stepped and retired as in `engine`, but the GPU runs ahead of the host.

    step                       the GPU samples tokens and marks rows that have ended; the host only launches it
    every `read_every` steps   the host polls which rows have ended, and reads the answer during the next step
    masked rows in flight      the host polls after each step, and while the GPU runs the next one's layers it reads the
                               answer and uploads which tokens these rows allow, before the step's end is launched

Rows allocate pages as they grow (`pages`), so that more of them are in flight than would fit at full length. Where
pages run out, the youngest rows are preempted: they run again from their prompt and sample the same tokens.
What ends a row unseen by the GPU (a stop string, a constraint) the host sees when it reads a poll: what the row has
sampled since is dropped.

Ordering on the GPU's streams. One compute stream, the current one, runs all passes, steps and graphs; every write to
the page tables, every reuse of a slot and every reuse of a page is launched on it after the work that used the old
content, so none of them waits. Only the fetch of a completion poll (`completions`) leaves it: on its own stream, behind
the poll's event, it reads rows that had ended then, which no later step changes, and the host waits for it before it
frees their slots and pages. Uploads come from pinned memory that torch's allocator reuses only after the copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from actors.engine.checkpoint.compressed import Kind
from actors.engine.checkpoint.weights import gib
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.gpu.admission import AdmissionEstimate
from actors.engine.gpu.buffers import Buffers, allocate, rounded
from actors.engine.gpu.completions import CompletionPoll, count_ended
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.pages import PagePool, page_bytes, shared_tokens, token_bytes, upload
from actors.engine.gpu.prefill import Prefill, passes
from actors.engine.gpu.prefill_times import PrefillTimes
from actors.engine.gpu.products import DTYPES
from actors.engine.gpu.variant import SamplingVariant
from actors.engine.protocol import Ended
from actors.engine.row import (
    Row,
    begin_row,
    distinct_prompts,
    input_depths,
    rows_per_layer,
)
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import EngineStats, Request
from actors.engine.working_memory import PREFIX_TOKENS

READ_EVERY = 4
OWN_STOPS = 8  # stop tokens of a row, besides the model's, that the GPU checks; a row with more is watched
log = logging.getLogger(__name__)


class GpuEngine:
    """The paged engine over a decoder whose layers are `FusedLayer`s; implements `EngineProtocol`.

    Args:
        decoder: The model, after `prepare_for_gpu`.
        schedule: Layers of each position; all rows have it.
        stop_ids: Tokens that end a row.
        budget_bytes: Bytes of the cache's pages, allocated once.
        max_rows: Most rows in flight.
        cumulative_logprob: Whether completions carry their log-probability.
        graphs: Whether to capture steps as CUDA graphs.
        read_every: Steps between completion polls.
        pool: Pages to share with other engines of which one runs at a time; its size replaces budget_bytes.
        most_stride: Tokens of a row in a step, at most.
        kv_cache: Codes of 8 bits for keys and values, see `operations.LayerPages`; None: in the model's dtype.

    Raises:
        UserError: A schedule for another number of layers.
    """

    grows = True
    rounds_to_warm = 2  # the second step of a shape is captured

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        stop_ids: Collection[int],
        *,
        budget_bytes: int,
        max_rows: int,
        cumulative_logprob: bool = True,
        graphs: bool = True,
        read_every: int = READ_EVERY,
        pool: PagePool | None = None,
        most_stride: int = 1,
        kv_cache: Kind | None = None,
    ) -> None:
        if schedule.num_layers != decoder.num_layers:
            raise UserError(f"schedule for {schedule.num_layers} layers, model has {decoder.num_layers}")
        assert all(isinstance(block, FusedLayer) for block in decoder.blocks)
        self.decoder, self.schedule, self.stop_ids = decoder, schedule, frozenset(stop_ids)
        self.cumulative_logprob = cumulative_logprob
        self.graphs = graphs and decoder.device.type == "cuda"
        self.read_every, self.max_rows, self._most_rows = read_every, max_rows, max_rows
        self.stats = EngineStats()
        self.rows: list[Row] = []
        self.kv_cache = kv_cache
        self._cache_dtype = decoder.dtype if kv_cache is None else DTYPES[kv_cache]
        shape = decoder.kv_heads, decoder.head_dim, self._cache_dtype.itemsize
        self.token_bytes, self._page_bytes = token_bytes(*shape), page_bytes(*shape)
        self._budget_bytes = budget_bytes
        self._pool = PagePool(budget_bytes // self._page_bytes) if pool is None else pool
        self._pool.users.add(self)
        self._others: dict[Schedule, GpuEngine] = {}  # under other schedules
        self._run: Buffers | None = None
        self._prefill = Prefill(decoder, schedule)
        self._prefill_times = PrefillTimes(decoder.device)
        self._tickets = 0
        self._slots: dict[int, int] = {}  # ticket -> slot of rows in flight
        self._poll = CompletionPoll()
        self._variant: SamplingVariant | None = None
        self._seen_ended: list[Row] = []  # rows in flight of a step whose end has not been launched
        self.stepped = False
        self._steps_since_open = 0
        self._preempted: list[int] = []
        self._ended_early: Ended = []  # rows that have left before the step's own poll
        self._largest_row = 1  # pages
        self._stride, self._ahead = 1, read_every * most_stride  # tokens of a row: in the last step, and between polls
        self._estimate = AdmissionEstimate(schedule, decoder.context_length, self._ahead)

    @property
    def pages(self) -> int:
        """Pages of the cache, which all engines of the pool share."""
        return self._pool.pages

    def at(self, schedule: Schedule) -> GpuEngine:
        """See `EngineProtocol`. An engine is kept for each schedule, because its graphs cost time; all share their
        pages."""
        if schedule == self.schedule:
            return self
        if schedule not in self._others:
            self._others[schedule] = GpuEngine(
                self.decoder,
                schedule,
                self.stop_ids,
                budget_bytes=self._budget_bytes,
                max_rows=self._most_rows,
                cumulative_logprob=self.cumulative_logprob,
                graphs=self.graphs,
                read_every=self.read_every,
                pool=self._pool,
                kv_cache=self.kv_cache,
            )
        return self._others[schedule]

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Most bytes of pages that such a row holds at any time."""
        return self._page_bytes * self._estimate.row_pages(prompt_tokens, max_new_tokens)

    def shared_tokens(self, prefix: Sequence[int]) -> int:
        """Those of its whole pages."""
        return shared_tokens(len(_kept(prefix)))

    def open(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """Allocate for `rows` rows in flight; large enough buffers and graphs of an earlier run are kept."""
        assert not self.rows, "rows are in flight"
        run, rows = self._run, max(rows, self.max_rows)
        self._largest_row = min(self.pages, self._estimate.row_pages(prompt_tokens, max_new_tokens))
        prompt, most_new = rounded(prompt_tokens), rounded(max_new_tokens)
        if run is None or not run.fit(rows, prompt, most_new, self._pool):
            if run is not None:
                prompt, most_new = max(prompt, run.prompt), max(most_new, run.most_new)
            self._run = run = None  # freed before the new buffers are allocated
            self._run = run = allocate(
                self.decoder,
                self.schedule,
                self._pool,
                rows,
                prompt,
                most_new,
                dtype=self._cache_dtype,
                stop_tokens=len(self.stop_ids) + OWN_STOPS,
                window=self._ahead + 2,  # with the first token, and one that a row which has ended overwrites
                graphs=self.graphs,
            )
        run.free_slots = list(range(run.rows - 1, -1, -1))
        self._variant, self._steps_since_open = None, 0
        self._poll.cancel()
        self._estimate.reset()
        run.cache.most = 0
        self.stats.batches += 1

    def widen(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> bool:
        """See `EngineProtocol`: rows allocate pages as they grow, so that only the tables' sizes matter."""
        assert self._run is not None
        shape = max(rows, self.max_rows), rounded(prompt_tokens), rounded(max_new_tokens)
        if not self._run.fit(*shape, self._pool):
            return False
        pages = min(self.pages, self._estimate.row_pages(prompt_tokens, max_new_tokens))
        self._largest_row = max(self._largest_row, pages)
        return True

    def admission_estimate(self, requests: Sequence[Request], prefixes: Sequence[Sequence[int]] = ()) -> int:
        """How many of these requests, in their order, find pages now, as far as can be foreseen."""
        assert self._run is not None
        cache = self._run.cache
        return self._estimate.admissible(
            requests,
            [_kept(prefix) for prefix in prefixes] or [()] * len(requests),
            self.rows,
            lambda row: cache.held_by(self._slots[row.ticket]),
            cache.missing,
            cache.free,
        )

    def first_pass(self, requests: Sequence[Request], prefix: Sequence[int]) -> int:
        """How many of these requests, in their order, fit one pass: steps come between passes."""
        shared = len(_kept(prefix))
        return passes([len(request.prompt_ids) - shared for request in requests], shared)[0][1]

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """Run the prompts' passes and sample each row's first token; returns a ticket a request.

        Rows in flight make a step in the first pass, where there are pages for it: see `stepped`.

        Raises:
            MemoryError: More rows than `admission_estimate` found pages for.
        """
        began = time.perf_counter()
        self._prefill_times.begin()
        run = self._run
        assert run is not None, "open() comes first"
        assert len(requests) <= len(run.free_slots), "more rows than open() allocated for"
        newcomers = [self._begin(request) for request in requests]
        slots = [run.free_slots.pop() for _ in newcomers]
        lengths, shared = [len(row.request.prompt_ids) for row in newcomers], _kept(prefix)
        self._ensure_pages(lambda: run.cache.admit(slots, lengths, self._ahead, shared), least=0)
        run.state.begin(slots, newcomers)
        due = self._steps_since_open % self.read_every == 0
        # rows just admitted wait for the others of their batch
        ready = bool(self.rows) and all(row.position > 0 for row in self.rows)
        self.stepped = ready and (not due or self._grow())
        self._run_prompts(run, newcomers, slots, shared)
        if self.stepped:
            self._stride = 1  # riders have a token each, whatever the last launch had
            self._ended_early += self._after_step(run)
        for row, slot in zip(newcomers, slots, strict=True):
            self._slots[row.ticket], row.position = slot, 0
        self.rows += newcomers
        self._update_lanes()
        self._poll_if_due(run, stepped=self.stepped)
        self.stats.prefill_seconds += time.perf_counter() - began
        self._prefill_times.end()
        return [row.ticket for row in newcomers]

    def _run_prompts(self, run: Buffers, rows: Sequence[Row], slots: Sequence[int], prefix: tuple[int, ...]) -> None:
        """Prompts of rows through the layers, and each row's first token; a step of the rows in flight if `stepped`."""
        prompts, sources = distinct_prompts([row.request for row in rows])
        prefix_tokens = self._prefill.share(prefix, slots[0], run.cache)
        for first, end in passes([len(prompt) - len(prefix) for prompt in prompts], len(prefix)):
            members = [index for index, source in enumerate(sources) if first <= source < end]
            pass_sources = [sources[index] - first for index in members]
            pass_slots = [slots[index] for index in members]
            riders = None
            if self.stepped and first == 0:
                riders = run.steps.riders(rows_per_layer(input_depths(self.rows), self.schedule))
            logits, of_riders = self._prefill(prompts[first:end], pass_slots, pass_sources, run.cache, prefix, riders)
            if riders is not None:
                assert self._variant is not None
                if self._variant.masked:
                    self._set_masks()
                run.steps.sample(of_riders, self._variant)
            pass_rows = [rows[index] for index in members]
            run.state.set_masks(pass_slots, pass_rows)
            variant = run.state.variant(pass_rows, self.cumulative_logprob)
            run.state.sample(upload(pass_slots, logits.device), logits[upload(pass_sources, logits.device)], variant)
        computed = sum(map(len, prompts)) - len(prefix) * len(prompts)
        self.stats.prompt_tokens += computed + prefix_tokens
        self.stats.padded_prompt_tokens += computed + prefix_tokens
        self.stats.shared_prompt_tokens += sum(len(row.request.prompt_ids) for row in rows) - computed

    @torch.inference_mode()
    def step(self, *, last: bool = False) -> Ended:
        """Generate one token for every row in flight; returns the rows that the host has seen end.

        Rows that find no pages are preempted, see `take_preempted`.

        Raises:
            MemoryError: The oldest row alone finds no pages.
        """
        began = time.perf_counter()
        run = self._run
        assert run is not None and self.rows
        if self._steps_since_open % self.read_every == 0:
            self._ensure_pages(self._grow, least=1)
        ended: Ended = []
        if self.rows:  # else all have ended
            assert self._variant is not None
            self._launch(run, self._variant)
            ended = self._after_step(run)
            self._poll_if_due(run, stepped=True)
        self.stats.decode_seconds += time.perf_counter() - began
        return self._take_ended_early() + ended

    def _launch(self, run: Buffers, variant: SamplingVariant) -> None:
        per_layer = rows_per_layer(input_depths(self.rows), self.schedule)
        run.steps.run(per_layer, variant, self._set_masks if variant.masked else None)

    def _set_masks(self) -> None:
        """Before a step's end is launched: read the tokens that masked rows have sampled, and write their next masks.

        Rows that have ended keep their lanes until the step has been launched.
        """
        assert self._run is not None
        self._seen_ended += self._poll.finish(self.rows, self._run.state)
        self._run.state.set_masks([self._slots[row.ticket] for row in self.rows], self.rows)

    def _after_step(self, run: Buffers) -> Ended:
        """Read the poll in progress, while the GPU runs the step just launched; returns the rows that have ended."""
        for row in self.rows:
            row.position += self._stride
        seen, self._seen_ended = self._seen_ended, []
        self._steps_since_open += 1
        return self._finish(seen + self._poll.finish(self.rows, run.state))

    def _poll_if_due(self, run: Buffers, *, stepped: bool) -> None:
        """Start a poll every `read_every` steps, and with masked rows in flight whenever they have sampled a token."""
        masked = self._variant is not None and self._variant.masked
        if masked or (stepped and self._steps_since_open % self.read_every == 0):
            self._ended_early += self._finish(self._poll.finish(self.rows, run.state))
            self._start_poll(run)

    def _start_poll(self, run: Buffers) -> None:
        self._poll.start(run.state, self.rows, self._slots)

    def retire(self) -> Ended:
        """Remove the rows that the host has seen end; returns them."""
        return self._take_ended_early() + self._finish([row for row in self.rows if row.finish is not None])

    def _take_ended_early(self) -> Ended:
        """Rows that have left because other rows needed their pages."""
        ended, self._ended_early = self._ended_early, []
        return ended

    def cancel(self, tickets: Collection[int]) -> None:
        """Remove rows from flight, whatever they have generated; their slots and pages are free for the next rows."""
        rows = [row for row in self.rows if row.ticket in tickets]
        if rows:
            self._remove(rows)

    def generated(self) -> Mapping[int, Sequence[int]]:
        """The tokens so far of the rows in flight, by ticket: of watched rows those that the last poll has brought. The
        GPU is read, and waited for, for the others every `read_every` steps; between them there are none of these."""
        if not self.rows:
            return {}
        assert self._run is not None
        state = self._run.state
        watched = {row.ticket: row.tokens for row in self.rows if state.is_watched(row)}
        others = [row.ticket for row in self.rows if row.ticket not in watched]
        if not others or self._steps_since_open % self.read_every:
            return watched
        tokens = state.tokens_of([self._slots[ticket] for ticket in others])
        return watched | dict(zip(others, tokens, strict=True))

    def take_preempted(self) -> list[int]:
        """Tickets of rows preempted since the last call; they must be admitted again."""
        tickets, self._preempted = self._preempted, []
        return tickets

    def close(self) -> None:
        """Drop the rows in flight."""
        if self._estimate.ended_rows and not self.rows:  # a run that is complete
            self.max_rows = self._most_rows
        if self._run is not None:
            cache = self._run.cache
            self.stats.cache_bytes = max(self.stats.cache_bytes, cache.most * self._page_bytes)
            cache.release(range(self._run.rows))  # also of rows whose pass has failed
        self.rows, self._slots = [], {}
        self._preempted, self._ended_early, self._seen_ended = [], [], []
        self._poll.cancel()

    def release_memory(self) -> bool:
        """After memory has run out: free the cache and all buffers, and make the cache smaller for the rest of the
        process, but as large as the largest row needs. Returns whether it is smaller now."""
        before = self.pages
        self._pool.shrink(self._largest_row)
        self.max_rows = 1  # buffers for as many rows as the next run has, until one is complete
        if self.pages < before:
            sizes = gib(before * self._page_bytes), gib(self.pages * self._page_bytes)
            log.warning("GPU memory ran out: the cache shrinks from %s to %s for the rest of this process", *sizes)
        return self.pages < before

    def drop_pages(self) -> None:
        """Drop every reference to the pool's memory: buffers, graphs and the shared prefix."""
        self._run = None
        self._prefill.forget()

    def used_cache_bytes(self) -> int:
        """Bytes of the allocated pages."""
        run = self._run
        return 0 if run is None else (run.cache.count - run.cache.free) * self._page_bytes

    def take_stats(self) -> EngineStats:
        """Counts since the last call. Prefill takes the GPU's own time, since the host only launches it."""
        stats, self.stats = self.stats, EngineStats()
        prefill = self._prefill_times.take()
        if prefill is not None:
            total = stats.prefill_seconds + stats.decode_seconds
            stats.prefill_seconds = min(prefill, total)
            stats.decode_seconds = total - stats.prefill_seconds
        return stats

    def _begin(self, request: Request) -> Row:
        """A row before its first token, with a new ticket."""
        assert request.schedule in (None, self.schedule), "rows of this engine have one schedule"
        decoder, ticket = self.decoder, self._tickets
        self._tickets += 1
        return begin_row(
            request,
            ticket,
            context_length=decoder.context_length,
            vocab_size=decoder.vocab_size,
            stop_ids=self.stop_ids,
            schedule=self.schedule,
            prepares_masks=False,  # all rows' masks are computed together
        )

    def _grow(self) -> bool:
        """Allocate pages for the steps until the next poll; False if there are too few."""
        assert self._run is not None
        return self._run.cache.grow(
            [self._slots[row.ticket] for row in self.rows],
            [len(row.request.prompt_ids) for row in self.rows],
            # a row that has not been seen to end may be less far than its position, and reads up to its limit
            [min(row.position, max(0, row.limit - 2)) for row in self.rows],
            self._ahead,
        )

    def _ensure_pages(self, grow: Callable[[], bool], least: int) -> None:
        """Until `grow` succeeds: rows that have ended leave, then the youngest rows are preempted, all but `least`.

        Raises:
            MemoryError: There are too few pages even so.
        """
        if grow():
            return
        assert self._run is not None
        self._ended_early += self._finish(self._poll.finish(self.rows, self._run.state))
        while not grow():
            if len(self.rows) <= least:
                raise MemoryError("a row does not fit the pages that are left")
            self._preempted.append(self.rows[-1].ticket)
            self._remove(self.rows[-1:])

    def _update_lanes(self) -> None:
        """After rows have come or gone: give the steps their slots and sampling variant."""
        assert self._run is not None
        self._estimate.changed()
        self._run.steps.set_lanes([self._slots[row.ticket] for row in self.rows])
        if self.rows:
            self._variant = self._run.state.variant(self.rows, self.cumulative_logprob)

    def _finish(self, ended: Sequence[Row]) -> Ended:
        """Count rows that have ended, free their slots and pages; returns (ticket, completion) of each."""
        if not ended:
            return []
        count_ended(ended, self.stats)
        self._estimate.add_ended(ended)
        self._remove(ended)
        return [(row.ticket, row.completion(self.cumulative_logprob)) for row in ended]

    def _remove(self, rows: Sequence[Row]) -> None:
        """Take rows out of flight and free their slots and pages."""
        assert self._run is not None
        removed = {row.ticket for row in rows}
        slots = [self._slots.pop(ticket) for ticket in sorted(removed)]
        self._run.cache.release(slots)
        self._run.free_slots += slots
        self.rows = [row for row in self.rows if row.ticket not in removed]
        self._update_lanes()


def _kept(prefix: Sequence[int]) -> tuple[int, ...]:
    """The tokens of a prefix that are computed and stored once for all prompts."""
    return tuple(prefix[:PREFIX_TOKENS])
