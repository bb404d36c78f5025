"""The schedules that a checkpoint was trained to run. At any other schedule its text may be ruined."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Schedule, ScheduleSpec


@dataclass(frozen=True)
class Trained:
    """What training covered, under one keep order and warm-up.

    Args:
        depths: fewest layers that training ran at each position; later positions have the last depth.
        prompt: prompt policies that training ran.
        keep_order: layers, most needed first; `warmup` of them always ran.
    """

    depths: tuple[int, ...]
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
            depths=fewest(kept) or (stored.num_layers,),
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
        if schedule.depths[-1] < self.depths[-1]:
            return f"it was trained down to {self.depths[-1]} layers, not to {schedule.depths[-1]}"
        for position in range(max(len(self.depths), len(schedule.depths))):
            least, depth = self.depths[min(position, len(self.depths) - 1)], schedule.depth(position)
            if depth < least:
                return (
                    f"at token {position} it was trained down to {least} layers, not to {depth}: a shorter horizon or "
                    "another decay than the training's"
                )
        prompt = "full" if len(schedule.prompt_layers) == schedule.num_layers else "first"
        if {schedule.prompt, prompt}.isdisjoint(self.prompt):
            return f"it was trained with prompt: {' and '.join(self.prompt)}, not {schedule.prompt}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The value of ``skipdecode.json``'s key `trained`; keep order and warm-up are keys of the same file."""
        return {"depths": list(self.depths), "prompt": list(self.prompt)}


def fewest(schedules: Collection[Schedule]) -> tuple[int, ...]:
    """The lowest depth of some schedules at each position, up to where all have their last one; () without any."""
    longest = max((len(one.depths) for one in schedules), default=0)
    return tuple(min(one.depth(position) for one in schedules) for position in range(longest))


def of_older_record(spec: ScheduleSpec, num_layers: int, least: int) -> tuple[int, ...]:
    """`Trained.depths` of a record that holds only the lowest depth of all positions.

    They are the lowest of the stored curve at any speed that runs at least so many layers.

    Args:
        spec: the stored one, which can be built.
    """
    drawn = [spec.build(num_layers)]
    with suppress(UserError):  # a spec without horizon
        speeds = (quarters / 4 for quarters in range(5, 4 * num_layers + 1))
        drawn += [spec.overridden({"speedup": speed}).build(num_layers) for speed in speeds]
    return (*fewest([one for one in drawn if one.depths[-1] >= least])[:-1], least)
