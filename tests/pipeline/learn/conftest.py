from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapt_fakes import Fakes, Run, values, write_inputs
from small_training import Small, copying
from typer.testing import CliRunner, Result

from pipeline.cli.app import app
from pipeline.config.load import dump_yaml


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return copying(tmp_path)


@pytest.fixture
def command(tmp_path: Path, checkpoint: Path) -> Run:
    """`adapt`, or another program, over inputs in `tmp_path`, with options, and keys of `adapt` and of the job."""
    inputs = write_inputs(tmp_path / "in")

    def run(*options: str, program: str = "adapt", job: dict[str, Any] | None = None, **adapt: Any) -> Result:
        file = tmp_path / "job.yaml"
        file.write_text(dump_yaml({**values(inputs, tmp_path / "out", checkpoint, **adapt), **(job or {})}))
        return CliRunner().invoke(app, [program, str(file), *options])

    return run
