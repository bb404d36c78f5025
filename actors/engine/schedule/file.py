"""Reads, checks and writes a checkpoint's ``skipdecode.json``: a schedule, and which schedules training has covered.

With a schedule that training has not covered, a model may generate garbage.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.model.file_digests import read_object
from actors.engine.schedule.schedule import MAX_HORIZON, PROMPT_POLICIES, Schedule, ScheduleSpec

SCHEDULE_FILE = "skipdecode.json"
TRAINED = "trained"  # key of skipdecode.json for the training record


@dataclass(frozen=True)
class Trained:
    """Training record: the schedules that training has covered.

    All these schedules have the same layer order (keep order) and the same number of warm-up layers.
    """

    depths: tuple[int, ...]  # for each position, the lowest depth in training; the last depth holds for all later ones
    prompt: tuple[str, ...]  # prompt policies that occurred in training
    keep_order: tuple[int, ...]  # layer order; depth d ran the first d layers in it
    warmup: int  # the first `warmup` layers in `keep_order` always ran

    @classmethod
    def on(cls, stored: Schedule, sampled: Iterable[Schedule]) -> Trained:
        """Return the training record of a training run.

        stored: schedule of the checkpoint. sampled: schedules used in training; those whose keep order or warm-up
        differs from that of `stored` are ignored.
        """
        kept = [one for one in sampled if (one.keep_order, one.warmup) == (stored.keep_order, stored.warmup)]
        return cls(
            depths=fewest(kept) or (stored.num_layers,),
            prompt=tuple(sorted({one.prompt for one in kept}, reverse=True)) or ("full",),
            keep_order=stored.keep_order,
            warmup=stored.warmup,
        )

    def covers(self, schedule: Schedule) -> bool:
        """Return whether training covered `schedule`."""
        return self.difference(schedule) is None

    def difference(self, schedule: Schedule) -> str | None:
        """Return why training does not cover `schedule`; None if it does. If d(0) = L, policy `first` equals `full`."""
        if (schedule.keep_order, schedule.warmup) != (self.keep_order, self.warmup):
            return "it was trained with another keep_order or warmup"
        if schedule.depths[-1] < self.depths[-1]:
            return f"it was trained down to {self.depths[-1]} layers, not to {schedule.depths[-1]}"
        for position in range(max(len(self.depths), len(schedule.depths))):
            least, depth = self.depths[min(position, len(self.depths) - 1)], schedule.depth(position)
            if depth < least:
                return (
                    f"at token {position} it was trained down to {least} layers, not to {depth}: a shorter horizon or "
                    "another decay than in training"
                )
        prompt = "full" if len(schedule.prompt_layers) == schedule.num_layers else "first"
        if {schedule.prompt, prompt}.isdisjoint(self.prompt):
            return f"it was trained with prompt: {' and '.join(self.prompt)}, not {schedule.prompt}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the value for key `trained` of ``skipdecode.json``. Keep order and warm-up have keys of their own."""
        return {"depths": list(self.depths), "prompt": list(self.prompt)}


def fewest(schedules: Collection[Schedule]) -> tuple[int, ...]:
    """Return the lowest depth of all `schedules` at each position of the longest depth curve; () for no schedules."""
    longest = max((len(one.depths) for one in schedules), default=0)
    return tuple(min(one.depth(position) for one in schedules) for position in range(longest))


def read_spec(values: Mapping[str, Any], num_layers: int, source: str) -> ScheduleSpec:
    """Convert the values of a ``skipdecode.json``, without key `trained`, to a schedule.

    Raises UserError if a value is wrong or does not fit a model with `num_layers` layers. The message begins with
    `source`, and names the wrong key or position.
    """
    made_for, settings = values.get("num_layers"), {key: value for key, value in values.items() if key != "num_layers"}
    if made_for != num_layers:
        raise UserError(f"{source}: made for num_layers = {made_for}, but the model has {num_layers} layers")
    try:
        spec = ScheduleSpec().overridden(settings)
        spec.build(num_layers)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return spec


def read_trained(value: Any, spec: ScheduleSpec, num_layers: int, source: str) -> Trained:
    """Convert `value`, the training record of a ``skipdecode.json``.

    Raises UserError if the record is wrong. The message begins with `source`, and names the wrong key.
    """
    if not isinstance(value, dict) or set(value) != {"depths", "prompt"}:
        raise UserError(f"{source}: {TRAINED} must hold depths and prompt, and no other key")
    stored, prompt, depths = spec.build(num_layers), value["prompt"], value["depths"]
    if not isinstance(depths, list) or not 1 <= len(depths) <= MAX_HORIZON:
        raise UserError(f"{source}: {TRAINED}.depths must list 1 to {MAX_HORIZON} numbers of layers")
    for depth, before in zip(depths, [num_layers, *depths], strict=False):
        if type(depth) is not int or not 1 <= depth <= before:
            raise UserError(f"{source}: {TRAINED}.depths = {depth!r}: must be a whole number in [1, {before}]")
    if not isinstance(prompt, list) or not prompt or any(policy not in PROMPT_POLICIES for policy in prompt):
        raise UserError(f"{source}: {TRAINED}.prompt = {prompt!r}: must list some of {', '.join(PROMPT_POLICIES)}")
    return Trained(tuple(depths), tuple(prompt), stored.keep_order, stored.warmup)


def load_spec(checkpoint: Path, num_layers: int) -> ScheduleSpec | None:
    """Return the schedule stored in a checkpoint folder; None if there is none. Raises UserError if it is wrong."""
    path = checkpoint / SCHEDULE_FILE
    if not path.exists():
        return None
    values = read_object(path)
    return read_spec({key: value for key, value in values.items() if key != TRAINED}, num_layers, str(path))


def load_trained(checkpoint: Path, num_layers: int, spec: ScheduleSpec | None) -> Trained | None:
    """Return the training record in a checkpoint folder; None if there is none. Raises UserError if it is wrong.

    spec: what `load_spec` returned for this folder.
    """
    if spec is None:
        return None
    path = checkpoint / SCHEDULE_FILE
    value = read_object(path).get(TRAINED)
    return None if value is None else read_trained(value, spec, num_layers, str(path))


def save_spec(spec: ScheduleSpec, num_layers: int, checkpoint: Path, trained: Trained | None = None) -> None:
    """Check a schedule against `num_layers`, and write it to ``skipdecode.json`` in a checkpoint folder.

    trained: training record with the keep order and warm-up of `spec`; None: the checkpoint was not trained.
    """
    stored = spec.build(num_layers)
    values: dict[str, Any] = {"num_layers": num_layers, **spec.to_dict()}
    if trained is not None:
        assert (trained.keep_order, trained.warmup) == (stored.keep_order, stored.warmup)
        values[TRAINED] = trained.to_dict()
    (checkpoint / SCHEDULE_FILE).write_text(json.dumps(values, indent=2) + "\n")
