"""The add-on's settings: the key ``skipdecode`` of vLLM's `additional_config`, on top of the checkpoint's own file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, suggestion
from actors.engine.schedule.file import SCHEDULE_FILE, load_spec, load_trained, read_spec
from actors.engine.schedule.schedule import Schedule, ScheduleSpec

KEY = "skipdecode"


@dataclass(frozen=True)
class Settings:
    """What the add-on runs.

    Args:
        schedule: the layers of every token.
        speed_adapter: folder of the adapter to merge; None at full depth, where the base runs as published.
        self_check: compare some answers with a slow definition of skipping before the first request.
        poison: for debugging: write a huge value into the cache where a token skips a layer, and fail if it is read.
    """

    schedule: Schedule
    speed_adapter: str | None = None
    self_check: bool = True
    poison: bool = False


def read_settings(additional_config: Any, model: str, num_layers: int) -> Settings:
    """Return the settings of a model in a folder.

    Keys are those of a job's `schedule` section, `speed_adapter`, `unadapted`, `self_check` and `poison`. What the
    schedule leaves open comes from ``skipdecode.json`` in the speed adapter, else in the model's folder.

    Raises UserError: an unknown key, a value that does not fit, or a schedule that the model was not trained for.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(given, dict):
        raise UserError(f"{KEY}: must be an object of settings, not {given!r}")
    schedule_keys = [field.name for field in fields(ScheduleSpec)]
    own = {"speed_adapter": (str, type(None)), "unadapted": bool, "self_check": bool, "poison": bool}
    for key, value in given.items():
        if key not in (*schedule_keys, *own):
            raise UserError(f"{KEY}: unknown key {key!r}; {suggestion(key, (*schedule_keys, *own))}")
        if key in own and not isinstance(value, own[key]):  # type: ignore[arg-type]
            raise UserError(f"{KEY}: {key} = {value!r} has the wrong type")
    adapter = given.get("speed_adapter")
    folder = Path(adapter or model)
    if adapter is not None and not (folder / SCHEDULE_FILE).is_file():
        raise UserError(f"{KEY}: speed_adapter = {adapter}: no folder with a {SCHEDULE_FILE}")
    stored = load_spec(folder, num_layers)
    changed = (stored or ScheduleSpec()).overridden({key: given[key] for key in schedule_keys if key in given})
    schedule = read_spec({**changed.to_dict(), "num_layers": num_layers}, num_layers, KEY).build(num_layers)
    if schedule.is_full_depth:
        return Settings(schedule)
    if not given.get("unadapted", False):
        trained = load_trained(folder, num_layers, stored)
        difference = f"{SCHEDULE_FILE} records no training" if trained is None else trained.difference(schedule)
        if difference is not None:
            raise UserError(
                f"{KEY}: {folder} is not adapted to the schedule ({difference}), and its answers would be ruined: run "
                "`skipdecode adapt`, or set unadapted: true"
            )
    return Settings(schedule, adapter, given.get("self_check", True), given.get("poison", False))
