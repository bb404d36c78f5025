"""Names the schedules that are trained and scored: a checkpoint's schedule at several speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.engine.schedule.schedule import ScheduleSpec

UNIFORM = {"decay": "constant", "prompt": "first"}  # schedule keys with which all tokens run the same layers


@dataclass(frozen=True)
class Variant:
    """A schedule or model to train or score, which becomes a line of the table.

    spec: complete schedule. nominal: nominal speed-up; None for another model at full depth.
    """

    name: str
    spec: ScheduleSpec
    nominal: float | None

    @property
    def is_uniform(self) -> bool:
        """Whether all tokens run the same layers, although fewer than at full depth."""
        return self.spec.overridden(UNIFORM) == self.spec and self.nominal != 1


def variants(spec: ScheduleSpec, speedups: Sequence[float], further: Sequence[Mapping[str, Any]] = ()) -> list[Variant]:
    """Return `spec` at each speed-up, then, for each of `further`, with these keys at each speed-up above 1x.

    further: keys of a schedule, such as {"prompt": "first"}. A schedule equal to an earlier one is left out.
    """
    found: dict[ScheduleSpec, Variant] = {}
    for changes in ({}, *further):
        for speedup in map(float, speedups):
            changed = spec.overridden({**changes, "speedup": speedup})
            if changes and speedup == 1:
                continue
            keys = ["uniform"] if changes == UNIFORM else [f"{key}={value}" for key, value in changes.items()]
            name = " ".join([f"{speedup:g}x", *keys])
            found.setdefault(changed, Variant(name, changed, speedup))
    return list(found.values())
