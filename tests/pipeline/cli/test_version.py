"""`skipdecode --version`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from typer.testing import CliRunner

from pipeline.cli.app import app

ROOT = Path(__file__).parents[3]


def test_the_version_is_the_packages() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"skipdecode {version}\n")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
