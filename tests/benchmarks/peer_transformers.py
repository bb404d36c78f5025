"""`transformers`, greedy: `generate` with a dynamic or a compiled static cache, or its continuous batching.

PEER_KIND: dynamic, static or continuous. In a process of its own like the other peers: what it allocates, compiles or
fails at touches nobody else's figures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import transformers
from peer_process import Answer, serve
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

CACHE_BYTES = 2**32  # as all have them


class Lengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, prompt: int, new: Sequence[int]) -> None:
        self.ends = torch.tensor([prompt + count for count in new])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        return self.ends <= input_ids.shape[1]


def in_batches(model: PreTrainedModel, prompts: list[list[int]], new: list[int], max_rows: int, static: bool) -> int:
    """Longest prompts first. New tokens are known to be as many as the longest row's, no more."""
    settings: dict[str, Any] = {}
    if static:
        compiled = CompileConfig()
        compiled._compile_all_devices = True  # else not on a CPU
        settings = {"cache_implementation": "static", "compile_config": compiled}
    order = sorted(range(len(new)), key=lambda row: -len(prompts[row]))
    for first in range(0, len(order), max_rows):
        rows = order[first : first + max_rows]
        longest = max(len(prompts[row]) for row in rows)
        padding = [longest - len(prompts[row]) for row in rows]
        model.generate(
            torch.tensor([[1] * pad + prompts[row] for pad, row in zip(padding, rows, strict=True)]),
            attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
            max_new_tokens=max(new),
            do_sample=False,
            pad_token_id=1,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([Lengths(longest, [new[row] for row in rows])]),
            **settings,
        )
    return sum(new)


def continuously(model: PreTrainedModel, prompts: list[list[int]], new: list[int], max_rows: int) -> int:
    """Lengths are known beforehand. The manager stays for the next call, its thread does not."""
    wanted = GenerationConfig(max_new_tokens=max(new), do_sample=False, eos_token_id=-1)
    settings = ContinuousBatchingConfig(
        max_requests_per_batch=max_rows,
        # of a GPU it takes what it wants
        max_memory_percent=None if model.device.type == "cuda" else CACHE_BYTES / psutil.virtual_memory().total,
        allow_block_sharing=False,  # the prompts come again in every round
    )
    made = 0
    with model.continuous_batching_context_manager(
        wanted, continuous_batching_config=settings, persistent_manager=True
    ) as manager:
        for ids, count in zip(prompts, new, strict=True):
            manager.add_request(ids, max_new_tokens=count)
        for _ in prompts:
            done = manager.get_result()
            if done is None or done.error is not None:
                raise RuntimeError(f"continuous batching: {done and done.error}")
            made += len(done.generated_tokens)
    return made


def start(checkpoint: str, threads: int, max_rows: int) -> tuple[Answer, str]:
    """As PEER_KIND says."""
    kind = os.environ.get("PEER_KIND", "dynamic")
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval().requires_grad_(False)

    def answer(prompts: list[list[int]], new: list[int]) -> int:
        if kind == "continuous":
            return continuously(model, prompts, new, max_rows)
        return in_batches(model, prompts, new, max_rows, static=kind == "static")

    return answer, f"{transformers.__version__}, torch.compile {'on' if kind == 'static' else 'off'}"


if __name__ == "__main__":
    serve(start)
