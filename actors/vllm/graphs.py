"""Runs decode steps by captured CUDA graphs, so that Python does not launch each kernel of each layer.

The rows of a decode step (one token of each request) are copied into static buffers, deepest row first. Then the rows
that run a layer are a prefix of the buffers, because a deeper row runs all layers that a shallower row runs. Layers in
sequence that the same rows run in every possible step form a segment. Each segment is captured once for each padded
number of rows, and a step replays each segment at the smallest captured number that holds the segment's rows.

So a captured prefix may end with rows that skip the segment. They compute like the others, which has no effect: they
write keys only at a position that no later token of their request reads in these layers, and the graph drops their
output, because it reads the segment's number of rows from the device. The metadata of attention depends only on the
number of rows, so all segments with the same padded number share it.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.worker.workspace import lock_workspace

from actors.vllm.plan import PassPlan, to_device

POSITIONS = ("positions", "position_ids")
STREAMS = ("hidden_states", "residual")
NO_SLOT = -1  # vLLM writes no keys of a token with this slot
# optional fields of CommonAttentionMetadata that a step by graphs may have
OPTIONAL = {"positions", "is_prefilling", "seq_lens_cpu_upper_bound", "req_idx"}


class CudaGraphs:
    """Captures functions as CUDA graphs that share a memory pool, and may be replayed in any order."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run a function, capture it, and return a function that replays it on the current stream."""
        run()  # kernels that compile or tune themselves do so before the capture
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def refreshed(self, captured: Any, built: Any) -> None:
        """Note that a builder has refreshed the metadata of graphs. A builder for CUDA does so in the same memory."""


BACKENDS: dict[str, Callable[[], Any]] = {"cuda": CudaGraphs}  # type of device -> backend; tests add one for CPUs


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that run for the same rows in every step: for rows with a depth above `rank`."""

    layers: tuple[int, ...]
    rank: int  # 0 if the layers run for every row


def segments(ranks: Mapping[int, int], depths: Iterable[int]) -> list[Segment]:
    """Return the segments of a schedule. Layers that no generated token runs are in none. ranks: layer -> rank."""
    levels = sorted(set(depths))
    found: list[tuple[int, list[int]]] = []  # number of depths at which the layers are skipped, layers
    for layer, rank in sorted(ranks.items()):
        level = bisect.bisect_right(levels, rank)
        if level == len(levels):
            continue
        if not found or found[-1][0] != level:
            found.append((level, []))
        found[-1][1].append(layer)
    return [Segment(tuple(layers), levels[level - 1] if level else 0) for level, layers in found]


def padded_sizes(rows: int) -> list[int]:
    """Return the numbers of rows for which segments are captured, ascending: at most 8, 16 or 32 rows apart."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, rows, 32)]
    return [*(size for size in sizes if size < rows), rows]


