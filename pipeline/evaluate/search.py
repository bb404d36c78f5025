"""Finds the cheapest schedule whose quality stays within a tolerance of full depth; does not know how it is measured.

A measurement answers the whole dev set, so they are few: bisection, down one chain of candidates after the other.
Few looks also keep the choice honest: the winner of many noisy ones would be the luckiest, not the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Generic, Protocol, TypeVar

from actors.engine.errors import UserError
from actors.engine.schedule import ScheduleSpec, depths_for_speedup
from actors.engine.schedule_variants import Variant

SPEED_STEP = 20  # nominal speed-ups tried by one in so many


class HasLoss(Protocol):
    """What a measurement must tell; `pipeline.evaluate.run.Score` does."""

    @property
    def loss_high(self) -> float:
        """Upper end of the interval of the loss of quality against full depth, rows paired; positive is worse."""
        ...


Found = TypeVar("Found", bound=HasLoss)


@dataclass(frozen=True)
class Result(Generic[Found]):
    """best: the cheapest that was measured within the tolerance, None if none was. tried: in the order measured.

    complete: false if the measurements allowed ran out before every chain was settled; a cheaper one may exist.
    """

    best: Variant | None
    tried: tuple[tuple[Variant, Found], ...]
    complete: bool

    def summary(self, tolerance: float) -> str:
        """One line for the user."""
        cut = "" if self.complete else "; the search was cut short, allow it more measurements"
        number = f"{len(self.tried)} schedules measured"
        if not self.tried:
            return "search: there is no schedule below full depth to try; nothing is written"
        if self.best is None:
            variant, found = min(self.tried, key=lambda one: one[1].loss_high)
            return (
                f"search: no schedule stays within tolerance = {tolerance:g} of full depth ({number}; nearest "
                f"{variant.name}, loss up to {found.loss_high:.4g}); nothing is written{cut}"
            )
        loss = next(found.loss_high for variant, found in self.tried if variant == self.best)
        return f"search: {self.best.name} is the cheapest with a loss of at most {loss:.4g} ({number}){cut}"


def candidates(
    spec: ScheduleSpec, num_layers: int, tokens: int, decays: Sequence[str] = ("linear", "constant")
) -> list[Variant]:
    """Schedules below full depth of each decay, cheapest first by mean depth over `tokens` generated tokens.

    A decay that falls takes nominal speed-ups in fine steps, a constant one every integer depth; what is unset so is
    as in `spec`. No two have the same depths. Raises ValueError if a schedule cannot be built.
    """
    lowest = min(spec.warmup + 1, num_layers)
    found: dict[tuple[int, ...], tuple[float, Variant]] = {}
    for decay in decays:
        made: list[tuple[float, ScheduleSpec]] = []
        if decay == "constant":
            for depth in range(num_layers - 1, lowest - 1, -1):
                flat = {"decay": decay, "max_depth": depth, "min_depth": depth}
                made.append((num_layers / depth, spec.overridden(flat)))
        else:
            ranges: dict[tuple[int, int], float] = {}
            for step in count(SPEED_STEP + 1):
                depths = depths_for_speedup(num_layers, step / SPEED_STEP, spec.warmup)
                ranges.setdefault(depths, step / SPEED_STEP)
                if depths == (lowest, lowest):
                    break
            for speedup in ranges.values():
                made.append((speedup, spec.overridden({"decay": decay, "speedup": speedup})))
        for nominal, one in made:
            schedule = one.build(num_layers)
            effective = schedule.depths
            while len(effective) > 1 and effective[-1] == effective[-2]:
                effective = effective[:-1]  # the last one holds for ever
            if effective == (num_layers,) or effective in found:
                continue
            cost = schedule.layer_steps(max(tokens - 1, 1))
            name = f"{nominal:.4g}x {decay}"
            found[effective] = (cost, Variant(name, "decay" if decay != "constant" else "depth", one, nominal))
    return [variant for _, variant in sorted(found.values(), key=lambda one: (one[0], -(one[1].nominal or 0)))]


def search(
    candidates: Sequence[Variant], measure: Callable[[Variant], Found], tolerance: float, most: int
) -> Result[Found]:
    """The cheapest of `candidates`, given cheapest first, whose `loss_high` is at most `tolerance`.

    Candidates that differ only in how deep form a chain. Where loss never rises with depth along each chain, the
    best is the cheapest there is, after at most 1 + log2(n + 1) measurements for each chain of n; where it does,
    a cheaper one may be missed, but what is returned was itself measured within the tolerance. Never more than
    `most` measurements. A full-depth line is not asked for. Raises ValueError if `most` is below 1.
    """
    if most < 1:
        raise UserError(f"most = {most}: allow at least one measurement")
    tried: list[tuple[Variant, Found]] = []
    best: int | None = None  # place among the candidates
    complete = True
    chains: dict[ScheduleSpec, list[int]] = {}
    for place, variant in enumerate(candidates):
        chains.setdefault(_without_depth(variant.spec), []).append(place)
    for chain in chains.values():
        cheaper = [place for place in chain if best is None or place < best]
        # all below `low` fail or are taken to; `high` passes, or is the end; first the one that the rest hangs on
        low, high = 0, len(cheaper)
        probe = high - 1 if best is not None else (low + high) // 2
        while low < high:
            if len(tried) == most:
                complete = False
                break
            found = measure(candidates[cheaper[probe]])
            tried.append((candidates[cheaper[probe]], found))
            if found.loss_high <= tolerance:
                high, best = probe, cheaper[probe]
            else:
                low = probe + 1
            probe = (low + high) // 2
    return Result(None if best is None else candidates[best], tuple(tried), complete)


def _without_depth(spec: ScheduleSpec) -> ScheduleSpec:
    return replace(spec, speedup=None, max_depth=None, min_depth=None, depths=None)
