"""Exact mode on the paged engine: a round, drafts and their verification, is launched as a step is.

    draft    γ steps of the drafting layers over the rows' own pages, from a copy of the rows' state
    verify   one pass of all layers over γ + 1 lanes a row: its last token and its drafts, one lane each
    accept   sampled lane by lane as in γ + 1 steps, up to the first token that differs from its draft

All on the GPU, in graphs, as steps are: the host learns at its next poll how far each row has come. Lanes of one row
share its pages: each layer writes the keys and values of all lanes before any of them attends, and no lane attends
beyond its own position, so that what rejected drafts have left needs no cut. Where more rows are in flight than a round
has lanes for, steps are those of `GpuEngine`: there the products are bound by arithmetic, and drafts do not pay. With
fewer rows the steps between two polls are rounds or plain ones: `RoundChoice` takes the kind that has been faster.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.exact.engine import Drafter
from actors.engine.gpu.buffers import Buffers
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.operations import Lanes
from actors.engine.gpu.pages import PagedCache
from actors.engine.gpu.round_choice import RoundChoice
from actors.engine.gpu.state import DeviceRows
from actors.engine.gpu.steps import Steps, buckets
from actors.engine.gpu.variant import SamplingVariant
from actors.engine.protocol import Ended
from actors.engine.row import Row
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import EngineStats

DRAFTS = 3  # of a row in a round
GRAPH_SHARE = 8  # kernels of a round's graphs, of those of steps
COPIED = ("last", "positions", "generated", "counts", "ended")  # of the rows' state: what a draft changes
SHARED = ("limits", "least", "stops", "keys", "top_k", "temperature", "top_p", "min_p")


class DraftSteps(Steps):
    """Steps of the drafting layers, which add to each row's columns the token that they sample."""

    columns: Tensor  # int64 [R + 1, S]: the last tokens of each row

    def _end(self, count: int, variant: SamplingVariant) -> None:
        super()._end(count, variant)
        self.columns.copy_(torch.cat((self.columns[:, 1:], self.state.last[:, None]), dim=1))


