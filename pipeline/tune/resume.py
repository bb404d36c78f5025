"""What a training leaves behind to go on from: its recipe, the library's own checkpoints, the record of its end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from pipeline.config.tune import TuneConfig

RECORD = "tune.json"
RECIPE = "recipe.json"
# what may change between a run that was cut off and the one that goes on
FREE: dict[str, Any] = {
    "training": {"epochs", "max_steps", "threads", "eval_steps", "save_steps", "compile"},
    "workers": True,
}


def folder(config: TuneConfig) -> Path:
    """Where a run that was cut off lies."""
    return Path(config.output) / "_training"


def finished(config: TuneConfig) -> bool:
    """Whether the output holds what this very config makes of these very files."""
    record = _read(Path(config.output) / RECORD)
    if record is None or _read(folder(config) / RECIPE) != _recipe(config):
        return False
    asked: Any = config.model_dump(mode="json")
    return _without_hardware(record["config"]) == _without_hardware(asked)


def begin(config: TuneConfig) -> None:
    """Note the recipe, before anything is trained.

    Raises ValueError if the output holds a checkpoint of something else, or the state of another recipe's run.
    """
    state = folder(config)
    if state.is_dir() and any(state.glob("checkpoint-*")):
        if _read(state / RECIPE) != _recipe(config):
            raise UserError(
                f"output: {state} holds a run of another recipe, or of files that have changed; remove it, or choose "
                "another output"
            )
        return
    if (Path(config.output) / "config.json").exists():
        raise UserError(f"output: {config.output} holds a checkpoint already; remove it, or choose another output")
    state.mkdir(parents=True, exist_ok=True)
    (state / RECIPE).write_text(json.dumps(_recipe(config), indent=2))


def last_checkpoint(config: TuneConfig) -> str | None:
    """The newest one that was written whole: the trainer's state comes last, and older ones go after that."""
    whole = {
        int(one.parent.name.rpartition("-")[2]): one.parent
        for one in folder(config).glob("checkpoint-*/trainer_state.json")
        if _read(one) is not None
    }
    return str(whole[max(whole)]) if whole else None


def finish(config: TuneConfig, record: Mapping[str, Any]) -> None:
    """The record of a training that has come to its end; last, and in one piece."""
    path = Path(config.output) / RECORD
    path.with_suffix(".tmp").write_text(json.dumps(record, indent=2) + "\n")
    os.replace(path.with_suffix(".tmp"), path)


def _recipe(config: TuneConfig) -> dict[str, Any]:
    """The config but what is free, and the size and time of every file that it reads."""
    files = [Path(one) for one in (*config.data.train, *config.data.dev)]
    for checkpoint in (config.model.path, config.loss.teacher):
        if checkpoint is not None:
            files += sorted(Path(checkpoint).glob("*.safetensors"))
    versions = {str(one): [one.stat().st_size, one.stat().st_mtime_ns] for one in files}
    recipe: dict[str, Any] = json.loads(config.model_dump_json(exclude=FREE))
    return {"config": recipe, "files": versions}


def _without_hardware(config: Mapping[str, Any]) -> dict[str, Any]:
    training = {key: value for key, value in config["training"].items() if key not in ("threads", "compile")}
    return {**config, "training": training, "workers": None}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
