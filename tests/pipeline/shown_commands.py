"""Commands as READMEs and comments of configs/ show them, and their run in this process."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from typer.testing import CliRunner

from pipeline.cli.app import app

ROOT = Path(__file__).parents[2]
README_FILES = ("README.md", "actors/README.md", "pipeline/README.md", "configs/README.md", "infra/README.md")


def blocks(file: str) -> list[list[str]]:
    """The commands of each code block without a language of a Markdown file; lines that go on are joined."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / file).read_text(), re.S | re.M)
    return [commands(block) for language, block in found if not language]


def printed_lines(file: str) -> list[str]:
    """The lines that a Markdown file says are printed: those of its blocks of text."""
    return "".join(re.findall(r"^```text\n(.*?)^```$", (ROOT / file).read_text(), re.S | re.M)).splitlines()


def commands_of_example(name: str) -> list[str]:
    """The commands in the comment of a file in configs/."""
    lines = (ROOT / "configs" / name).read_text().splitlines()
    return commands("\n".join(line.removeprefix("#     ") for line in lines if line.startswith("#     ")))


def commands(text: str) -> list[str]:
    """Its lines without comments, those that end with a backslash joined with the next."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def run_commands(shown: Iterable[str]) -> list[str]:
    """Run them in the current folder; gives what each `skipdecode` printed. `.venv/bin/` in front is left out."""
    said = []
    for line in shown:
        program, *arguments = shlex.split(line.removeprefix(".venv/bin/"))
        if program != "skipdecode":
            called = [sys.executable if program == "python" else program, *arguments]
            subprocess.run(called, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
            continue
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert result.exit_code == 0, (line, result.output)
        said.append(result.stdout)
    return said
