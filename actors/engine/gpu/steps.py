"""A decode step over lanes, and CUDA graphs of it: one a step where all lanes run the same layers, else one a layer.

The youngest row has the last lane, so the rows of a layer are always the last lanes of one buffer: a layer's graph of
so many lanes serves every batch. Lane counts are rounded up to buckets; a lane whose row does not run the layer writes
nothing, as the kernels see from its depth.
Shapes: B lanes, E hidden size, V vocabulary size, L layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.operations import Lanes, StepTables
from actors.engine.gpu.pages import PagedCache, upload
from actors.engine.gpu.prompts import Riders
from actors.engine.gpu.splits import Splits, parallel_programs, planned_splits
from actors.engine.gpu.state import DeviceRows
from actors.engine.gpu.variant import SamplingVariant
from actors.engine.schedules.schedule import Schedule
from actors.engine.working_memory import GRAPH_BYTES, NODE_BYTES

LAYER_KERNELS = 10  # of a layer's graph, about
MOST_STEP_KERNELS = GRAPH_BYTES * 3 // 4 // NODE_BYTES  # of all graphs of whole steps; the rest is for those of layers
FINE = 128  # lanes from which on buckets are 32 apart


def buckets(most: int) -> list[int]:
    """Lane counts for which there are graphs: powers of two, above 16 also the midpoints, above 128 every 32, and the
    largest count."""
    counts = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(FINE, most, 32)}
    return [*sorted(count for count in counts if count < most), most]


class Steps:
    """Runs steps of one decoder over one cache and one state, which receives a step's results.

    Args:
        decoder: Its layers are `FusedLayer`s.
        schedule: Layers of each position.
        cache: Pages of the rows.
        state: Rows by slot.
        lanes: Most lanes of a step.
        graphs: Whether to capture the steps as CUDA graphs.
        graph_share: One in so many of the kernels that graphs of whole steps may have.
    """

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        cache: PagedCache,
        state: DeviceRows,
        lanes: int,
        *,
        graphs: bool,
        graph_share: int = 1,
    ) -> None:
        self._most_kernels = MOST_STEP_KERNELS // graph_share
        self.decoder, self.schedule, self.cache, self.state = decoder, schedule, cache, state
        self.buckets = buckets(lanes)
        self.lanes = lanes
        device = decoder.device
        self._slots = torch.full((lanes,), state.rows, dtype=torch.int64, device=device)
        self._lane_depths = torch.zeros(lanes, dtype=torch.int32, device=device)
        self._positions = torch.zeros(lanes, dtype=torch.int64, device=device)
        config = decoder.model.config
        self._hidden = torch.zeros(lanes, config.hidden_size, dtype=decoder.dtype, device=device)
        self._tables = tables_of(decoder, schedule, cache)
        self._rotary = None
        if self._tables.rotary is not None:
            size = self._tables.rotary[0].shape[1]
            self._rotary = self._hidden.new_zeros(lanes, size), self._hidden.new_zeros(lanes, size)
        self._programs = parallel_programs(device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._use_graphs = graphs
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        # of its own: graphs that share a capture stream share cuBLAS workspaces, which go with the first one's pool
        self._capture_stream = torch.cuda.Stream(device) if graphs else None
        self._warm: set[Hashable] = set()  # work that has run once, without a graph
        self._step_kernels = 0  # of graphs of whole steps; further shapes of a step are composed of graphs of layers

    @property
    def _lanes(self) -> Lanes:
        return Lanes(self._slots, self._positions, self._lane_depths, self._rotary)

    def bucket(self, count: int) -> int:
        """The smallest bucket for so many lanes."""
        return self.buckets[bisect_left(self.buckets, count)]

    def set_lanes(self, slots: Sequence[int]) -> None:
        """Give the rows in flight their lanes. slots: of the rows, oldest first."""
        padded = [self.state.rows] * (self.lanes - len(slots)) + list(slots)
        self._slots.copy_(upload(padded, self._slots.device))

    def run(
        self, rows_per_layer: Sequence[int], variant: SamplingVariant, before_end: Callable[[], None] | None = None
    ) -> None:
        """Generate one token for all lanes.

        Args:
            rows_per_layer: How many of the youngest rows each layer runs for.
            variant: How to sample.
            before_end: Called once the layers have been launched, before what follows them is.
        """
        counts = [self.bucket(count) if count else 0 for count in rows_per_layer]
        most = max(counts)
        alike = all(count in (0, most) for count in counts)
        ends = variant if before_end is None else None
        whole = ("step", tuple(counts), ends)
        if self._use_graphs and alike and self._has_step_graph(whole):
            self._graphed(whole, lambda: self._whole(counts, most, ends))
            if ends is not None:
                return
        else:
            self._graphed(("begin", most), lambda: self._begin(most))
            for layer, count in enumerate(counts):
                if count:
                    self._graphed(("layer", layer, count), partial(self._layer, layer, count))
        if before_end is not None:
            before_end()
        self._graphed(("end", most, variant), lambda: self._end(most, variant))

    def riders(self, rows_per_layer: Sequence[int]) -> Riders:
        """All lanes as riders of a prefill pass, in place of `run`. rows_per_layer: see `run`."""
        counts = [self.bucket(count) if count else 0 for count in rows_per_layer]
        most = max(counts)
        self._begin(most)
        splits = [self._splits(layer, max(1, count)) for layer, count in enumerate(counts)]
        return Riders(self._hidden[-most:], self._lanes.youngest(most), counts, splits)

    def sample(self, logits: Tensor, variant: SamplingVariant) -> None:
        """Sample the next tokens of the youngest B lanes from their logits [B, V]."""
        self.state.sample(self._slots[-len(logits) :], logits, variant)

    def _has_step_graph(self, whole: tuple[str, tuple[int, ...], SamplingVariant | None]) -> bool:
        """Whether a step of this shape has run before and has a graph of its own."""
        if whole in self._warm:
            return True
        kernels = LAYER_KERNELS * sum(count > 0 for count in whole[1])
        if self._step_kernels + kernels <= self._most_kernels:
            self._step_kernels += kernels
            self._warm.add(whole)
        return False

    def _whole(self, counts: Sequence[int], most: int, variant: SamplingVariant | None) -> None:
        """A step; without its end if there is no variant."""
        self._begin(most)
        for layer, count in enumerate(counts):
            if count:
                self._layer(layer, count)
        if variant is not None:
            self._end(most, variant)

    def _begin(self, count: int) -> None:
        """Hidden states, positions, depths and rope of the youngest `count` lanes, from their tokens."""
        lanes = self._lanes.youngest(count)
        hidden, state = self._hidden[-count:], self.state
        state.operations.begin(lanes, state, self._tables, hidden)
        if self._tables.token_embeddings is None:
            inside = lanes.positions.clamp(max=self._tables.longest - 1)
            embedded, _ = self.decoder.embed(state.last[lanes.slots][:, None], inside[:, None])
            hidden.copy_(embedded[:, 0])

    def _layer(self, layer: int, count: int) -> None:
        block = self.decoder.blocks[layer]
        assert isinstance(block, FusedLayer)
        lanes = self._lanes.youngest(count)
        splits = self._splits(layer, count)
        block.step(self._hidden[-count:], lanes, self.cache, self.schedule.ranks[layer], splits)

    def _splits(self, layer: int, count: int) -> Splits:
        block = self.decoder.blocks[layer]
        assert isinstance(block, FusedLayer)
        return planned_splits(count, block.kv_heads, self._tables.longest, self._programs)

    def _end(self, count: int, variant: SamplingVariant) -> None:
        self.sample(self.decoder.logits(self._hidden[-count:]), variant)

    def _graphed(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the graph of this work. The first time the work runs without one, which compiles kernels and allocates
        workspaces; the second time it is captured."""
        if not self._use_graphs or key not in self._warm:
            self._warm.add(key)
            work()
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            # a capture runs nothing; work of other threads is not captured
            stream = self._capture_stream
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                work()
            self._graphs[key] = graph
        graph.replay()


@torch.inference_mode()
def tables_of(decoder: Decoder, schedule: Schedule, cache: PagedCache) -> StepTables:
    """Tables for rows as long as the cache's longest."""
    device = decoder.device
    depths = [schedule.depth(position) for position in range(cache.max_new_tokens + 1)]
    longest = min(decoder.context_length, cache.longest)
    by_token, by_position = decoder.family.embeddings(decoder.model) or (None, None)
    here = torch.arange(longest, device=device)[None]
    _, (first, *_) = decoder.embed(torch.zeros_like(here), here)  # layers have the same rope, or none
    rotary = None if first is None else (first[0][0].contiguous(), first[1][0].contiguous())
    return StepTables(torch.tensor(depths, dtype=torch.int32, device=device), longest, by_token, by_position, rotary)
