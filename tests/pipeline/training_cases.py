"""Schedules to train with, and random pairs of prompt and response as token ids."""

from __future__ import annotations

import random
from typing import Any

from tiny_models import VOCAB

from actors.engine.schedules.schedule import ScheduleSpec

SPECS = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]


def pairs(seed: int, count: int = 5) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, response = rng.randint(1, 9), rng.randint(1, 8)
        rows.append({"input_ids": rng.choices(range(3, VOCAB), k=prompt + response), "prompt_tokens": prompt})
    return rows
