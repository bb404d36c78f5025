"""A checkpoint's ``skipdecode.json``, the schedule that it was tuned for: validated reading, and writing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.json_file import read_object
from actors.engine.schedule import MAX_HORIZON, ScheduleSpec

SCHEDULE_FILE = "skipdecode.json"


def read_spec(values: Mapping[str, Any], num_layers: int, source: str) -> ScheduleSpec:
    """The spec in the values of a ``skipdecode.json``, checked against a model of `num_layers` layers.

    Raises UserError that begins with `source` and names the wrong key or position.
    """
    known = {field.name for field in fields(ScheduleSpec)}
    unknown = sorted(set(values) - known - {"num_layers"})
    if unknown:
        raise UserError(f"{source}: unknown key {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if values.get("num_layers") != num_layers:
        raise UserError(
            f"{source}: made for num_layers = {values.get('num_layers')}, but the model has {num_layers} layers"
        )
    settings = {name: value for name, value in values.items() if name != "num_layers"}
    for name, value in settings.items():
        kinds = _KINDS[name]
        if not _is(value, kinds) or (isinstance(value, list) and not all(_is(entry, (int,)) for entry in value)):
            raise UserError(f"{source}: {name} = {value!r} has the wrong type")
        if isinstance(value, list):
            if len(value) > MAX_HORIZON:
                raise UserError(f"{source}: {name} has {len(value)} entries, more than {MAX_HORIZON}")
            settings[name] = tuple(value)
    spec = ScheduleSpec(**settings)
    try:
        spec.build(num_layers)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    return spec


def load_spec(checkpoint: Path, num_layers: int) -> ScheduleSpec | None:
    """The spec stored in a checkpoint folder; None without one. Raises UserError if it cannot be read or is wrong."""
    path = checkpoint / SCHEDULE_FILE
    if not path.exists():
        return None
    return read_spec(read_object(path), num_layers, str(path))


def save_spec(spec: ScheduleSpec, num_layers: int, checkpoint: Path) -> None:
    """Write ``skipdecode.json`` into a checkpoint folder, after checking it against `num_layers`."""
    spec.build(num_layers)
    values = {"num_layers": num_layers, **spec.to_dict()}
    (checkpoint / SCHEDULE_FILE).write_text(json.dumps(values, indent=2) + "\n")


def _is(value: object, kinds: Sequence[type]) -> bool:
    return isinstance(value, tuple(kinds)) and not isinstance(value, bool)


_KINDS: dict[str, tuple[type, ...]] = {
    "speedup": (int, float),
    "max_depth": (int,),
    "min_depth": (int,),
    "depths": (list,),
    "horizon": (int,),
    "decay": (str,),
    "power": (int, float),
    "steps": (int,),
    "warmup": (int,),
    "keep_order": (str, list),
    "prompt": (str,),
}
