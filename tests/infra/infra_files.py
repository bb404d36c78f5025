"""The files of infra/, and whether the commands in them are ones that the real command lines take."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer
import yaml
from ray.scripts.scripts import cli as ray_cli

from pipeline.cli.app import app

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"


def documents(name: str) -> list[dict[str, Any]]:
    """The YAML documents of a file in infra/."""
    return list(yaml.safe_load_all((INFRA / name).read_text()))


def document(name: str, kind: str, called: str | None = None) -> dict[str, Any]:
    """The one document of a kind, and of a name if there are several."""
    found = [
        one for one in documents(name) if one["kind"] == kind and (called is None or one["metadata"]["name"] == called)
    ]
    assert len(found) == 1, (name, kind, called)
    return found[0]


def parse_run(line: str) -> dict[str, Any]:
    """Options of a `skipdecode run ...` line, as the real command parses them; its error if it does not."""
    words = shlex.split(line)
    assert words[:2] == ["skipdecode", "run"], line
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.commands["run"].make_context("run", words[2:])
    return dict(context.params)


def parse_ray(line: str) -> dict[str, Any]:
    """Options of a `ray start ...` or `ray stop` line, as Ray's own command parses them."""
    words = shlex.split(line)
    assert words[0] == "ray", line
    context = ray_cli.commands[words[1]].make_context(words[1], words[2:])
    return dict(context.params)
