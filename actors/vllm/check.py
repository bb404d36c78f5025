"""Checks a worker at its start: compares the attention layers with plain attention (no cache or batch).

Some prompts are answered alone and then together. The check stores the keys and values that each attention layer gets.
In every forward pass, torch computes attention from these keys and values in float32, and the check compares the result
with the layer's output. Both get the same inputs, so rounding in earlier layers does not matter. The check also fails
if a layer does not run for exactly the tokens that the schedule assigns to it. A decode step that CUDA graphs can run
runs by them and then eagerly; the outputs of the last layer must agree, and the check's attention reads keys and values
that the graphs may have damaged.
"""

from __future__ import annotations

import copy
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.forward_context import get_forward_context
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.errors import UserError
from actors.vllm.layers import LayerSkipper
from actors.vllm.plan import PassPlan

LONGEST_PROMPT, NEW_TOKENS = 200, 24
# largest allowed error of an attention output, as a fraction of the mean norm of the values that attention averages.
# Rounding causes errors of 0.000001 in float32 and 0.01 in 16 bits; a wrong key causes an error of about 1
LIMITS = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.05}
LIMIT_OF_8_BITS = 0.5  # largest allowed error with a KV cache of 8 bits
log = logging.getLogger(__name__)

# prompt length -> position -> key and value. No two prompts are equally long, so the length identifies a sequence
Seen = dict[int, dict[int, tuple[Tensor, Tensor]]]