class DecodeGraphs:
    """Captures the segments of a schedule, and runs decode steps by them.

    Args:
        forwards: index of layer -> its `forward`, and the names of the arguments that it takes.
        attention: index of layer -> name of attention layer -> attention layer.
        builders: name of attention layer -> vLLM's builder of its metadata.
        config: vLLM's VllmConfig.
    """

    def __init__(
        self,
        forwards: Mapping[int, tuple[Callable[..., Any], Sequence[str]]],
        attention: Mapping[int, Mapping[str, Any]],
        builders: Mapping[str, Any],
        config: Any,
        device: torch.device,
    ) -> None:
        self.forwards, self.attention, self.device = forwards, attention, device
        self.builders = {id(builder): builder for builder in builders.values()}
        self._builder_of = {name: id(builder) for name, builder in builders.items()}
        self.backend = BACKENDS[device.type]()
        model, self.sizes = config.model_config, padded_sizes(config.scheduler_config.max_num_seqs)
        self.max_model_len, rows = model.max_model_len, self.sizes[-1]
        # builders make buffers for graphs only if vLLM captures graphs, which it does not where it runs eagerly
        self.config = copy.copy(config)
        self.config.compilation_config = copy.copy(config.compilation_config)
        self.config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        self.config.compilation_config.max_cudagraph_capture_size = rows
        self.config.compilation_config.cudagraph_capture_sizes = self.sizes

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        takes_residual = any("residual" in names for _, names in forwards.values())
        self.streams = {  # [rows, width]: what a layer takes and returns
            name: buffer(rows, model.get_hidden_size(), dtype=model.dtype)
            for name in STREAMS[: 2 if takes_residual else 1]
        }
        self.positions = buffer(rows, dtype=torch.int64)
        self.lengths = buffer(rows)  # of each row's sequence; 0: padding
        self.starts = buffer(rows + 1)  # index of each row's token: of padding, the number of rows
        self.numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.counts = buffer(len(forwards))  # number of rows of each segment
        self.tables, self.slots = {}, {}  # of each builder
        for key, builder in self.builders.items():
            self.tables[key] = buffer(rows, -(-self.max_model_len // builder.kv_cache_spec.block_size))
            self.slots[key] = buffer(rows, dtype=torch.int64)
        # padded size -> vLLM's builder -> copy of the builder for this size, and the metadata that graphs have captured
        self.metadata: dict[int, dict[int, tuple[Any, Any]]] = {}
        self.replays: dict[tuple[int, int], Callable[[], None]] = {}  # (segment, padded size) -> replay
        self.segments: list[Segment] = []
        self.deepest = 0

    def unsupported(self) -> str | None:
        """Return why this model or its attention cannot run by graphs; None if it can."""
        for builder in self.builders.values():
            kind = type(builder)
            if self.device.type == "cuda" and (
                kind.get_cudagraph_support(self.config, builder.kv_cache_spec) == AttentionCGSupport.NEVER
            ):
                return f"{kind.__name__} does not support them"
        for _, names in self.forwards.values():
            if not {*names} <= {*STREAMS, *POSITIONS}:
                return f"layers take the arguments {', '.join(names)}"
        return None

    @torch.inference_mode()
    def capture(self, ranks: Mapping[int, int], depths: Iterable[int]) -> None:
        """Capture the segments of a schedule instead of those captured before. ranks: layer -> rank."""
        depths = list(depths)
        self.segments, self.deepest, self.replays = segments(ranks, depths), max(depths), {}
        with graph_capture(self.device) if self.device.type == "cuda" else nullcontext():
            for size in reversed(self.sizes):  # the largest first: the others then fit into its memory
                self._pad(size, size)
                self.lengths[:size].fill_(1)
                for slots in self.slots.values():
                    slots[:size].fill_(NO_SLOT)
                made = self.metadata.setdefault(size, {})
                for key, builder in self.builders.items():
                    spare = made[key][0] if key in made else new_builder(builder, self.config)
                    common = self._common(key, size, np.ones(size, np.int32), size)
                    made[key] = spare, spare.build_for_cudagraph_capture(common)
                for number, segment in enumerate(self.segments):
                    self.replays[number, size] = self.backend.capture(self._runner(number, segment, size))
        if self.device.type == "cuda":
            lock_workspace()  # the graphs read and write it

    def takes(self, plan: PassPlan) -> bool:
        """Return whether a pass is a decode step that the graphs can run: one token of each request, none too deep."""
        rows = len(plan.ends)
        return (
            rows == len(plan.depths)
            and rows <= self.sizes[-1]
            and int(plan.levels[-1]) <= self.deepest
            and all(common.causal is True and _sets_only_known_fields(common) for _, common in plan.built.values())
        )

    def run(self, plan: PassPlan, values: Mapping[str, Any]) -> Any:
        """Run all layers of a decode step. Return what the last layer returns. values: arguments of the first layer."""
        assert values.keys() <= {*STREAMS, *POSITIONS}, f"layers get {', '.join(values)}"
        rows = len(plan.depths)
        order = np.argsort(-plan.depths, kind="stable")
        counts = [int((plan.depths > one.rank).sum()) for one in self.segments]
        sizes = [self._size(count) if count else 0 for count in counts]
        parts = (order, np.argsort(order), counts)
        packed = to_device(np.concatenate(parts).astype(np.int32), self.device)
        rows_of, back, on_device = packed.split([len(part) for part in parts])
        self.counts[: len(counts)].copy_(on_device)
        self._fill(plan, values, rows_of)
        ends = plan.ends[order].astype(np.int32)
        for size in {*sizes} - {0}:
            for key, (builder, captured) in self.metadata[size].items():
                common = self._common(key, size, ends, rows)
                self.backend.refreshed(captured, builder.build(0, common))
        for number, size in enumerate(sizes):
            if size:
                self.replays[number, size]()
        out = tuple(stream.index_select(0, back) for stream in self.streams.values())
        return out if len(out) > 1 else out[0]

    def _fill(self, plan: PassPlan, values: Mapping[str, Any], rows_of: Tensor) -> None:
        """Copy the inputs of a step into the buffers. rows_of: index in the batch of each row of the buffers."""
        rows, commons = len(rows_of), {id(builder): common for builder, common in plan.built.values()}
        self._pad(self._size(rows), rows)
        for name in POSITIONS:
            if values.get(name) is not None:
                torch.index_select(values[name], 0, rows_of, out=self.positions[:rows])
        *_, last = self.streams.values()
        # with a residual, the first layer adds hidden states of 0, as if a layer before it had returned these
        torch.index_select(values["hidden_states"], 0, rows_of, out=last[:rows])
        if len(self.streams) > 1:
            self.streams["hidden_states"][:rows].zero_()
        anyone = next(iter(commons.values()))
        torch.index_select(anyone.seq_lens[:rows], 0, rows_of, out=self.lengths[:rows])
        for key, common in commons.items():
            table = common.block_table_tensor
            width = min(table.shape[1], self.tables[key].shape[1])
            self.tables[key][:rows, :width] = table[:rows, :width].index_select(0, rows_of)
            torch.index_select(common.slot_mapping[:rows], 0, rows_of, out=self.slots[key][:rows])

    def _size(self, rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, rows)]

    def _pad(self, size: int, rows: int) -> None:
        """Make buffer rows `rows` to `size` padding: requests without a token, keys and a sequence."""
        torch.clamp(self.numbers[: size + 1], max=rows, out=self.starts[: size + 1])
        self.lengths[rows:size].zero_()
        for slots in self.slots.values():
            slots[rows:size].fill_(NO_SLOT)
        for stream in self.streams.values():  # values of earlier steps would grow with every step
            stream[rows:size].zero_()

    def _common(self, key: int, size: int, ends: np.ndarray, rows: int) -> CommonAttentionMetadata:
        """Return the metadata of a step whose first `rows` buffer rows have tokens, for the first `size` rows."""
        lengths = np.zeros(size, np.int32)
        lengths[: min(size, rows)] = ends[:size]
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: size + 1],
            query_start_loc_cpu=torch.arange(size + 1, dtype=torch.int32).clamp_(max=rows),
            seq_lens=self.lengths[:size],
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            max_seq_len=self.max_model_len,
            block_table_tensor=self.tables[key][:size],
            slot_mapping=self.slots[key][:size],
            positions=self.positions[:size],
            is_prefilling=torch.zeros(size, dtype=torch.bool),
        )

    def _runner(self, number: int, segment: Segment, size: int) -> Callable[[], None]:
        """Return a function that runs a segment for the first `size` buffer rows."""
        names = [name for index in segment.layers for name in self.attention[index]]
        metadata = {name: self.metadata[size][self._builder_of[name]][1] for name in names}
        slots = {name: self.slots[self._builder_of[name]][:size] for name in names}
        static = {name: stream[:size] for name, stream in self.streams.items()}
        places = dict.fromkeys(POSITIONS, self.positions[:size])

        def run() -> None:
            # layers may change their inputs, and rows that skip the segment must not change
            state = {name: stream.clone() for name, stream in static.items()} if segment.rank else static
            with set_forward_context(metadata, self.config, num_tokens=size, slot_mapping=slots):
                for index in segment.layers:
                    forward, arguments = self.forwards[index]
                    out = forward(**{name: value for name, value in (state | places).items() if name in arguments})
                    state = dict(zip(static, out if isinstance(out, tuple) else (out,), strict=False))
            mask = (self.numbers[:size] < self.counts[number]).unsqueeze(1)
            for name, value in state.items():
                if segment.rank:
                    torch.where(mask, value, static[name], out=static[name])
                else:
                    static[name].copy_(value)

        return run


def new_builder(builder: Any, config: Any) -> Any:
    """Return a metadata builder like `builder` for a VllmConfig. A builder keeps state from its last build."""
    with set_current_vllm_config(config):
        new = type(builder)(builder.kv_cache_spec, builder.layer_names, config, builder.device)
    if hasattr(builder, "set_workspace_buffer"):
        new.set_workspace_buffer(builder._get_workspace_buffer())
    return new


def _sets_only_known_fields(common: CommonAttentionMetadata) -> bool:
    """Return whether a pass has no optional metadata but `OPTIONAL`. Private fields are caches."""
    others = (item.name for item in fields(common) if item.default is None and item.name not in OPTIONAL)
    return all(name.startswith("_") or getattr(common, name) is None for name in others)
