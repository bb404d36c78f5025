"""Schedules to compare: a checkpoint's speeds, and other keep orders, decays and prompt policies at one mean depth.

All comparisons spend the same number of layers on an answer of `tokens` generated tokens, so that a difference in
quality is due to *which* layers run and *when*, not to how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from actors.engine.schedule.schedule import ScheduleSpec, depths_for_speedup, fall

PAPER: dict[str, Any] = {"decay": "linear", "keep_order": "paper", "prompt": "full"}
POWERS = (0.5, 2.0)  # falls fastest at first; falls fastest at last


@dataclass(frozen=True)
class Variant:
    """One schedule to measure: a line of evaluate's table.

    group: the property that it varies: ``speed``, ``keep order``, ``decay``, ``depth`` or ``prompt``. spec: complete,
    resolved on top of the checkpoint's. nominal: the speed-up that it is made from, or whose mean depth it has.
    """

    name: str
    group: str
    spec: ScheduleSpec
    nominal: float | None


def speeds(spec: ScheduleSpec, speedups: Sequence[float], prompts: Sequence[str] = ()) -> list[Variant]:
    """`spec` at each nominal speed-up, otherwise unchanged; above 1 under each further policy of `prompts` too."""
    variants = [
        Variant(f"{speedup:g}x", "speed", spec.overridden({"speedup": float(speedup)}), float(speedup))
        for speedup in speedups
    ]
    for prompt in prompts:
        for speedup in speedups:
            if prompt != spec.prompt and speedup > 1:
                changed = spec.overridden({"speedup": float(speedup), "prompt": prompt})
                variants.append(Variant(f"{speedup:g}x prompt={prompt}", "prompt", changed, float(speedup)))
    return variants


def comparisons(
    spec: ScheduleSpec, num_layers: int, speedup: float, tokens: int, learned: Sequence[int] | None = None
) -> list[Variant]:
    """The paper's schedule at `speedup`, first, and every other one with exactly its mean depth over `tokens` tokens.

    Horizon, warm-up and stairs are those of `spec`. learned: a keep order, see `keep_order`. Raises
    UserError if a schedule cannot be built, e.g. without a horizon.
    """
    paper = spec.overridden({**PAPER, "speedup": float(speedup)})
    steps = max(tokens - 1, 1)
    layer_steps = paper.build(num_layers).layer_steps(steps)

    def variant(name: str, group: str, **changes: Any) -> Variant:
        return Variant(f"{speedup:g}x {name}", group, paper.overridden(changes), float(speedup))

    def decaying(name: str, group: str, decay: str, **changes: Any) -> Variant:
        curve = _curve(replace(paper, decay=decay, **changes), num_layers, steps)
        lowest = min(spec.warmup + 1, num_layers)  # as in the paper's curve
        depths = _rounded(curve, steps, layer_steps, lowest, num_layers)
        return variant(name, group, decay=decay, depths=depths, **changes)

    orders = [variant("paper", "keep order"), variant("even order", "keep order", keep_order="even")]
    if learned is not None:
        orders.append(variant("learned order", "keep order", keep_order=tuple(learned)))
    variants = [
        *orders,
        variant("early exit", "keep order", keep_order="early_exit"),
        decaying("cosine", "decay", "cosine"),
        *(decaying(f"power {power:g}", "decay", "power", power=power) for power in POWERS),
        decaying("step", "decay", "step"),
        decaying("constant", "depth", "constant"),
        variant("prompt first", "prompt", prompt="first"),
    ]
    for compared in variants:
        compared.spec.build(num_layers)
    return variants


def _curve(spec: ScheduleSpec, num_layers: int, steps: int) -> list[float]:
    """Depths before rounding, up to the horizon and for `steps` at least, from the speed-up's max to its min."""
    assert spec.speedup is not None
    high, low = depths_for_speedup(num_layers, spec.speedup, spec.warmup)
    horizon = max(spec.horizon or 2, 2)  # unset only where high = low
    curve: list[float] = []
    for t in range(max(horizon, steps)):
        done = Fraction(min(t, horizon - 1), horizon - 1)
        fallen = 0 if spec.decay == "constant" else fall(spec.decay, done, power=spec.power, steps=spec.steps)
        depth = round(float(high - fallen * (high - low)), 9)  # or a float's last bit would make equal depths differ
        curve.append(min(depth, curve[-1]) if curve else depth)
    return curve


def _rounded(curve: Sequence[float], steps: int, layer_steps: int, lowest: int, highest: int) -> tuple[int, ...]:
    """Integer depths in [lowest, highest] with the shape of `curve`, summing to `layer_steps` over `steps`.

    The whole curve is moved up or down, which keeps its shape, and rounded. Of positions that would round up at the
    same move the first do, as many as the sum needs: so the depth never rises, and a constant depth that is no integer
    becomes two stairs.
    """
    # raising position t to depth k needs a move of k - 1/2 - curve[t]: the smallest moves first
    moves = sorted((k - 0.5 - curve[t], t) for t in range(steps) for k in range(lowest + 1, highest + 1))
    raises = layer_steps - steps * lowest
    assert 0 <= raises <= len(moves)
    depths = [lowest] * len(curve)
    for _, t in moves[:raises]:
        depths[t] += 1
    limit = moves[raises][0] if raises < len(moves) else math.inf
    for t in range(steps, len(curve)):  # past the answer's end the same move, rounded
        depths[t] += sum(k - 0.5 - curve[t] < limit for k in range(lowest + 1, highest + 1))
    while len(depths) > 1 and depths[-1] == depths[-2]:
        depths.pop()  # the last one holds for all later positions
    return tuple(depths)
