"""Compares answers with a slow definition of skipping when a worker starts: no cache, no batch, no metadata.

The definition runs every layer of the model for a whole prompt and answer, drops the results of tokens that skip a
layer, and attends by plain torch, with the keys of those tokens hidden.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.forward_context import set_forward_context
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from actors.engine.errors import UserError
from actors.vllm.layers import LayerSkipper
from actors.vllm.plan import PassPlan

PROMPT_TOKENS = (3, 40, 200)
NEW_TOKENS = 24
TOP = 5  # log-probabilities compared at each token
# limit of the mean difference, nats; rounding of 16 bits leaves 0.01 to 0.1, a wrong key more than 1
LIMITS = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}
log = logging.getLogger(__name__)

Answer = tuple[list[int], Tensor]  # tokens, and the logits from which each was chosen: [T, V]


@torch.inference_mode()
def check_answers(worker: Any, skipper: LayerSkipper, cache_config: Any) -> None:
    """Answer three prompts alone and together, greedily, and compare the log-probabilities with the definition.

    Raises UserError if they differ by more than rounding.
    """
    model, config = worker.model_runner.get_model(), worker.vllm_config
    chance, longest = random.Random(0), config.model_config.max_model_len - NEW_TOKENS
    if longest < 1:
        raise UserError(f"skipdecode: max_model_len must be above {NEW_TOKENS} for the self-check; self_check: false")
    vocabulary = config.model_config.get_vocab_size()
    prompts = [[chance.randrange(vocabulary) for _ in range(min(length, longest))] for length in PROMPT_TOKENS]
    depths, skipper.depths = skipper.depths, _shortened(skipper.depths)
    try:
        alone = [answer for prompt in prompts for answer in _answers(worker, model, cache_config, [prompt])]
        packed = _answers(worker, model, cache_config, prompts)
        worst = 0.0
        for prompt, *answers in zip(prompts, alone, packed, strict=True):
            for tokens, logits in answers:
                worst = max(worst, _difference(_defined(worker, model, skipper, prompt, tokens), logits))
    finally:
        skipper.depths = depths
        skipper.counts.clear()
    limit = LIMITS[config.model_config.dtype]
    if not worst <= limit:  # NaN too
        raise UserError(
            f"skipdecode: the self-check failed: log-probabilities differ by {worst:.3g} nats in the mean, more than "
            f"{limit} by rounding, from those of the same layers without a cache: this model or attention backend is "
            "not supported; self_check: false runs it nonetheless"
        )
    log.info("skipdecode: self-check passed: log-probabilities differ by %.2g nats", worst)


def _shortened(depths: np.ndarray) -> np.ndarray:
    """A curve that passes through the same depths within the tokens of an answer."""
    shortened: np.ndarray = depths[np.linspace(0, len(depths) - 1, NEW_TOKENS - 1).round().astype(int)]
    return shortened


def _answers(worker: Any, model: Any, cache_config: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Answer prompts as the engine does, by a scheduler of its class; each prompt begins a step after the last one."""
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
    waiting = {str(number): list(prompt) for number, prompt in enumerate(prompts)}
    found: dict[str, tuple[list[int], list[Tensor]]] = {name: ([], []) for name in waiting}
    while waiting or scheduler.has_unfinished_requests():
        if waiting:
            name = next(iter(waiting))
            params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
            scheduler.add_request(Request(name, waiting.pop(name), params, None))
        scheduled = scheduler.schedule()
        with _recording(model) as recorded:
            output = worker.execute_model(scheduled)
            if output is None:
                output = worker.sample_tokens(None)
        if hasattr(output, "get_output"):  # async scheduling
            output = output.get_output()
        for row, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            if len(tokens):
                found[name][0].extend(int(token) for token in tokens)
                found[name][1].append(recorded[0][row].float().clone())
        scheduler.update_from_output(scheduled, output)
    worker.execute_model(scheduler.schedule())  # tells the runner which requests have ended
    return [(tokens, torch.stack(logits)) for tokens, logits in found.values()]


@contextmanager
def _recording(model: Any) -> Iterator[list[Tensor]]:
    """Collect what the model's `compute_logits` returns."""
    recorded: list[Tensor] = []

    def compute_logits(*args: Any, **options: Any) -> Any:
        logits = type(model).compute_logits(model, *args, **options)
        recorded.append(logits.clone())  # sampling writes into them
        return logits

    model.compute_logits = compute_logits
    try:
        yield recorded
    finally:
        del model.compute_logits


def _defined(worker: Any, model: Any, skipper: LayerSkipper, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The definition's logits for each token of an answer: [T, V]."""
    tokens = torch.tensor([*prompt, *answer[:-1]], device=worker.device)
    count = len(tokens)
    bounds = np.array([0, count])
    plan = PassPlan(
        skipper.depths, skipper.prompt_depth, bounds, bounds[1:], np.array([len(prompt)]), torch.device(worker.device)
    )
    positions = torch.arange(count, device=worker.device)
    with ExitStack() as stack:
        for index, layers in skipper.attention.items():
            runs = torch.from_numpy(plan.depths > skipper.ranks[index]).to(worker.device)
            for layer in layers.values():
                window = count if layer.sliding_window is None else layer.sliding_window
                distance = positions[:, None] - positions
                stack.enter_context(_attending(layer, runs & (distance >= 0) & (distance < window)))
        stack.enter_context(skipper.masked(plan))
        stack.enter_context(set_forward_context(None, worker.vllm_config, num_tokens=count))
        hidden = model(input_ids=tokens, positions=positions, intermediate_tensors=None, inputs_embeds=None)
        logits: Tensor = model.compute_logits(hidden[len(prompt) - 1 :])
    return logits.float()


@contextmanager
def _attending(layer: Any, visible: Tensor) -> Iterator[None]:
    """Let one of vLLM's attention layers attend over one sequence by plain torch. visible: [queries, keys]."""
    impl = layer.impl
    if getattr(impl, "sinks", None) is not None or getattr(impl, "alibi_slopes", None) is not None:
        raise UserError(
            f"skipdecode: {layer.layer_name} has sinks or ALiBi, which the self-check does not know; "
            "self_check: false runs it nonetheless"
        )
    cap = getattr(impl, "logits_soft_cap", None) or getattr(impl, "softcap", None)

    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        count = len(visible)
        queries = query.view(count, layer.num_kv_heads, -1, layer.head_size).float()  # [T, KV heads, group, D]
        keys = key.view(count, layer.num_kv_heads, layer.head_size).float()
        values = value.view(count, layer.num_kv_heads, layer.head_size_v).float()
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * impl.scale
        if cap:
            scores = cap * (scores / cap).tanh()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)  # a token that skips may see none
        return torch.einsum("hgqk,khd->qhgd", weights, values).reshape(count, -1).to(query.dtype)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


def _difference(wanted: Tensor, got: Tensor) -> float:
    """Mean absolute difference of log-probabilities, nats, over the likeliest tokens of each position."""
    top = wanted.log_softmax(-1).topk(min(TOP, wanted.shape[-1]))
    return float((top.values - got.log_softmax(-1).gather(-1, top.indices)).abs().mean())
