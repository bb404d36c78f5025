"""Manages a training's output folder: records the recipe, checks it on resume, and moves the results into place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from actors.engine.model.speed_adapter import FILES
from pipeline.config.job import StorageConfig
from pipeline.config.tune import TuneConfig
from pipeline.input.files import list_files
from pipeline.storage.owned_folder import OwnedFolder, check_apart, local_path
from pipeline.storage.working_dir import local_version

RECORD, STATE, STATE_FILE, RECIPE = "tune.json", "_training", "state.pt", "recipe.json"
# keys that may change when an interrupted training is resumed
FREE: dict[str, Any] = {"training": {"epochs", "max_steps", "threads", "eval_steps", "save_steps"}}


def folder(config: TuneConfig) -> Path:
    """Return the folder that holds the training's saved state."""
    return Path(config.output) / STATE


def finished(config: TuneConfig) -> bool:
    """Tell whether the output holds the result of a finished training with this config and the same input files."""
    record = _read(Path(config.output) / RECORD)
    if not isinstance(record, dict) or "config" not in record or not _is_recorded(config):
        return False
    return _without_hardware(record["config"]) == _without_hardware(config.model_dump(mode="json"))


def begin(config: TuneConfig) -> None:
    """Record the recipe in the output folder before the training starts; keep the record if the training is resumed.

    Raises UserError if the output folder holds files of the user, a checkpoint, or a training with another recipe.
    """
    output, state = local_path("output", config.output), folder(config)
    models = {"model.path": config.model.path, "loss.teacher": config.loss.teacher, "adapter.start": _start(config)}
    others: dict[str, list[str]] = {key: [path] for key, path in models.items() if path is not None}
    check_apart("output", output, {**others, "data.train": config.data.train, "data.dev": config.data.dev})
    owned = OwnedFolder(output, RECORD, "output")
    owned.check([])
    if (state / STATE_FILE).exists():
        if not _is_recorded(config):
            raise UserError(
                f"output: {state} holds a training with another recipe or other input files; remove this folder, or "
                "choose another output"
            )
        return
    if any((output / name).exists() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"output: {output} holds a checkpoint already; remove it, or choose another output")
    owned.claim([STATE])
    state.mkdir(exist_ok=True)
    (state / RECIPE).write_text(json.dumps(_recipe(config), indent=2))


def finish(config: TuneConfig, save: Callable[[Path], None], record: Mapping[str, Any]) -> None:
    """Call `save` on a temporary folder, move its files into the output folder, and write `record` last.

    Raises UserError if a file of the user in the output folder has the name of a new file.
    """
    output, new = Path(config.output), folder(config) / "new"
    shutil.rmtree(new, ignore_errors=True)
    save(new)
    owned = OwnedFolder(output, RECORD, "output")
    names = sorted(path.name for path in new.iterdir())
    owned.save({})  # until the record is complete, the training does not count as finished
    owned.claim(names)
    for name in names:
        (new / name).replace(output / name)
    owned.discard(owned.files() - {STATE, *names})  # for example weight files of an earlier training
    new.rmdir()
    owned.save(record)


def _is_recorded(config: TuneConfig) -> bool:
    """Tell whether the recorded recipe equals the recipe of `config`."""
    return bool(_read(folder(config) / RECIPE) == _recipe(config))


def _recipe(config: TuneConfig) -> dict[str, Any]:
    """Return the values that a resumed training must share: config (without keys in `FREE`) and file versions."""
    data = dict[str, Any]()
    for path in (*config.data.train, *config.data.dev):
        listed = {} if Path(path).is_file() else list_files([path], StorageConfig())
        data |= {url: [size, tag] for url, (size, tag) in listed.items()}
        data |= {} if listed else _versions([Path(path)])
    models = [Path(path) for path in (config.model.path, config.loss.teacher) if path is not None]
    start = _start(config)
    return {
        "config": config.model_dump(mode="json", exclude=FREE),
        "files": data | _versions([path for model in models for path in sorted(model.glob("*.safetensors"))]),
        "start": _versions([] if start is None else [Path(start) / name for name in FILES]),
    }


def _start(config: TuneConfig) -> str | None:
    return None if config.adapter is None else config.adapter.start


def _versions(files: list[Path]) -> dict[str, list[int | str]]:
    """Return path -> size in bytes and `local_version`."""
    states = {str(path): path.stat() for path in files}
    return {path: [state.st_size, local_version(os.path.abspath(path), state)] for path, state in states.items()}


def _without_hardware(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "training": {**config["training"], "threads": None}}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
