"""The schedules that a checkpoint was trained to run. At any other schedule its text may be ruined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from actors.engine.schedules.schedule import Schedule


@dataclass(frozen=True)
class Trained:
    """What training covered, under one keep order and warm-up.

    Args:
        min_depth: fewest layers that training ran at any position.
        prompt: prompt policies that training ran.
        keep_order: layers, most needed first; `warmup` of them always ran.
    """

    min_depth: int
    prompt: tuple[str, ...]
    keep_order: tuple[int, ...]
    warmup: int

    @classmethod
    def on(cls, stored: Schedule, drawn: Iterable[Schedule]) -> Trained:
        """The record of a training that drew these schedules.

        Args:
            stored: the checkpoint's own schedule. Drawn schedules of another keep order or warm-up do not count.
        """
        kept = [one for one in drawn if (one.keep_order, one.warmup) == (stored.keep_order, stored.warmup)]
        return cls(
            min_depth=min((min(one.depths) for one in kept), default=stored.num_layers),
            prompt=tuple(sorted({one.prompt for one in kept}, reverse=True)) or ("full",),
            keep_order=stored.keep_order,
            warmup=stored.warmup,
        )

    def covers(self, schedule: Schedule) -> bool:
        """Whether the layers that the schedule runs were trained."""
        return self.difference(schedule) is None

    def difference(self, schedule: Schedule) -> str | None:
        """How training differed from the schedule; None if it covers it. A full-depth prompt is `full` by any name."""
        if (schedule.keep_order, schedule.warmup) != (self.keep_order, self.warmup):
            return "it was trained with another keep_order or warmup"
        if min(schedule.depths) < self.min_depth:
            return f"it was trained down to {self.min_depth} layers, not to {min(schedule.depths)}"
        prompt = "full" if len(schedule.prompt_layers) == schedule.num_layers else "first"
        if {schedule.prompt, prompt}.isdisjoint(self.prompt):
            return f"it was trained with prompt: {' and '.join(self.prompt)}, not {schedule.prompt}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The value of ``skipdecode.json``'s key `trained`; keep order and warm-up are keys of the same file."""
        return {"min_depth": self.min_depth, "prompt": list(self.prompt)}
