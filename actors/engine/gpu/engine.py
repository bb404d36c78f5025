"""The engine on a GPU: the same rows, admitted, stepped and retired, but the device goes ahead of the host.

    step   the device draws tokens and sees which rows end; the host has only launched it
    every `read_every` steps   the host asks which rows have ended, and reads the answer when the next step is under way

Rows take pages as they grow (`pages`), so that more of them are in flight than would fit at full length; where pages
run out, the youngest rows are put back to be run again from their prompt, which draws the same numbers.
Rows that ask for more than the device can do (penalties, choices, stop strings, log-probabilities of each token) are
drawn by the host, as on a CPU, over the same layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine, distinct
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.looks import Looks
from actors.engine.gpu.pages import PagedCache, PagePool, page_bytes, row_pages, upload
from actors.engine.gpu.prefill import Prefill, groups
from actors.engine.gpu.state import DeviceRows, Tail, on_device
from actors.engine.gpu.steps import Steps
from actors.engine.row import Row
from actors.engine.schedule import Schedule
from actors.engine.types import Completion, EngineStats, Request
from actors.engine.working_memory import PREFIX_TOKENS

READ_EVERY = 4
OWN_STOPS = 8  # stop tokens of a row's own, beside the model's, that the device looks for; of more the host does
LEAST_ROOM = 256  # tokens of prompts and of answers: buffers and graphs that are there serve all that is shorter
FEW_ENDED = 16  # rows, before the average length of which says little


@dataclass
class _Run:
    """Buffers, and the graphs over them, of rows with at most such prompts and new tokens; vacant: places of no row."""

    rows: int
    prompt: int
    most_new: int
    cache: PagedCache
    state: DeviceRows
    steps: Steps
    vacant: list[int] = field(default_factory=list)

    def fits(self, rows: int, prompt: int, most_new: int) -> bool:
        """Whether they are large enough."""
        return rows <= self.rows and prompt <= self.prompt and most_new <= self.most_new


class GpuEngine(Engine):
    """As `Engine`, over a decoder whose layers are `FusedLayer`s. budget_bytes: of the cache's pages, taken once.

    graphs: whether CUDA graphs hold the steps. read_every: steps after which the host looks which rows have ended.
    pool: whose pages it takes, if engines that are used one after the other share them.
    """

    grows = True
    rounds_to_warm = 2  # a shape's second step is captured

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
    ) -> None:
        super().__init__(decoder, schedule, stop_ids, cumulative_logprob=cumulative_logprob)
        assert all(isinstance(block, FusedLayer) for block in decoder.blocks)
        self.graphs = graphs and decoder.device.type == "cuda"
        self.read_every, self.max_rows = read_every, max_rows
        self._page_bytes = page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
        self.pages = self._budget = budget_bytes // self._page_bytes
        self._pool = PagePool() if pool is None else pool
        self._pool.users.add(self)
        self._others: dict[Schedule, GpuEngine] = {}  # under other schedules
        self._run: _Run | None = None
        self._prefill = Prefill(decoder, schedule)
        self._slots: dict[int, int] = {}  # of rows in flight, by ticket
        self._looks = Looks()
        self._tail: Tail | None = None
        self._hosted = False  # whether the host draws
        self._since_look = 0
        self._ended_tokens, self._ended_rows = 0, 0  # of this run
        self._put_back: list[int] = []
        self._noticed: list[tuple[int, Completion]] = []
        self._least, self._most_rows = 1, max_rows
        self._passes: list[tuple[Any, Any]] = []  # over prompts, from where to where
        self._fit: int | None = None  # what `fitting` has said, until rows come or go

    def at(self, schedule: Schedule) -> Engine:
        """As `Engine.at`, but always the same one for a schedule, as its graphs cost time; all share their pages."""
        if schedule == self.schedule:
            return self
        if schedule not in self._others:
            self._others[schedule] = GpuEngine(
                self.decoder,
                schedule,
                self.stop_ids,
                budget_bytes=self._budget * self._page_bytes,
                max_rows=self._most_rows,
                cumulative_logprob=self.cumulative_logprob,
                graphs=self.graphs,
                read_every=self.read_every,
                pool=self._pool,
            )
        return self._others[schedule]

    def row_bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Most bytes of pages that such a row holds at any one time."""
        return self._page_bytes * self._row_pages(prompt_tokens, max_new_tokens)

    def _row_pages(self, prompt_tokens: int, new_tokens: int) -> int:
        """Most pages of such a row, with those that it takes until the host has seen it end."""
        return row_pages(self.schedule, prompt_tokens, new_tokens + 2 * self.read_every, self.read_every)

    def open(self, rows: int, prompt_slots: int, max_new_tokens: int) -> None:
        """Make room for `rows` rows at once; buffers and graphs of an earlier run are kept where they are large
        enough."""
        assert not self.rows, "rows are in flight"
        decoder, run = self.decoder, self._run
        rows = max(rows, self.max_rows)
        self._least = min(self._budget, self._row_pages(prompt_slots, max_new_tokens))
        prompt_slots, max_new_tokens = (max(LEAST_ROOM, _power(one)) for one in (prompt_slots, max_new_tokens))
        held = run is not None and run.cache.count == self.pages and run.cache.keys is self._pool.keys
        if run is None or not held or not run.fits(rows, prompt_slots, max_new_tokens):
            if run is not None:
                prompt_slots, max_new_tokens = max(prompt_slots, run.prompt), max(max_new_tokens, run.most_new)
            self._run = run = None  # what is too small goes before the new comes
            cache = PagedCache(
                self.schedule,
                rows,
                self.pages,
                prompt_slots,
                max_new_tokens,
                kv_heads=decoder.kv_heads,
                head_dim=decoder.head_dim,
                dtype=decoder.dtype,
                device=decoder.device,
                pool=self._pool,
            )
            operations = decoder.blocks[0].operations
            state = DeviceRows(rows, max_new_tokens, len(self.stop_ids) + OWN_STOPS, decoder.device, operations)
            steps = Steps(decoder, self.schedule, cache, state, rows, graphs=self.graphs)
            self._run = run = _Run(rows, prompt_slots, max_new_tokens, cache, state, steps)
        run.vacant = list(range(run.rows - 1, -1, -1))
        self._hosted, self._tail, self._since_look = False, None, 0
        self._looks.drop()
        self._ended_tokens = self._ended_rows = 0
        self._fit = None
        run.cache.most = 0
        self.stats.batches += 1

    def fitting(self, requests: Sequence[Request]) -> int:
        """How many of these, in their order, find pages now, while the rows in flight grow as long as those that have
        ended were on average, or as they may if few have."""
        assert self._run is not None
        if self._fit is None:
            self._fit = self._fitting(requests, self._run.cache)
        return self._fit

    def one_pass(self, requests: Sequence[Request], prefix: Sequence[int]) -> int:
        """How many of these, in their order, go through the layers together: steps come between passes."""
        before = min(len(prefix), PREFIX_TOKENS)
        return groups([len(one.prompt_ids) - before for one in requests], before)[0][1]

    def _fitting(self, requests: Sequence[Request], cache: PagedCache) -> int:
        few = self._ended_rows < FEW_ENDED
        mean = 0 if few else -(-self._ended_tokens // self._ended_rows)

        def expected(request: Request, limit: int, drawn: int) -> int:
            new = limit if few else min(limit, max(mean, drawn + self.read_every))
            return self._row_pages(len(request.prompt_ids), new)

        room = cache.free
        for row in self.rows:
            held = cache.held(self._slots[row.ticket])
            room -= max(0, expected(row.request, row.limit, row.position + 1) - held)
        for count, request in enumerate(requests):
            room -= expected(request, self.new_tokens_limit(request), 0)
            if room < 0:
                return count
        return len(requests)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        """As `Engine.admit`; the prompts lie one behind another, a piece's worth at a time."""
        began, mark = time.perf_counter(), self._mark()
        run = self._run
        assert run is not None, "open() comes first"
        prefix = prefix[:PREFIX_TOKENS]
        assert len(requests) <= len(run.vacant), "more rows than open() made room for"
        newcomers = [self._begin(request) for request in requests]
        slots = [run.vacant.pop() for _ in newcomers]
        lengths = [len(row.request.prompt_ids) for row in newcomers]
        self._make_room(lambda: run.cache.grow(slots, lengths, [0] * len(slots), self.read_every), least=0)
        if self._hosted or not all(on_device(row, run.state) for row in newcomers):
            self._to_host()
        run.state.begin(slots, newcomers)
        prompts, sources = distinct(requests)
        fresh = self._prefill.share(prefix)
        for first, end in groups([len(prompt) - len(prefix) for prompt in prompts], len(prefix)):
            mine = [place for place, source in enumerate(sources) if first <= source < end]
            own_sources = [sources[one] - first for one in mine]
            logits = self._prefill(prompts[first:end], [slots[one] for one in mine], own_sources, run.cache, prefix)
            logits = logits[upload(own_sources, logits.device)]
            drawn = [newcomers[one] for one in mine]
            index = upload([slots[one] for one in mine], logits.device)
            if self._hosted:
                self._draw(drawn, logits)
                self._tell(drawn, index)
            else:
                run.state.take(index, logits, Tail.of(drawn, self.cumulative_logprob))
        for row, slot in zip(newcomers, slots, strict=True):
            self._slots[row.ticket] = slot
            if not self._hosted:
                row.position = 0
        self.rows += newcomers
        self._lay_out()
        own = sum(map(len, prompts)) - len(prefix) * len(prompts)
        self.stats.prompt_tokens += own + fresh
        self.stats.padded_prompt_tokens += own + fresh
        self.stats.shared_prompt_tokens += sum(lengths) - own
        self.stats.prefill_seconds += time.perf_counter() - began
        if mark is not None:
            self._passes.append((mark, self._mark()))
        return [row.ticket for row in newcomers]

    @torch.inference_mode()
    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        """One token further for every row in flight; (ticket, completion) of the rows that the host has seen end, and
        `take_put_back` tells those that found no pages."""
        began = time.perf_counter()
        run = self._run
        assert run is not None and self.rows
        if self._since_look % self.read_every == 0 or self._hosted:
            self._make_room(self._grow, least=1)
        rows = self.rows
        if not rows:  # all had ended
            return self._noticed_before()
        logits = run.steps.run(self._rows_per_layer(self._depths()), None if self._hosted else self._tail)
        if self._hosted:
            assert logits is not None
            self._draw(rows, logits[-len(rows) :])
            self._tell(rows, torch.tensor([self._slots[row.ticket] for row in rows], device=logits.device))
            ended = self._leave([row for row in rows if row.finish is not None])
        else:
            for row in rows:
                row.position += 1
            ended = self._leave(self._looks.read(rows, run.state))  # the device is at this step meanwhile
            self._since_look += 1
            if self._since_look % self.read_every == 0:
                self._looks.ask(run.state, self._slots)
        self.stats.decode_seconds += time.perf_counter() - began
        return self._noticed_before() + ended

    def retire(self) -> list[tuple[int, Completion]]:
        """Rows that have ended at once, as far as the host knows of them."""
        return self._noticed_before() + self._leave([row for row in self.rows if row.finish is not None])

    def _noticed_before(self) -> list[tuple[int, Completion]]:
        """Rows that have left because their pages were asked for."""
        ended, self._noticed = self._noticed, []
        return ended

    def take_put_back(self) -> list[int]:
        """Tickets of the rows that have found no pages since this was asked: they must be admitted again."""
        tickets, self._put_back = self._put_back, []
        return tickets

    def close(self) -> None:
        """Let rows in flight go."""
        if self._ended_rows and not self.rows:  # a run that has come to its end
            self.pages, self.max_rows = self._budget, self._most_rows
        if self._run is not None:
            cache = self._run.cache
            self.stats.cache_bytes = max(self.stats.cache_bytes, cache.most * self._page_bytes)
            cache.release(list(self._slots.values()))
        self.rows, self._slots, self._put_back, self._noticed = [], {}, [], []
        self._looks.drop()

    def release(self) -> None:
        """After memory has run out: give back the cache and all that hangs on it, and take half of it until a run has
        come to its end, but as much as the largest row needs."""
        self.pages = max(self._least, self.pages // 2)
        self.max_rows = 1
        self._pool.drop()

    def let_go(self) -> None:
        """Of all that refers to pages, as they are to go, and of the prompts' common beginning."""
        self._run = None
        self._prefill.forget()

    def take_stats(self) -> EngineStats:
        """As `Engine.take_stats`. The host only launches a pass over prompts: its time is the device's own."""
        stats = super().take_stats()
        if self._passes:
            torch.cuda.synchronize(self.decoder.device)
            own = sum(began.elapsed_time(ended) for began, ended in self._passes) / 1000
            both = stats.prefill_seconds + stats.decode_seconds
            stats.prefill_seconds = min(own, both)
            stats.decode_seconds = both - stats.prefill_seconds
            self._passes = []
        return stats

    def _mark(self) -> Any:
        """Where the device is now, once it is there."""
        if self.decoder.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _grow(self) -> bool:
        """Pages for the steps until the host looks again."""
        assert self._run is not None
        return self._run.cache.grow(
            [self._slots[row.ticket] for row in self.rows],
            [len(row.request.prompt_ids) for row in self.rows],
            [row.position for row in self.rows],
            self.read_every,
        )

    def _make_room(self, grow: Callable[[], bool], least: int) -> None:
        """Until there are pages enough: rows that have ended leave, then the youngest are put back, all but `least`.

        Raises MemoryError if that is not enough, as it may be where more newcomers come than were said to fit.
        """
        if grow():
            return
        assert self._run is not None
        self._noticed += self._leave(self._looks.read(self.rows, self._run.state))
        while not grow():
            if len(self.rows) <= least:
                raise MemoryError("a row does not fit the pages that are left")
            self._put_back.append(self.rows[-1].ticket)
            self._remove(self.rows[-1:])

    def _lay_out(self) -> None:
        """Tell the steps which rows are in flight, and what they ask of a step's end."""
        assert self._run is not None
        self._fit = None
        self._run.steps.place([self._slots[row.ticket] for row in self.rows])
        if self.rows and not self._hosted:
            self._tail = Tail.of(self.rows, self.cumulative_logprob)

    def _leave(self, ended: Sequence[Row]) -> list[tuple[int, Completion]]:
        """Rows that have ended give back their places and pages; (ticket, completion) of each."""
        if not ended:
            return []
        for row in ended:
            steps = len(row.tokens) - 1
            self.stats.decode_steps += steps
            self.stats.idle_row_steps += max(0, row.position - steps)
            self.stats.layer_steps += self.schedule.layer_steps(steps)
            self.stats.full_layer_steps += self.schedule.num_layers * steps
            self.stats.generated_tokens += len(row.tokens)
            self._ended_tokens += len(row.tokens)
        self._ended_rows += len(ended)
        self._remove(ended)
        return [(row.ticket, row.completion(self.cumulative_logprob)) for row in ended]

    def _remove(self, rows: Sequence[Row]) -> None:
        assert self._run is not None
        gone = {row.ticket for row in rows}
        slots = [self._slots.pop(ticket) for ticket in sorted(gone)]
        self._run.cache.release(slots)
        self._run.vacant += slots
        self.rows = [row for row in self.rows if row.ticket not in gone]
        self._lay_out()

    def _to_host(self) -> None:
        """From here on the host draws: it learns what the device has drawn for the rows in flight."""
        if self._hosted:
            return
        self._hosted = True
        self._looks.drop()
        assert self._run is not None
        state = self._run.state
        told = [one.tolist() for one in (state.counts, state.tokens, state.logprobs)] if self.rows else []
        for row in self.rows:
            slot = self._slots[row.ticket]
            counts, tokens, logprobs = told
            row.logprob, row.position = logprobs[slot], counts[slot] - 1
            for token in tokens[slot][: counts[slot]]:
                row.tokens.append(token)
                row.sampling.add(token)
                row.finish = row.finish or row.reason_to_end()

    def _tell(self, rows: Sequence[Row], index: torch.Tensor) -> None:
        """The device what the host has drawn."""
        assert self._run is not None
        state = self._run.state
        device = index.device
        state.last[index] = torch.tensor([row.tokens[-1] for row in rows], device=device)
        positions = torch.tensor([row.position for row in rows], device=device)
        state.positions[index] = positions
        state.places[index] = positions + torch.tensor([len(row.request.prompt_ids) for row in rows], device=device)
        state.ended[index] = torch.tensor([row.finish is not None for row in rows], device=device)


def _power(count: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, count - 1).bit_length()
