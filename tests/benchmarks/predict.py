"""A model of time: GPU and host milliseconds of each step of vLLM 0.32 on an H200, plain and with the add-on, in bf16.

Bandwidth, FLOPs and the host's terms were chosen to fit the figures of plain vLLM and of the eager add-on at 2x (README
"on a GPU"), so agreement there confirms nothing; eager 3x was up to a fifth slower. All else is a prediction.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from actors.engine.schedule.schedule import Schedule, ScheduleSpec

BANDWIDTH, DECODE_FLOPS, PREFILL_FLOPS = 3.84e9, 550e9, 522e9  # a millisecond
STEP_TOKENS = 16_384  # vLLM's default on an H200
STEP, ROW, ROW_FAST = 2.6, 0.0195, 0.0152  # host: a step; a row and step by vLLM's scheduler, and by the add-on's
WAIT = 0.6  # of each step, which no overlap hides
SMALL, TAIL = 0.012, 0.25  # GPU: small kernels of a layer; sampling
EAGER, PIECE, GRAPH = 0.44, 0.12, 0.05  # host: launches of a layer; of a layer's compiled pieces; of a whole graph
PLAN, BUILD, REPLAY = 0.35, 0.07, 0.010  # host: a step's plan; metadata of one depth or size; one segment graph
MASK, COPY = 0.013, 0.06  # GPU: mask of a segment; the batch's static copies
LARGEST_GRAPH = 1024  # tokens, by max_cudagraph_capture_size


def schedule_of(settings: Mapping[str, Any] | None, layers: int, new: int) -> Schedule:
    """Return the schedule of a line of vllm_speed.py."""
    keys = {name: value for name, value in (settings or {}).items() if name != "graphs"}
    return ScheduleSpec(horizon=max(2, new), **keys).build(layers)


def constant_depth(schedule: Schedule) -> int | None:
    """Return the number of layers that every token runs, or None."""
    same = len(set(schedule.depths)) == 1 and len(schedule.prompt_layers) == schedule.depths[0]
    return schedule.depths[0] if same else None


def run(config: Mapping[str, Any], settings: Mapping[str, Any] | None, given: argparse.Namespace, rows: int) -> Any:
    """Return milliseconds of a whole run and of its mean decode step (None without one).

    Rows are admitted until a step has STEP_TOKENS tokens, and run in lock step where that admits all of them.
    """
    layers, hidden, new = config["num_hidden_layers"], config["hidden_size"], given.new_tokens
    schedule, own = schedule_of(settings, layers, new), given.prompt_tokens - given.shared
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    cached = 2 * size * config["num_key_value_heads"]
    layer = hidden * (2 * size * config["num_attention_heads"] + cached) + 3 * hidden * config["intermediate_size"]
    is_whole = constant_depth(schedule) is not None  # vLLM's own compilation and graphs
    by_graphs, places = bool((settings or {}).get("graphs")), given.max_rows or rows
    prompt_layers, row_ms = len(schedule.prompt_layers), ROW if settings is None else ROW_FAST

    def product(n: float, weights: float) -> float:
        return float(((2 * weights / BANDWIDTH) ** 3 + (2 * weights * n / DECODE_FLOPS) ** 3) ** (1 / 3))

    def step(ages: list[tuple[int, int]], began: int) -> float:
        alive = sum(count for _, count in ages)
        depths = [(schedule.depth(age), count) for age, count in ages]
        context = given.prompt_tokens + sum(age * count for age, count in ages) / max(alive, 1)
        gpu, deepest = product(alive + began, hidden * config["vocab_size"]) + TAIL, 0
        for rank in range(layers):
            n = sum(count for depth, count in depths if depth > rank)
            fresh = began * own if rank < prompt_layers else 0
            if n + fresh:
                deepest = rank + 1
                gpu += product(n, layer) + 2 * layer * fresh / PREFILL_FLOPS + SMALL
                gpu += 2 * n * context * cached / BANDWIDTH
        host, levels = STEP + row_ms * (alive + began), len({depth for depth, _ in depths})
        if is_whole:
            host += GRAPH if alive <= LARGEST_GRAPH and not began else PIECE * deepest
        elif began or not by_graphs:
            host += PLAN + BUILD * levels + EAGER * deepest
        else:
            segments = 1 + sum(1 for level in set(schedule.depths) if level <= deepest)
            host, gpu = host + PLAN + BUILD * levels + REPLAY * segments, gpu + COPY + MASK * segments
        return max(host, gpu) + WAIT

    waiting, ages = rows, list[tuple[int, int]]()  # ages: (generated tokens, rows) of those in flight
    total, decode = 0.0, list[float]()
    while waiting or ages:
        began = min(waiting, places - sum(count for _, count in ages), max(1, STEP_TOKENS // own))
        total += (took := step(ages, began))
        decode += [] if began else [took]
        waiting -= began
        ages = [(age + 1, count) for age, count in [*ages, (0, began)] if count and age + 1 < new]
    return total, sum(decode) / len(decode) if decode else None
