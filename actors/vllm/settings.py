"""Reads the add-on's settings from key ``skipdecode`` of vLLM's `additional_config`, and from ``skipdecode.json``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError, suggestion
from actors.engine.schedule.file import SCHEDULE_FILE, load_spec, load_trained
from actors.engine.schedule.schedule import Schedule, ScheduleSpec

KEY = "skipdecode"
GRAPHS = False  # whether decode steps run by CUDA graphs by default; False until they have passed their tests on a GPU
OWN: dict[str, Any] = {  # keys in addition to those of a schedule, with their types
    "speed_adapter": str | None,  # folder of an adapter to merge
    "unadapted": bool,  # whether to run a schedule that the model was not trained for
    "graphs": bool,  # whether decode steps run by CUDA graphs where rows of a step run different layers
    "self_check": bool,  # whether to compare attention with a slow reference before the first request
}


@dataclass(frozen=True)
class Settings:
    """Settings of the add-on; see `OWN`."""

    schedule: Schedule
    speed_adapter: str | None = None  # None at full depth, because the base model then runs unchanged
    self_check: bool = True
    graphs: bool = GRAPHS


def read_settings(additional_config: Any, model: str, num_layers: int) -> Settings:
    """Return the add-on's settings for the model in the folder `model`.

    Known keys are those of `OWN` and of a job's `schedule` section. Schedule keys that are not given are taken from
    ``skipdecode.json`` in the folder of the speed adapter, or of the model if there is no adapter.

    Raises UserError if a key is unknown, a value is wrong, or the model was not trained for the schedule.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(given, dict):
        raise UserError(f"{KEY}: must be an object of settings, not {given!r}")
    known = (*(field.name for field in fields(ScheduleSpec)), *OWN)
    for key, value in given.items():
        if key not in known:
            raise UserError(f"{KEY}: unknown key {key!r}; {suggestion(key, known)}")
        if not isinstance(value, OWN.get(key, object)):
            raise UserError(f"{KEY}: {key} = {value!r} has the wrong type")
    adapter = given.get("speed_adapter")
    folder = Path(adapter or model)
    if adapter is not None and not (folder / SCHEDULE_FILE).is_file():
        raise UserError(f"{KEY}: speed_adapter = {adapter}: not a folder with a {SCHEDULE_FILE}")
    stored = load_spec(folder, num_layers)
    changes = {key: value for key, value in given.items() if key not in OWN}
    try:
        schedule = (stored or ScheduleSpec()).overridden(changes).build(num_layers)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None
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
    return Settings(schedule, adapter, given.get("self_check", True), given.get("graphs", GRAPHS))
