"""Checks each attention layer when a worker starts, against plain attention without a cache, batch or metadata.

Some prompts are answered alone and together. In every forward pass, each attention layer's output for a token is
compared with attention that torch computes in float32 from the keys and values that the layer received for the earlier
tokens of the same sequence. Each layer must also have run for exactly the tokens that the schedule says. The comparison
uses the layer's own inputs, so that rounding in earlier layers does not matter.
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
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.errors import UserError
from actors.vllm.layers import LayerSkipper

LONGEST_PROMPT, NEW_TOKENS = 200, 24
# limits of an attention output's error, divided by the mean norm of the values that it averages: rounding causes
# 0.000001 in float32 and 0.01 in 16 bits, a wrong key about 1
LIMITS = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.05}
LIMIT_OF_8_BITS = 0.5  # limit for a cache with 8 bits
log = logging.getLogger(__name__)

# prompt length, which identifies a sequence because all lengths differ -> position -> key and value
Seen = dict[int, dict[int, tuple[Tensor, Tensor]]]


@torch.inference_mode()
def check_answers(worker: Any, skipper: LayerSkipper, cache_config: Any) -> None:
    """Answer up to three prompts, each alone and then all together. Raises UserError if an attention layer's output
    differs from plain attention, or if a layer runs for other tokens than the schedule says.
    """
    config = worker.vllm_config
    longest = min(LONGEST_PROMPT, config.model_config.max_model_len - NEW_TOKENS)
    if longest < 1:
        raise UserError(f"skipdecode: max_model_len must be above {NEW_TOKENS} for the self-check; self_check: false")
    chance, vocabulary = random.Random(0), config.model_config.get_vocab_size()
    lengths = sorted({max(1, longest // part) for part in (64, 5, 1)})
    prompts = [[chance.randrange(vocabulary) for _ in range(length)] for length in lengths]
    attention = [(index, layer) for index, layers in skipper.attention.items() for layer in layers.values()]
    depths = skipper.depths
    # the depth curve, compressed to the length of an answer
    skipper.depths = depths[np.linspace(0, len(depths) - 1, NEW_TOKENS - 1).round().astype(int)]
    errors, problem = [0.0], None
    try:
        for group in (*([prompt] for prompt in prompts), prompts):
            seen: list[Seen] = [defaultdict(dict) for _ in attention]
            for of_layer, (index, layer) in zip(seen, attention, strict=True):
                layer.forward = _watched(layer, index, skipper, of_layer, errors)
            _answer(worker, cache_config, group)
            for of_layer, (index, layer) in zip(seen, attention, strict=True):
                if any(sorted(of_layer[len(one)]) != _positions(skipper, index, len(one)) for one in group):
                    problem = f"{layer.layer_name} runs for other tokens than those of the schedule"
    finally:
        for _, layer in attention:
            layer.__dict__.pop("forward", None)
        skipper.depths = depths
        skipper.counts.clear()
    worst, limit = float(np.max(errors)), LIMITS[config.model_config.dtype]
    if config.cache_config.cache_dtype.startswith("fp8"):
        limit = LIMIT_OF_8_BITS
    if not worst <= limit:  # also true for NaN
        problem = f"attention differs from its definition by {worst:.3g} of its values, by rounding at most {limit}"
    if problem is not None:
        raise UserError(
            f"skipdecode: the self-check failed: {problem}: this model or attention backend is not supported; "
            "self_check: false runs it nonetheless"
        )
    log.info("skipdecode: self-check passed: attention differs by %.2g of its values", worst)


def _positions(skipper: LayerSkipper, index: int, prompt_tokens: int) -> list[int]:
    """Return the positions of a sequence at which the schedule runs a layer."""
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
    worker.execute_model(scheduler.schedule())  # tells the runner which requests have ended


def _watched(layer: Any, index: int, skipper: LayerSkipper, seen: Seen, errors: list[float]) -> Callable[..., Tensor]:
    """Return a `forward` of an attention layer that collects keys and values, and the largest error of each pass.

    All prompts have different lengths: a sequence is identified by its prompt's length.
    """
    impl = layer.impl
    if getattr(impl, "sinks", None) is not None or getattr(impl, "alibi_slopes", None) is not None:
        raise UserError(
            f"skipdecode: {layer.layer_name} has sinks or ALiBi, which the self-check does not know; "
            "self_check: false runs it nonetheless"
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
            queries = query[own].view(len(own), heads, -1, layer.head_size).float()  # [T, KV heads, group, D]
            keys, values = (torch.stack([known[place][part] for place in places]) for part in (0, 1))
            scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * impl.scale
            if cap := getattr(impl, "logits_soft_cap", None) or getattr(impl, "softcap", None):
                scores = cap * (scores / cap).tanh()
            weights = scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1)
            wanted = torch.einsum("hgqk,khd->qhgd", weights, values)
            size = torch.einsum("hgqk,kh->qhg", weights, values.norm(dim=-1))
            got = out.view(len(out), -1)[own].float().view(wanted.shape)
            # damaged weights give outputs that are not finite; they count as errors of rows, not of attention
            error = ((got - wanted).norm(dim=-1) / size)[wanted.isfinite().all(-1)]
            errors.append(float(error.max()) if len(error) else 0.0)
        return out

    return watched