@torch.inference_mode()
def check_answers(worker: Any, skipper: LayerSkipper, cache_config: Any) -> None:
    """Answer up to three prompts, each alone and then all together. Raises UserError if the check fails."""
    config = worker.vllm_config
    longest = min(LONGEST_PROMPT, config.model_config.max_model_len - NEW_TOKENS)
    if longest < 1:
        raise UserError(
            f"skipdecode: the self-check needs max_model_len above {NEW_TOKENS}: raise it, or set self_check: false"
        )
    chance, vocabulary = random.Random(0), config.model_config.get_vocab_size()
    lengths = sorted({max(1, longest // part) for part in (64, 5, 1)})
    prompts = [[chance.randrange(vocabulary) for _ in range(length)] for length in lengths]
    attention = [(index, layer) for index, layers in skipper.attention.items() for layer in layers.values()]
    depths = skipper.depths
    # compress the depth curve to the length of the check's answers
    skipper.depths = depths[np.linspace(0, len(depths) - 1, NEW_TOKENS - 1).round().astype(int)]
    forwards = [(layer, layer.forward) for layer in skipper.layers.values()]
    errors, graph_errors, problem = [0.0], [0.0], None
    if skipper.graphs is not None:
        _run_both_ways(skipper, graph_errors)
    try:
        for group in (*([prompt] for prompt in prompts), prompts):
            seen: list[Seen] = [defaultdict(dict) for _ in attention]
            for of_layer, (index, layer) in zip(seen, attention, strict=True):
                layer.forward = _watched(layer, index, skipper, of_layer, errors)
            _answer(worker, cache_config, group)
            for of_layer, (index, layer) in zip(seen, attention, strict=True):
                if any(sorted(of_layer[len(one)]) != _positions(skipper, index, len(one)) for one in group):
                    problem = f"{layer.layer_name} does not run for exactly the tokens of the schedule"
    finally:
        for _, layer in attention:
            layer.__dict__.pop("forward", None)
        for layer, forward in forwards:
            layer.forward = forward
        skipper.depths = depths
        skipper.counts.clear()
    worst, limit = float(np.max(errors)), LIMITS[config.model_config.dtype]
    if config.cache_config.cache_dtype.startswith("fp8"):
        limit = LIMIT_OF_8_BITS
    if not worst <= limit:  # also true for NaN
        problem = f"attention differs from plain attention by {worst:.3g} of the mean norm of values, more than {limit}"
    # the rounding of all layers adds up in the output of the last one
    if problem is None and not (worst_of_graphs := float(np.max(graph_errors))) <= 4 * limit:
        problem = (
            f"decode steps by CUDA graphs differ from eager ones by {worst_of_graphs:.3g} of the output's norm "
            "(graphs: false avoids them)"
        )
    if problem is not None:
        raise UserError(
            f"skipdecode: the self-check failed: {problem}; this model or attention backend is not supported. "
            "Set self_check: false to skip the check"
        )
    log.info("skipdecode: self-check passed: attention differs by %.2g of the mean norm of values", worst)


def _run_both_ways(skipper: LayerSkipper, errors: list[float]) -> None:
    """Make the first and last layer run each decode step by graphs and then eagerly, and add the differences."""
    first, last = skipper.layers[min(skipper.layers)], skipper.layers[max(skipper.layers)]
    run_first, run_last = first.forward, last.forward
    outputs: dict[PassPlan, Any] = {}

    def by_graphs_and_eagerly(*args: Any, **options: Any) -> Any:
        plan = skipper.plan()
        if plan is not None and plan.by_graphs:
            outputs[plan] = run_first(*args, **options)
            plan.by_graphs = False
            skipper.cut_metadata(plan, get_forward_context())
        return run_first(*args, **options)

    def compared(*args: Any, **options: Any) -> Any:
        out = run_last(*args, **options)
        if (plan := skipper.plan()) in outputs:
            got, wanted = (one if isinstance(one, Tensor) else one[0] + one[1] for one in (outputs.pop(plan), out))
            error = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1))[wanted.isfinite().all(-1)]  # see `_watched`
            errors.append(float(error.max()) if len(error) else 0.0)
        return out

    first.forward, last.forward = by_graphs_and_eagerly, compared


def _positions(skipper: LayerSkipper, index: int, prompt_tokens: int) -> list[int]:
    """Return the positions at which the schedule runs layer `index` in a sequence with this prompt length."""
    depths = [skipper.prompt_depth] * prompt_tokens + skipper.depths.tolist()
    return [position for position, depth in enumerate(depths) if skipper.ranks[index] < depth]


def _answer(worker: Any, cache_config: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Answer prompts with vLLM's configured scheduler class. Each prompt begins one step after the previous one."""
    config = copy.copy(worker.vllm_config)
    config.kv_events_config = None
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.enable_prefix_caching = False
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache_config, config)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=generate_scheduler_kv_cache_config([cache_config]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    waiting = [Request(str(number), list(prompt), params, None) for number, prompt in enumerate(prompts)]
    while waiting or scheduler.has_unfinished_requests():
        if waiting:
            scheduler.add_request(waiting.pop(0))
        scheduled = scheduler.schedule()
        output = worker.execute_model(scheduled)
        if output is None:
            output = worker.sample_tokens(None)
        if hasattr(output, "get_output"):  # async scheduling
            output = output.get_output()
        scheduler.update_from_output(scheduled, output)
    worker.execute_model(scheduler.schedule())  # tells the runner that the requests have ended


def _watched(layer: Any, index: int, skipper: LayerSkipper, seen: Seen, errors: list[float]) -> Callable[..., Tensor]:
    """Return a `forward` for `layer` that adds keys and values to `seen`, and each pass's largest error to `errors`."""
    impl = layer.impl
    if getattr(impl, "sinks", None) is not None or getattr(impl, "alibi_slopes", None) is not None:
        raise UserError(
            f"skipdecode: {layer.layer_name} has sinks or ALiBi, which the self-check cannot compute; "
            "set self_check: false to skip the check"
        )
    forward = type(layer).forward
    heads = layer.num_kv_heads

    def watched(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        out: Tensor = forward(layer, query, key, value, *args, **options)
        plan = skipper.plan()
        assert plan is not None
        tokens = np.flatnonzero(plan.depths > skipper.ranks[index])
        for owner in np.unique(plan.owners[tokens]):
            own = np.flatnonzero(plan.owners[tokens] == owner)
            positions = plan.positions[tokens][own]
            known = seen[int(plan.prompts[owner])]
            keys = key[own].view(len(own), heads, layer.head_size).float()
            values = value[own].view(len(own), heads, layer.head_size_v).float()
            known |= dict(zip(positions.tolist(), zip(keys, values, strict=True), strict=True))
            places = sorted(known)
            distance = torch.from_numpy(positions[:, None] - np.array(places))  # [queries, keys]
            hidden = (distance < 0) | (distance >= (layer.sliding_window or math.inf))
            queries = query[own].view(len(own), heads, -1, layer.head_size).float()  # [tokens, KV heads, group, size]
            keys, values = (torch.stack([known[place][part] for place in places]) for part in (0, 1))
            scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * impl.scale
            if cap := getattr(impl, "logits_soft_cap", None) or getattr(impl, "softcap", None):
                scores = cap * (scores / cap).tanh()
            weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
            wanted = torch.einsum("hgqk,khd->qhgd", weights, values)
            size = torch.einsum("hgqk,kh->qhg", weights, values.norm(dim=-1))
            got = out.view(len(out), -1)[own].float().view(wanted.shape)
            # leave out NaN and infinity in `wanted`: damaged weights cause them, and such rows get an error anyway
            error = ((got - wanted).norm(dim=-1) / size)[wanted.isfinite().all(-1)]
            errors.append(float(error.max()) if len(error) else 0.0)
        return out

    return watched
