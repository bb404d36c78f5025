"""Runs each decoder layer of a model in vLLM only for the tokens that the schedule assigns to the layer.

`forward` is replaced on the layer objects. The module tree stays as it is, so quantization and loading work as before.
The first layer of a forward pass plans which tokens run which layer. For each layer that some tokens skip, it also puts
attention metadata of the other tokens into the forward context, where vLLM's attention layers read it. If the pass is a
decode step for which graphs are captured, the first layer runs all layers by them, and the others return their input.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import PPMissingLayer

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from actors.vllm.graphs import DecodeGraphs, new_builder
from actors.vllm.plan import PassPlan, cut_metadata

CONTEXT_KEY = "skipdecode_plan"
# arguments of vLLM's own layers or of transformers' layers that have one value per token
TOKEN_ARGUMENTS = ("hidden_states", "residual", "positions", "position_ids", "position_embeddings")


class LayerSkipper:
    """Replaces the layers' `forward` in one worker's model, so that tokens can skip layers.

    Args:
        attention: index of decoder layer -> name of attention layer -> attention layer.
        prompt_lengths: function that returns the prompt lengths of all requests in a CommonAttentionMetadata.
    """

    def __init__(
        self,
        schedule: Schedule,
        attention: Mapping[int, Mapping[str, Any]],
        prompt_lengths: Callable[[Any], np.ndarray],
    ) -> None:
        self.attention = attention
        self.layers: dict[int, Any] = {}  # the wrapped layers, lowest layer first
        self.forwards: dict[int, tuple[Callable[..., Any], Sequence[str]]] = {}  # their own `forward`, with arguments
        self.graphs: DecodeGraphs | None = None  # None: decode steps run eagerly
        self.set_schedule(schedule)
        self._prompt_lengths = prompt_lengths
        self._common: Any = None  # CommonAttentionMetadata of the latest build
        self._built: dict[str, tuple[Any, Any]] = {}  # name of attention layer -> its builder and common metadata
        self._spare: dict[int, list[Any]] = {}  # id of vLLM's builder -> its copies, for subsets of tokens

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule from now on, and reset the counts."""
        self.ranks = schedule.ranks
        self.depths, self.prompt_depth = np.asarray(schedule.depths), len(schedule.prompt_layers)
        self.counts: Counter[str] = Counter()
        if self.graphs is not None:
            self._capture(self.graphs)

    def use_graphs(self, builders: Iterable[Any], config: Any, device: torch.device) -> str | None:
        """Run decode steps by CUDA graphs. Return why it is impossible, or None. builders: vLLM's metadata builders."""
        by_layer = {name: builder for builder in builders for name in builder.layer_names}
        graphs = DecodeGraphs(self.forwards, self.attention, by_layer, config, device)
        if (reason := graphs.unsupported()) is None:
            self._capture(graphs)
            self.graphs = graphs
        return reason

    def _capture(self, graphs: DecodeGraphs) -> None:
        graphs.capture({index: self.ranks[index] for index in self.attention}, self.depths.tolist())

    def watch(self, builder: Any) -> None:
        """Make a builder of attention metadata note the CommonAttentionMetadata that vLLM's runner passes to it."""
        if builder.requires_block_table_width:
            raise UserError(
                f"skipdecode: attention by {type(builder).__name__} is not supported: choose another attention backend"
            )
        build, update = builder.build, builder.update_block_table

        def note(common: Any) -> None:
            self._common = common
            self._built |= dict.fromkeys(builder.layer_names, (builder, common))

        def noting_build(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **options: Any) -> Any:
            note(common_attn_metadata)
            return build(common_prefix_len, common_attn_metadata, *args, **options)

        # for a further cache group with an equal KV cache spec, vLLM calls this instead of `build`
        def noting_update(metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
            note(replace(self._common, block_table_tensor=blk_table, slot_mapping=slot_mapping))
            return update(metadata, blk_table, slot_mapping)

        builder.build, builder.update_block_table = noting_build, noting_update

    def wrap(self, layers: Iterable[Any]) -> None:
        """Replace the `forward` of the layers that have not been dropped, so that tokens can skip layers."""
        self.layers = {index: layer for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)}
        for index, layer in self.layers.items():
            layer.forward = self._skipping(index, layer.forward)

    def _skipping(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `forward` that runs layer `index` only for the tokens that the plan assigns to the layer."""
        parameters = layer_arguments(index, forward)
        self.forwards[index] = forward, parameters
        is_first = index == min(self.layers)

        def run(*args: Any, **options: Any) -> Any:
            plan = self.plan()
            if plan is None or (plan.runs_all(self.ranks[index]) and not plan.by_graphs):
                return forward(*args, **options)
            values = dict(zip(parameters, args, strict=False)) | options
            hidden, residual = values["hidden_states"], values.get("residual")
            if plan.by_graphs and is_first:
                assert self.graphs is not None
                return self.graphs.run(plan, values)
            subset = None if plan.by_graphs else plan.subset(self.ranks[index])
            if subset is None:
                return (hidden, residual) if "residual" in parameters else hidden
            axis = hidden.dim() - 2  # dimension of the tokens; 1 in transformers' layers, where they form one row
            out = forward(**{name: _cut(name, value, subset.tokens, axis) for name, value in values.items()})
            if not isinstance(out, tuple):
                return hidden.index_copy(axis, subset.tokens, out)
            if out[1] is None:
                return hidden.index_copy(axis, subset.tokens, out[0]), residual
            if residual is None:  # lowest layer: for tokens that skip it, `hidden` becomes the residual
                residual, hidden = hidden.clone(), torch.zeros_like(hidden)
            hidden.index_copy_(axis, subset.tokens, out[0])
            residual.index_copy_(axis, subset.tokens, out[1])
            return hidden, residual

        return run

    def plan(self) -> PassPlan | None:
        """Return the plan of this pass, which the first layer makes. None: a pass without attention (profiling)."""
        context = get_forward_context()
        if CONTEXT_KEY not in context.additional_kwargs:
            context.additional_kwargs[CONTEXT_KEY] = self._prepare(context) if context.attn_metadata else None
        plan: PassPlan | None = context.additional_kwargs[CONTEXT_KEY]
        return plan

    def _prepare(self, context: Any) -> PassPlan:
        """Make the plan of a pass: by graphs, if they can run it, and else eagerly."""
        common, built, self._built = self._common, self._built, {}
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
        # the upper bounds are the exact lengths, because speculative decoding is refused
        ends = common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy().astype(np.int64)
        device = common.seq_lens.device
        plan = PassPlan(self.depths, self.prompt_depth, starts, ends, self._prompt_lengths(common), device)
        self.counts.update(passes=1, tokens=len(plan.depths), token_layers=int(plan.depths.sum()))
        plan.built = built
        plan.by_graphs = self.graphs is not None and self.graphs.takes(plan)
        if plan.by_graphs:
            self.counts["graph_passes"] += 1
        else:
            self.cut_metadata(plan, context)
        return plan

    def cut_metadata(self, plan: PassPlan, context: Any) -> None:
        """For each layer that some tokens skip, put attention metadata of the others into the forward context."""
        made: dict[tuple[int, int], tuple[Any, Any]] = {}  # (builder, subset) -> metadata, slots
        builds: Counter[int] = Counter()  # builder -> number of its builds in this pass
        for index, layers in self.attention.items():
            if plan.runs_all(self.ranks[index]) or (subset := plan.subset(self.ranks[index])) is None:
                continue
            for name in layers:
                builder, common = plan.built[name]
                key = id(builder), id(subset)
                if key not in made:
                    cut = cut_metadata(common, subset, plan.ends)
                    made[key] = self._spare_builder(builder, builds[id(builder)]).build(0, cut), cut.slot_mapping
                    builds[id(builder)] += 1
                context.attn_metadata[name] = made[key][0]
                if name in context.slot_mapping:
                    context.slot_mapping[name] = made[key][1]
        self.counts["builds"] += len(made)

    def _spare_builder(self, builder: Any, number: int) -> Any:
        """Return copy `number` of a builder. Each subset in a pass needs another copy, because builders keep state."""
        spare = self._spare.setdefault(id(builder), [])
        if len(spare) == number:
            spare.append(new_builder(builder, builder.vllm_config))
        return spare[number]


def layer_arguments(index: int, forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a decoder layer's `forward`. Raises UserError if it needs unknown ones."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(forward).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if "hidden_states" not in parameters or not required <= set(TOKEN_ARGUMENTS):
        raise UserError(
            f"skipdecode: layer {index} takes the arguments {', '.join(parameters)}; the supported ones are "
            f"{', '.join(TOKEN_ARGUMENTS)}"
        )
    return tuple(parameters)


def _cut(name: str, value: Any, tokens: Tensor, axis: int) -> Any:
    """Return the part of a layer's argument `name` that belongs to `tokens` (indices along dimension `axis`)."""
    if isinstance(value, tuple):  # cosines and sines
        return tuple(_cut(name, part, tokens, axis) for part in value)
    if not isinstance(value, Tensor):
        return value
    if name not in TOKEN_ARGUMENTS:
        raise UserError(f"skipdecode: a layer's argument {name} is a tensor, which is not supported")
    return value.index_select(axis, tokens)