class VerifySteps(Steps):
    """A pass of all layers over S lanes of each row, and the acceptance of what they were drafted as.

    Args:
        rows: Most rows of a pass.
        columns: int64 [R + 1, S]: the last token of each row, and its drafts.
        counters: int64 [3], to which drafted, accepted and verified tokens are added.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        cache: PagedCache,
        state: DeviceRows,
        rows: int,
        columns: Tensor,
        counters: Tensor,
        *,
        graphs: bool,
    ) -> None:
        self._columns, self._counters, self._width = columns, counters, columns.shape[1]
        super().__init__(decoder, schedule, cache, state, rows * self._width, graphs=graphs, graph_share=GRAPH_SHARE)
        self.buckets = [count * self._width for count in buckets(rows)]
        device = decoder.device
        self._offsets = torch.arange(self._width, device=device)
        # the inputs of a lane lie in a state of their own, S places a row
        self._inputs = DeviceRows((state.rows + 1) * self._width - 1, 1, 1, 1, device, state.operations)
        self._places = torch.zeros(self.lanes, dtype=torch.int64, device=device)

    def set_lanes(self, slots: Sequence[int]) -> None:
        """See `Steps`; slots: of the rows."""
        super().set_lanes([slot for slot in slots for _ in range(self._width)])
        offsets = self._offsets.repeat(self.lanes // self._width)
        self._places.copy_(self._slots * self._width + offsets)

    def _begin(self, count: int) -> None:
        state, inputs, shape = self.state, self._inputs, (self.state.rows + 1, self._width)
        inputs.last.view(shape).copy_(self._columns)
        positions = (state.positions[:, None] + self._offsets).clamp(max=self._tables.longest - 1)
        inputs.positions.view(shape).copy_(positions)
        inputs.generated.view(shape).copy_(state.generated[:, None] + self._offsets)
        # a draft behind which no token may follow has no page, and none is read for it
        beyond = state.counts[:, None] + self._offsets >= state.limits[:, None]
        inputs.ended.view(shape).copy_(state.ended[:, None] | beyond)
        lanes = self._lanes.youngest(count)
        places = Lanes(self._places[-count:], lanes.positions, lanes.depths, lanes.rotary)
        hidden = self._hidden[-count:]
        state.operations.begin(places, inputs, self._tables, hidden)
        if self._tables.token_embeddings is None:
            inside = lanes.positions.clamp(max=self._tables.longest - 1)
            embedded, _ = self.decoder.embed(inputs.last[places.slots][:, None], inside[:, None])
            hidden.copy_(embedded[:, 0])

    def _end(self, count: int, variant: SamplingVariant) -> None:
        state, width = self.state, self._width
        logits = self.decoder.logits(self._hidden[-count:]).view(count // width, width, -1)
        slots = self._slots[-count:].view(-1, width)[:, 0]
        going, runs = ~state.ended[slots], self._lane_depths[-count:].view(-1, width) > 0
        verified = (runs & going[:, None]).sum()
        accepted = torch.zeros_like(verified)
        drafted = verified - going.sum()
        for number in range(width):
            # a row that goes no further is replaced by the one that has ended
            state.sample(torch.where(going, slots, state.rows), logits[:, number].contiguous(), variant)
            if number + 1 < width:
                same = state.last[slots] == self._columns[slots, number + 1]
                going = going & same & runs[:, number + 1]
                accepted = accepted + going.sum()
                going = going & ~state.ended[slots]
        self._counters += torch.stack((drafted, accepted, verified))


class Rounds:
    """Rounds over the buffers of one run."""

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        drafter: Drafter,
        run: Buffers,
        count: int,
        counters: Tensor,
        *,
        graphs: bool,
    ) -> None:
        """count: drafts of a row. counters: see `VerifySteps`."""
        self.run, self.width = run, count + 1
        self.most_rows = max(1, run.rows // self.width)  # as many lanes as steps have: no more memory than theirs
        state, device = run.state, decoder.device
        self._columns = torch.zeros(state.rows + 1, self.width, dtype=torch.int64, device=device)
        stops, vocabulary = state.stops.shape[1], state.vocabulary
        self._guess = DeviceRows(state.rows, run.most_new, stops, vocabulary, device, state.operations)
        for name in SHARED:
            setattr(self._guess, name, getattr(state, name))
        layers = replace(drafter.schedule, depths=(drafter.schedule.mean_layers,), speedup=None, prompt="full")
        self._ranks = [rank < layers.depths[0] for rank in layers.ranks]
        self._drafts = DraftSteps(
            drafter.decoder,
            layers,
            run.cache,
            self._guess,
            self.most_rows,
            graphs=graphs,
            graph_share=GRAPH_SHARE,
        )
        self._drafts.columns = self._columns
        self._verify = VerifySteps(
            decoder, schedule, run.cache, state, self.most_rows, self._columns, counters, graphs=graphs
        )

    def set_lanes(self, slots: Sequence[int]) -> None:
        """Give the rows their lanes, if a round has so many. slots: oldest first."""
        if len(slots) <= self.most_rows:
            self._drafts.set_lanes(slots)
            self._verify.set_lanes(slots)

    def __call__(self, rows: int, variant: SamplingVariant) -> None:
        """Launch a round of so many rows, at most `most_rows`."""
        state = self.run.state
        for name in COPIED:
            getattr(self._guess, name).copy_(getattr(state, name))
        self._columns[:, -1] = state.last
        drawn = variant.of_drafts()
        for _ in range(self.width - 1):
            self._drafts.run([rows * runs for runs in self._ranks], drawn)
        self._verify.run([rows * self.width] * len(self._ranks), variant)


class _Window:
    """The steps between two polls, of which the second is read behind the next window's first step.

    kinds: of the steps since the last poll began: whether they were rounds. A step that rides in a prefill has none.
    """

    def __init__(self) -> None:
        self.kinds: set[bool] = set()
        self._ended: tuple[int, set[bool]] = (0, set())  # rows and kinds of the window whose poll is in progress
        self._counts: dict[int, int] = {}  # tokens by ticket at the last poll
        self._read = 0.0  # when it was read

    def end(self, rows: int) -> None:
        """A poll has begun."""
        self._ended, self.kinds = (rows, self.kinds), set()

    def polled(self, counts: Mapping[int, int], choice: RoundChoice) -> None:
        """The poll has been read: counts by ticket of the rows that go on. Prefills in between count for both kinds."""
        now, (rows, kinds) = time.perf_counter(), self._ended
        made = [count - self._counts[ticket] for ticket, count in counts.items() if ticket in self._counts]
        if made and len(kinds) == 1:
            choice.measured(rows, kinds.pop(), sum(made) / len(made), now - self._read)
        self._counts, self._read = dict(counts), now


class GpuExactEngine(GpuEngine):
    """`GpuEngine` at full depth, whose steps are rounds where few rows are in flight.

    Args:
        decoder: The model, after `prepare_for_gpu`.
        schedule: Full depth.
        stop_ids: Tokens that end a row.
        drafter: Its decoder after `prepare_for_gpu`.
        count: Drafts of a row in a round.
        choice: Between rounds and plain steps; None: rounds wherever there are lanes for them.
        how: See `GpuEngine`.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        stop_ids: Collection[int],
        *,
        drafter: Drafter,
        count: int = DRAFTS,
        choice: RoundChoice | None = None,
        **how: Any,
    ) -> None:
        assert schedule.is_full_depth and count > 0
        super().__init__(decoder, schedule, stop_ids, most_stride=count + 1, **how)
        self.drafter, self._count = drafter, count
        self._rounds: Rounds | None = None
        self._counters = torch.zeros(3, dtype=torch.int64, device=decoder.device)
        self._since = 0  # tokens of a row, at most, since the last poll began
        self._choice, self._drafting = choice, True
        self._window = _Window()

    def open(self, rows: int, prompt_tokens: int, max_new_tokens: int) -> None:
        """See `GpuEngine`."""
        super().open(rows, prompt_tokens, max_new_tokens)
        assert self._run is not None
        if self._rounds is None or self._rounds.run is not self._run:
            self._rounds = None  # freed before the new one is allocated
            given = self.decoder, self.schedule, self.drafter, self._run, self._count, self._counters
            self._rounds = Rounds(*given, graphs=self.graphs)
        self._since, self._window = 0, _Window()

    def drop_pages(self) -> None:
        """See `GpuEngine`."""
        self._rounds = None
        super().drop_pages()

    def take_stats(self) -> EngineStats:
        """See `GpuEngine`; waits for the GPU."""
        stats = super().take_stats()
        stats.drafted_tokens, stats.accepted_tokens, stats.verified_tokens = self._counters.tolist()
        self._counters.zero_()
        return stats

    def _launch(self, run: Buffers, variant: SamplingVariant) -> None:
        rounds = self._rounds
        if self._choice is not None and self._steps_since_open % self.read_every == 0:
            self._drafting = self._choice.rounds(len(self.rows))
        # a mask holds for a row's next token alone
        if rounds is None or len(self.rows) > rounds.most_rows or variant.masked or not self._drafting:
            # what a mask costs says nothing about plain steps: of two kinds, the window is not measured
            self._window.kinds |= {True, False} if variant.masked else {False}
            self._stride = 1
            super()._launch(run, variant)
            return
        self._window.kinds.add(True)
        self._stride = rounds.width
        rounds(len(self.rows), variant)

    def _after_step(self, run: Buffers) -> Ended:
        self._since += self._stride
        polled = self._steps_since_open > 0 and self._steps_since_open % self.read_every == 0
        ended = super()._after_step(run)
        if polled and self._choice is not None:
            self._window.polled(self._poll.counts, self._choice)
        for row in self.rows:
            if row.ticket in self._poll.counts:
                row.position = min(row.position, self._poll.counts[row.ticket] - 1 + self._since)
        self._poll.counts = {}
        return ended

    def _start_poll(self, run: Buffers) -> None:
        super()._start_poll(run)
        self._since = 0
        self._window.end(len(self.rows))

    def _finish(self, ended: Sequence[Row]) -> Ended:
        for row in ended:
            row.position = len(row.tokens) - 1  # it was how far it could have come
        return super()._finish(ended)

    def _update_lanes(self) -> None:
        super()._update_lanes()
        if self._rounds is not None:
            self._rounds.set_lanes([self._slots[row.ticket] for row in self.rows])
