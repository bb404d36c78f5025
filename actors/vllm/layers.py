"""Runs each decoder layer of a model in vLLM only for the tokens that the schedule assigns to the layer.

`forward` is replaced on the layer objects. The module tree stays as it is, so quantization and loading work as before.
The first layer of a forward pass plans which tokens run which layer. For each layer that some tokens skip, it also puts
attention metadata of the other tokens into the forward context, where vLLM's attention layers read it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule
from actors.vllm.plan import PassPlan, cut_metadata

CONTEXT_KEY = "skipdecode_plan"
# for debugging: POISON is in cache slots that no layer may read; an output above POISONED shows that a layer did
POISON, POISONED = 1e36, 1e18
# arguments of vLLM's own layers or of transformers' layers that have one value per token
TOKEN_ARGUMENTS = ("hidden_states", "residual", "positions", "position_ids", "position_embeddings")


class LayerSkipper:
    """Replaces the layers' `forward` in one worker's model, so that tokens can skip layers.

    Args:
        attention: index of decoder layer -> name of attention layer -> attention layer.
        prompt_lengths: function that returns the prompt lengths of all requests in a CommonAttentionMetadata.
        poison: for debugging: write huge values into cache slots that a layer may not read, and fail if it does.
    """

    def __init__(
        self,
        schedule: Schedule,
        attention: Mapping[int, Mapping[str, Any]],
        prompt_lengths: Callable[[Any], np.ndarray],
        *,
        poison: bool = False,
    ) -> None:
        if poison and any(layer.dtype == torch.float16 for layers in attention.values() for layer in layers.values()):
            raise UserError("skipdecode: poison: true does not work in float16: use float32 or bfloat16")
        self.attention, self.poison = attention, poison
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
        """Replace the layers' `forward`, so that tokens can skip layers."""
        for index, layer in enumerate(layers):
            layer.forward = self._skipping(index, layer.forward)

    def _skipping(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `forward` that runs layer `index` only for the tokens that the plan assigns to the layer."""
        parameters = layer_arguments(index, forward)

        def run(*args: Any, **options: Any) -> Any:
            plan = self.plan()
            if plan is None or plan.runs_all(self.ranks[index]):
                return forward(*args, **options)
            values = dict(zip(parameters, args, strict=False)) | options
            hidden, residual = values["hidden_states"], values.get("residual")
            subset = plan.subset(self.ranks[index])
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

        def checked(*args: Any, **options: Any) -> Any:
            out = run(*args, **options)
            values = out if isinstance(out, tuple) else (out,)
            if not all(value is None or bool((value.abs() < POISONED).all()) for value in values):
                raise RuntimeError(f"skipdecode: layer {index} read the cache slot of a token that skips this layer")
            return out

        return checked if self.poison else run

    def plan(self) -> PassPlan | None:
        """Return the plan of this pass, which the first layer makes. None: a pass without attention (profiling)."""
        context = get_forward_context()
        if CONTEXT_KEY not in context.additional_kwargs:
            context.additional_kwargs[CONTEXT_KEY] = self._prepare(context) if context.attn_metadata else None
        plan: PassPlan | None = context.additional_kwargs[CONTEXT_KEY]
        return plan

    def _prepare(self, context: Any) -> PassPlan:
        """Make the plan of a pass. For each layer that some tokens skip, build attention metadata of the others."""
        common, built, self._built = self._common, self._built, {}
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy().astype(np.int64)
        # the upper bounds are the exact lengths, because speculative decoding is refused
        ends = common.seq_lens_cpu_upper_bound[: common.num_reqs].numpy().astype(np.int64)
        device = common.seq_lens.device
        plan = PassPlan(self.depths, self.prompt_depth, starts, ends, self._prompt_lengths(common), device)
        made: dict[tuple[int, int], tuple[Any, Any]] = {}  # (builder, subset) -> metadata, slots
        builds: Counter[int] = Counter()  # builder -> number of its builds in this pass
        for index, layers in self.attention.items():
            if plan.runs_all(self.ranks[index]):
                continue
            subset = plan.subset(self.ranks[index])
            for name, layer in layers.items():
                builder, common = built[name]
                if self.poison:
                    holes = torch.from_numpy(plan.depths <= self.ranks[index]).to(device)
                    _poison(layer, common.slot_mapping[: len(holes)][holes])
                if subset is None:
                    continue
                key = id(builder), id(subset)
                if key not in made:
                    cut = cut_metadata(common, subset, ends)
                    made[key] = self._spare_builder(builder, builds[id(builder)]).build(0, cut), cut.slot_mapping
                    builds[id(builder)] += 1
                context.attn_metadata[name] = made[key][0]
                if name in context.slot_mapping:
                    context.slot_mapping[name] = made[key][1]
        self.counts.update(passes=1, tokens=len(plan.depths), token_layers=int(plan.depths.sum()), builds=len(made))
        return plan

    def _spare_builder(self, builder: Any, number: int) -> Any:
        """Return copy `number` of a builder. Each subset in a pass needs another copy, because builders keep state."""
        spare = self._spare.setdefault(id(builder), [])
        if len(spare) == number:
            with set_current_vllm_config(builder.vllm_config):
                new = type(builder)(builder.kv_cache_spec, builder.layer_names, builder.vllm_config, builder.device)
            if hasattr(builder, "set_workspace_buffer"):
                new.set_workspace_buffer(builder._get_workspace_buffer())
            spare.append(new)
        return spare[number]


def layer_arguments(index: int, forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a decoder layer's `forward`. Raises UserError if it needs unknown ones."""
    parameters = inspect.signature(forward).parameters
    required = {
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
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


def _poison(layer: Any, slots: Tensor) -> None:
    """Write zero keys and huge values into some slots of an attention layer's cache.

    NaN would not work: kernels multiply the values of masked slots by 0, and NaN * 0 is NaN.
    """
    shape = len(slots), layer.num_kv_heads
    key = torch.zeros((*shape, layer.head_size), dtype=layer.dtype, device=slots.device)
    value = torch.full((*shape, layer.head_size_v), POISON, dtype=layer.dtype, device=slots.device)
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
