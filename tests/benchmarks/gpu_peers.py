"""transformers over the same rows at full depth, on the GPU, and what the engine makes of them. See gpu.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_parts import Clock, attempt, give_back, rows_of, run, synchronize

from actors.engine.gpu.engine import GpuEngine
from actors.engine.scheduler import generate
from actors.engine.types import Request

PEER_NEW = 128  # tokens for which transformers is timed: a quarter, decode goes at one pace
COMPARED = 32  # greedy tokens of a row that are held against generate's


def ours(engine: GpuEngine, batch: int, device: torch.device) -> dict[str, Any]:
    """What transformers is held against: tokens a second of the rows that it will have, and the tokens."""
    rows = rows_of("equal", batch, engine.decoder.vocab_size, PEER_NEW)
    for _ in range(2):
        run(engine, rows, device)
    seconds = sum(run(engine, rows, device))
    few = [replace(row, sampling=replace(row.sampling, max_new_tokens=COMPARED)) for row in rows[:16]]
    answers = generate(engine, few, budget_bytes=2**50, max_rows=len(few))
    return {"tokens_per_second": batch * PEER_NEW / seconds, "answers": [list(one.token_ids) for one in answers]}


def agreement(model: Any, rows: Sequence[Request], answers: Sequence[Sequence[int]]) -> float:
    """Share of greedy tokens that are `generate`'s too, up to the first one of each row that is not."""
    ids = torch.tensor([list(row.prompt_ids) for row in rows[: len(answers)]], device=model.device)
    settings = {"max_new_tokens": len(answers[0]), "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :].tolist()
    same = 0
    for mine, other in zip(answers, theirs, strict=True):
        equal = [one == another for one, another in zip(mine, other, strict=True)]
        same += equal.index(False) if False in equal else len(equal)
    return same / sum(map(len, answers))


def peers(model: Any, batch: int, mine: dict[str, Any] | None, clock: Clock, device: torch.device) -> dict[str, float]:
    """New tokens a second of transformers over the same rows at full depth, prefill included, and what `mine` are."""
    from peer_transformers import continuously, in_batches

    rows = rows_of("equal", batch, model.config.vocab_size, PEER_NEW)
    prompts = [list(row.prompt_ids) for row in rows]
    found: dict[str, float] = {}
    ways: dict[str, Callable[[list[int]], int]] = {
        "dynamic": lambda new: in_batches(model, prompts, new, batch, static=False),
        "static, compiled": lambda new: in_batches(model, prompts, new, batch, static=True),
        "continuous": lambda new: continuously(model, prompts, new, batch),
    }

    def timed(answer: Callable[[list[int]], int]) -> float:
        with torch.device(device):
            for _ in range(2):  # as ours: kernels are compiled, graphs captured
                answer([PEER_NEW] * batch)
            synchronize(device)
            began = time.perf_counter()
            made = answer([PEER_NEW] * batch)
            synchronize(device)
        return made / (time.perf_counter() - began)

    if mine is not None:
        found["ours, 1x"] = mine["tokens_per_second"]
        found["agreement with generate"] = agreement(model, rows, mine["answers"])
    for name, answer in ways.items():
        label = f"transformers {name}, batch {batch}"
        if clock.allows(label, 60):
            speed = attempt(label, clock, device, partial(timed, answer))
            if speed is not None:
                found[name] = speed
    if hasattr(model, "destroy_cached_continuous_batching_manager"):  # it keeps the memory that it has found free
        model.destroy_cached_continuous_batching_manager()
    give_back(device)
    print(f"    batch {batch}, new tokens a second: {json.dumps({key: round(one, 3) for key, one in found.items()})}")
    return found
