"""What `make demo` prints is what README shows, in a second clone too, whose agreement was measured before."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from shown_commands import ROOT
from typer.testing import CliRunner

from actors.engine.cpu.library import multiplies
from pipeline import demo_data
from pipeline.cli.app import app

pytestmark = [
    pytest.mark.usefixtures("in_process", "own_cache"),
    pytest.mark.skipif(
        not multiplies(torch.bfloat16, torch.device("cpu")),
        reason="README's answers are those of a CPU with AVX512-BF16",
    ),
]


def shown() -> list[str]:
    """The lines that README says `make demo` prints."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```\n(\[demo-00000\]\n.*?)^```$", text, re.S | re.M)
    return str(block).splitlines()


def demo(clone: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> list[str]:
    """Run the commands of `make demo` in a folder that stands for a clone; the lines that they print."""
    clone.mkdir()
    (clone / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(clone)
    recipe = re.findall(r"^\t@\.venv/bin/(.*)$", re.search(r"^demo:.*?\n\n", MAKEFILE, re.S | re.M)[0], re.M)  # type: ignore[index]
    (data, run) = [shlex.split(line) for line in recipe]
    assert data[:3] == ["python", "-m", "pipeline.demo_data"] and run[:2] == ["skipdecode", "run"]
    monkeypatch.setattr(sys, "argv", data[2:])
    demo_data.main()
    result = CliRunner().invoke(app, [*run[1:], *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


MAKEFILE = (ROOT / "Makefile").read_text()


def test_each_clone_prints_the_answers_that_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, figures = shown()[:-1], re.sub(r"[\d,.]+", "9", shown()[-1])
    for clone in ("first", "second"):
        printed = demo(tmp_path / clone, monkeypatch, "--limit", "24", "--set", "schedule.agreement_rows=4")
        assert printed[1 : 1 + len(answers)] == answers
        assert figures in [re.sub(r"[\d,.]+", "9", line) for line in printed]


@pytest.mark.slow
def test_the_whole_demo_prints_the_figures_that_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = demo(tmp_path / "clone", monkeypatch)
    assert set(shown()) <= set(printed)
