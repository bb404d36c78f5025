"""A path of a submitted job that is not found: the message says on which host and in which folder it was looked for."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engine.errors import UserError
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.forms import labels_given
from pipeline.config.job import JobConfig, ModelConfig, StorageConfig
from pipeline.config.load import load_config
from pipeline.input.files import list_files

STORAGE = StorageConfig()


@pytest.mark.parametrize(
    "look",
    [
        lambda path, _: list_files([path], STORAGE),
        lambda path, _: list_files([f"{path}/*.parquet"], STORAGE),
        lambda path, _: resolve_checkpoint(ModelConfig(path=path), STORAGE),
        lambda path, _: resolve_checkpoint(ModelConfig(path=f"{path}/x/y"), STORAGE),
        lambda path, model: resolve_checkpoint(ModelConfig(path=str(model), speed_adapter=path), STORAGE),
        lambda path, _: load_config(JobConfig, Path(path)),
        lambda path, _: labels_given(f"{path}.json"),
    ],
    ids=["input", "glob", "model", "folder", "adapter", "job file", "labels"],
)
def test_it_says_where(
    look: Callable[[str, Path], None], tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as here:
        look("none/a", checkpoint)
    assert "host" not in str(here.value)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    host = f" on host {socket.gethostname()} of the cluster"
    with pytest.raises(UserError) as there:
        look("none/a", checkpoint)
    said = str(there.value)
    assert f"{host} in {tmp_path}, which holds what `ray job submit --working-dir` uploaded" in said
    assert "\n" not in said
    with pytest.raises(UserError) as absolute:
        look("/none/a", checkpoint)
    assert f"{host}; give a place that every node reaches, or a path below the folder" in str(absolute.value)
