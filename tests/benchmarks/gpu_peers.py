"""transformers over the same rows at full depth, on the GPU, and what the engine makes of them. See gpu.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from gpu_parts import Clock, rows_of, run, synchronize

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
    same = 0
    for row, answer in zip(rows, answers, strict=False):
        ids = torch.tensor([list(row.prompt_ids)], device=model.device)
        settings = {"max_new_tokens": len(answer), "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, ids.shape[1] :].tolist()
        same += next(
            (at for at, pair in enumerate(zip(answer, theirs, strict=True)) if pair[0] != pair[1]), len(answer)
        )
    return same / sum(map(len, answers))


def peers(model: Any, vocabulary: int, batch: int, clock: Clock, device: torch.device) -> dict[str, float]:
    """New tokens a second of transformers over the same rows at full depth, prefill included."""
    try:
        from peer_transformers import continuously, in_batches
    except ImportError as error:
        clock.left_out.append(f"transformers, batch {batch}: {error}")
        return {}
    rows = rows_of("equal", batch, vocabulary, PEER_NEW)
    prompts = [list(row.prompt_ids) for row in rows]
    found = {}
    ways: dict[str, Callable[[list[int]], int]] = {
        "dynamic": lambda new: in_batches(model, prompts, new, batch, static=False),
        "static, compiled": lambda new: in_batches(model, prompts, new, batch, static=True),
        "continuous": lambda new: continuously(model, prompts, new, batch),
    }
    for name, answer in ways.items():
        if not clock.allows(f"transformers {name}, batch {batch}", 60):
            continue
        try:
            with torch.device(device):
                answer([8] * batch)
                synchronize(device)
                began = time.perf_counter()
                made = answer([PEER_NEW] * batch)
                synchronize(device)
            found[name] = made / (time.perf_counter() - began)
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            clock.left_out.append(f"transformers {name}, batch {batch}: {type(error).__name__}: {str(error)[:120]}")
        print(f"    transformers {name:18} {found.get(name, math.nan):10,.0f} tokens/s", flush=True)
    return found
