"""`skipdecode --version`, and the list of commands."""

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


def test_the_readme_shows_the_commands_of_a_first_job() -> None:
    readme = (ROOT / "README.md").read_text()
    listed = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {"init", "try", "plan", "run", "report"} <= listed
    for name in ("init", "try", "plan", "run", "report"):
        assert f"skipdecode {name} " in readme
