"""A checkpoint's ``skipdecode.json``: its schedule, and which schedules it was trained for. Validated when read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.model.json_file import read_object
from actors.engine.schedule.schedule import MAX_HORIZON, PROMPT_POLICIES, ScheduleSpec
from actors.engine.schedule.trained import Trained, of_older_record

SCHEDULE_FILE = "skipdecode.json"
TRAINED = "trained"  # key of the record of the training


def read_spec(values: Mapping[str, Any], num_layers: int, source: str) -> ScheduleSpec:
    """The spec in the values of a ``skipdecode.json`` without `TRAINED`, checked against a model of `num_layers`.

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


def read_trained(value: Any, spec: ScheduleSpec, num_layers: int, source: str) -> Trained:
    """The record of the training in the ``skipdecode.json`` of a spec. An older record has `min_depth` for `depths`.

    Raises UserError that begins with `source` and names the wrong key.
    """
    if not isinstance(value, dict) or set(value) not in ({"depths", "prompt"}, {"min_depth", "prompt"}):
        raise UserError(f"{source}: {TRAINED} must hold depths and prompt, and no other key")
    stored, prompt = spec.build(num_layers), value["prompt"]
    depths = value.get("depths", [value.get("min_depth")])
    if not isinstance(depths, list) or not 1 <= len(depths) <= MAX_HORIZON:
        raise UserError(f"{source}: {TRAINED}.depths must list 1 to {MAX_HORIZON} numbers of layers")
    for depth, before in zip(depths, [num_layers, *depths], strict=False):
        if not _is(depth, (int,)) or not 1 <= depth <= before:
            key = "depths" if "depths" in value else "min_depth"
            raise UserError(f"{source}: {TRAINED}.{key} = {depth!r}: must be a whole number in [1, {before}]")
    if not isinstance(prompt, list) or not prompt or any(policy not in PROMPT_POLICIES for policy in prompt):
        raise UserError(f"{source}: {TRAINED}.prompt = {prompt!r}: must list some of {', '.join(PROMPT_POLICIES)}")
    known = tuple(depths) if "depths" in value else of_older_record(spec, num_layers, depths[0])
    return Trained(known, tuple(prompt), stored.keep_order, stored.warmup)


def load_spec(checkpoint: Path, num_layers: int) -> ScheduleSpec | None:
    """The spec stored in a checkpoint folder; None without one. Raises UserError if it cannot be read or is wrong."""
    path = checkpoint / SCHEDULE_FILE
    if not path.exists():
        return None
    values = read_object(path)
    return read_spec({key: value for key, value in values.items() if key != TRAINED}, num_layers, str(path))


def load_trained(checkpoint: Path, num_layers: int, spec: ScheduleSpec | None) -> Trained | None:
    """The schedules that the checkpoint in a folder was trained for; None if that is not recorded.

    spec: the folder's own, see `load_spec`. Raises UserError if the record is wrong.
    """
    if spec is None:
        return None
    path = checkpoint / SCHEDULE_FILE
    value = read_object(path).get(TRAINED)
    return None if value is None else read_trained(value, spec, num_layers, str(path))


def save_spec(spec: ScheduleSpec, num_layers: int, checkpoint: Path, trained: Trained | None = None) -> None:
    """Write ``skipdecode.json`` into a checkpoint folder, after checking it against `num_layers`.

    trained: of the keep order and warm-up of `spec`; None: the checkpoint was trained for no schedule.
    """
    stored = spec.build(num_layers)
    values: dict[str, Any] = {"num_layers": num_layers, **spec.to_dict()}
    if trained is not None:
        assert (trained.keep_order, trained.warmup) == (stored.keep_order, stored.warmup)
        values[TRAINED] = trained.to_dict()
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
