"""What `make demo` prints is what README shows, in a second clone too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from moved_clock import Clock
from shown_commands import ROOT
from typer.testing import CliRunner

from actors.answers import Prompt
from actors.engine.cpu.kernels import multiplies
from actors.engine.errors import UserError
from actors.generator import Generator
from pipeline.advise.demo_data import write_demo, write_prompts
from pipeline.cli.app import app
from pipeline.config.job import JobConfig
from pipeline.config.load import load_config

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
    """Run the demo, with options of `run`, in a new folder; the lines that it prints."""
    clone.mkdir()
    monkeypatch.chdir(clone)
    result = CliRunner().invoke(app, ["run", str(write_demo(Path("demo"))), "--show", "5", *options])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_make_runs_the_command() -> None:
    assert "\ndemo: .venv/installed\n\t@.venv/bin/skipdecode demo work/demo\n" in (ROOT / "Makefile").read_text()
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0 and "toy model" in result.stdout


def test_another_number_of_prompts_or_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    job = load_config(JobConfig, write_demo(tmp_path / "demo #1", 16))
    assert job.input.path == [f"{tmp_path}/demo #1/prompts"] and Path(job.model.path).is_dir()
    (tmp_path / "file").write_text("")
    for folder, rows, says in (
        ("demo #1", "24", "exists with other prompts; repeat the earlier command, or name another folder"),
        ("file", "16", "cannot be written"),
    ):
        result = CliRunner().invoke(app, ["demo", str(tmp_path / folder), "--rows", rows])
        assert result.exit_code == 2 and says in result.stderr, result.output


def test_a_demo_that_was_interrupted_goes_on_only_with_the_same_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "demo #1" / "prompts"
    write_demo(tmp_path / "demo #1", 16)
    whole = {path.name: path.read_bytes() for path in prompts.iterdir()}
    for name in sorted(whole)[3:]:
        (prompts / name).unlink()
    with pytest.raises(UserError, match=r"restaurants-00\.parquet: exists with other prompts"):
        write_demo(tmp_path / "demo #1", 24)
    assert len(list(prompts.iterdir())) == 3
    (tmp_path / "demo #1" / "demo.yaml").write_text("changed")  # by the user
    write_demo(tmp_path / "demo #1", 16)
    assert {path.name: path.read_bytes() for path in prompts.iterdir()} == whole
    assert (tmp_path / "demo #1" / "demo.yaml").read_text() == "changed"
    for rows, files, seed in ((16, 8, 1), (2, 1, 0)):  # other prompts, and a file too many
        with pytest.raises(UserError, match="exists with other prompts"):
            write_prompts(prompts, rows, files, seed)
    write_prompts(prompts, 18, 9, 0)
    (prompts / "restaurants-00.parquet").write_text("damaged")
    with pytest.raises(UserError, match=r"restaurants-00\.parquet: exists with other prompts"):
        write_demo(tmp_path / "demo #1", 18)


def test_each_clone_prints_the_answers_that_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = shown()[:3]
    for clone in ("first", "second"):
        printed = demo(tmp_path / clone, monkeypatch, "--limit", "24")
        assert printed[1 : 1 + len(answers)] == answers


def test_the_demo_compares_three_speeds_on_the_same_prompts_for_ten_seconds_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt takes 10 ms a layer of its first token; the demo's speed begins at 11 layers, a constant depth at 8."""
    clock, answered = Clock(), list[int]()

    def answer(generator: Generator, prompts: list[Prompt]) -> None:
        clock.now += len(prompts) * generator.schedule.depth(0) / 100
        answered.append(len(prompts))

    monkeypatch.setattr("pipeline.advise.timing.time", clock)
    monkeypatch.setattr(Generator, "answer", answer)
    few = CliRunner().invoke(app, ["demo", str(tmp_path / "few"), "--rows", "63"])  # less than a batch
    assert few.exit_code == 0 and "times as fast" not in few.stdout and not answered
    result = CliRunner().invoke(app, ["demo", str(tmp_path / "demo"), "--rows", "72"])
    assert result.exit_code == 0, result.output
    said = result.stdout[result.stdout.index("the same ") :].splitlines()[:4]
    assert [re.sub(r"[\d,.]+", "9", line) for line in said] == [re.sub(r"[\d,.]+", "9", line) for line in shown()[3:]]
    assert said[0].startswith("the same 136 prompts ")
    assert said[1:] == [
        "  1x, all layers: 32.6 s",
        "  3x, falling depth: 15.0 s, 2.18 times as fast",
        "  3x, constant depth: 10.9 s, 3.00 times as fast",
    ]
    assert answered == [64] * 6 + [8] * 3 + [64] * 3  # the first three warm up
