"""What a training leaves behind to go on from: its recipe, the library's own checkpoints, the record of its end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.engine.errors import UserError
from pipeline.config.tune import TuneConfig
from pipeline.storage.owned_folder import OwnedFolder, check_apart

RECORD = "tune.json"
STATE = "_training"
RECIPE = "recipe.json"
# what may change between a run that was cut off and the one that goes on
FREE: dict[str, Any] = {
    "training": {"epochs", "max_steps", "threads", "eval_steps", "save_steps", "compile"},
    "workers": True,
}


def folder(config: TuneConfig) -> Path:
    """Where a run that was cut off lies."""
    return Path(config.output) / STATE


def finished(config: TuneConfig) -> bool:
    """Whether the output holds the checkpoint that this config makes of these files."""
    record = _read(Path(config.output) / RECORD)
    if not isinstance(record, dict) or "config" not in record or _read(folder(config) / RECIPE) != _recipe(config):
        return False
    asked: Any = config.model_dump(mode="json")
    return _without_hardware(record["config"]) == _without_hardware(asked)


def begin(config: TuneConfig) -> None:
    """Record the recipe, before anything is trained.

    Raises UserError if the output folder holds files of the user, a checkpoint, or the state of another recipe's run.
    """
    output, state = Path(config.output), folder(config)
    models = {"model.path": config.model.path, "loss.teacher": config.loss.teacher}
    others: dict[str, list[str]] = {key: [path] for key, path in models.items() if path is not None}
    check_apart("output", output, {**others, "data.train": config.data.train, "data.dev": config.data.dev})
    owned = OwnedFolder(output, RECORD, "output")
    owned.check([])
    if any(state.glob("checkpoint-*")):
        if _read(state / RECIPE) != _recipe(config):
            raise UserError(
                f"output: {state} holds a run of another recipe, or of files that have changed; remove it, or choose "
                "another output"
            )
        return
    if (output / "config.json").exists():
        raise UserError(f"output: {output} holds a checkpoint already; remove it, or choose another output")
    owned.claim([STATE])
    state.mkdir(exist_ok=True)
    (state / RECIPE).write_text(json.dumps(_recipe(config), indent=2))


def last_checkpoint(config: TuneConfig) -> str | None:
    """The newest one that was written whole: the trainer's state comes last, and older ones go after that."""
    whole = {
        int(one.parent.name.rpartition("-")[2]): one.parent
        for one in folder(config).glob("checkpoint-*/trainer_state.json")
        if _read(one) is not None
    }
    return str(whole[max(whole)]) if whole else None


def finish(config: TuneConfig, save: Callable[[Path], None], record: Mapping[str, Any]) -> None:
    """Move the files that `save` writes into the output folder, and write the record last.

    Raises UserError if a file of the user has one of their names.
    """
    output, new = Path(config.output), folder(config) / "new"
    shutil.rmtree(new, ignore_errors=True)
    save(new)
    owned = OwnedFolder(output, RECORD, "output")
    names = sorted(path.name for path in new.iterdir())
    owned.save({})  # not finished while files are replaced
    owned.claim(names)
    for name in names:
        (new / name).replace(output / name)
    owned.discard(owned.files() - {STATE, *names})  # such as shards of a larger type
    new.rmdir()
    owned.save(record)


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
