"""The engine's half of an actor with a GPU, without Ray: the demo's checkpoint and prompts through a Generator.

With the GPU's layers, graphs and pages, and without: texts should be the same in float32, rows a second are told for
both. See gpu.py.
"""

from __future__ import annotations

import random
import time
from typing import Any

from shapes import DEMO

from actors.answers import Prompt
from actors.generator import Generator

NAMES = ["Alimentum", "Zizzi", "The Eagle", "Blue Spice", "The Mill", "Clowns"]
FOODS = ["Chinese", "French", "Indian", "Italian", "Japanese"]
AREAS = ["city centre", "riverside"]


def demo(rows: int, device: str, cache_bytes: int) -> list[dict[str, Any]]:
    """One entry for each dtype and engine; `same_texts`: share of the rows that both engines answer alike."""
    chance = random.Random(3)
    texts = [
        f"name[{chance.choice(NAMES)}], food[{chance.choice(FOODS)}], area[{chance.choice(AREAS)}], number[{row % 50}]"
        for row in range(rows)
    ]
    found: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        before: list[str | None] = []
        for graphs in (False, True):
            generator = Generator(
                str(DEMO),
                dtype=dtype,
                device=device,
                engine="paged" if graphs else "library",
                cache_bytes=cache_bytes,
                max_batch=256,
                schedule={"speedup": 3.0},
                sampling={"max_new_tokens": 64},
                cumulative_logprob=False,
            )
            prompts = [Prompt(generator.tokenizer(text)["input_ids"], "demo", row) for row, text in enumerate(texts)]
            for _ in range(2):  # the first time kernels are compiled and graphs captured
                began = time.perf_counter()
                answers = [one.generated_text for one in generator.answer(prompts)]
                seconds = time.perf_counter() - began
            one = {"dtype": dtype, "graphs": graphs, "rows_per_second": rows / seconds}
            if before:
                one["same_texts"] = sum(map(str.__eq__, map(str, before), map(str, answers))) / rows
            before = answers
            found.append(one)
            print(f"  demo: {one}", flush=True)
            del generator
    return found
