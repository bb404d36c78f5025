"""What a command prints: no control characters of rows reach the terminal, and no failed write changes the status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import answered_rows, invoke, job_values
from shown_commands import ROOT

from pipeline.messages import escaped
from pipeline.report import summary
from pipeline.storage.errors import StoreFailed

pytestmark = pytest.mark.usefixtures("own_handlers")

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\u200e\u200f]")
CLEAR, TITLE, REVERSED = "1\x1b[2J", "\x1b]0;title\x07\x9b31malpha", "bravo\u202egnp\r\nsecond\x7f line"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (CLEAR, r"1\x1b[2J"),
        ("a\tb\r\nc\x00", "a\\tb\\r\nc\\x00"),
        ("\x7f\x9b\u202e\u2066\u2028\u200f", r"\u007f\u009b\u202e\u2066\u2028\u200f"),
        ("größe 漢字 \U0001f468\u200d\U0001f469 مرحبا a\\b", "größe 漢字 \U0001f468\u200d\U0001f469 مرحبا a\\b"),
    ],
)
def test_control_characters_become_escapes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    as_json = json.dumps(text, ensure_ascii=False)
    assert json.loads(escaped(as_json)) == text


@pytest.fixture
def job(tmp_path: Path, checkpoint: Path) -> dict[str, Any]:
    """A job over three rows with control characters. The second has an error that quotes a value."""
    rows = [
        {"id": CLEAR, "prompt": TITLE, "choices": ["alpha", "\x1b[1mbravo"]},
        {"id": "\u2067second", "prompt": "alpha", "choices": ["\x1b[31malpha", "\x1b[31malpha"]},
        {"id": "third", "prompt": REVERSED, "choices": ["alpha", "\x1b[1mbravo"]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in\u202eput.parquet")
    own = {"id": "id", "choices": "choices"}
    return job_values(tmp_path / "in\u202eput.parquet", tmp_path / "o\x1b[2Jut", checkpoint, input=own)


@pytest.mark.parametrize(
    ("command", "options"),
    [("try", []), ("run", ["--show", "3"]), ("run", ["--json", "--log-json"]), ("plan", [])],
)
def test_no_control_character_of_a_row_is_printed(
    in_process: None, tmp_path: Path, job: dict[str, Any], command: str, options: list[str]
) -> None:
    job["output"]["keep"] = ["prompt"]
    done = invoke(tmp_path, job, *options, command=command)
    assert done.exit_code == 0, done.output
    assert not CONTROLS.search(done.output), done.output
    if command == "try" or "--show" in options:
        assert r"[1\x1b[2J]" in done.stdout and r"\x1b]0;title\x07\u009b31malpha" in done.stdout
        assert r"[\u2067second]" in done.stdout and "bravo\\u202egnp\\r\nsecond\\u007f line" in done.stdout
    if "--json" in options:
        assert json.loads(done.stdout)["output"] == job["output"]["path"]
    if command == "run":
        rows = answered_rows(Path(job["output"]["path"]))
        assert [(row["id"], row["prompt"]) for row in rows][::2] == [(CLEAR, TITLE), ("third", REVERSED)]
        shown = invoke(tmp_path, job, command="report")
        assert "error: 1 x" in shown.stdout and not CONTROLS.search(shown.output), shown.output


def test_an_error_is_printed_without_control_characters(tmp_path: Path, job: dict[str, Any]) -> None:
    job["input"]["id"] = "no\x1b[2J\nsuch"
    done = invoke(tmp_path, job)
    assert done.exit_code == 2 and not CONTROLS.search(done.output) and len(done.stderr.splitlines()) == 1
    assert r"no\x1b[2J" in done.stderr


def test_commands_print_through_functions_that_escape() -> None:
    others = re.compile(r"\b(typer|click)\.echo|\bConsole\(|\bstdout\.write")
    files = [path for path in (ROOT / "pipeline").rglob("*.py") if others.search(path.read_text())]
    # progress escapes what it shows on a live console
    assert {path.name for path in files} == {"progress.py"}


RUN = """
from in_process import InProcess
from pipeline import job
from pipeline.cli.app import main
job.ray_backend = lambda **options: InProcess()
main()
"""


def command(*arguments: str, **files: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a process, over files as its standard output and standard error."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/pipeline", "PYTHONIOENCODING": "latin-1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **files}
    return subprocess.run([sys.executable, "-c", RUN, *arguments], env=env, text=True, encoding="latin-1", **streams)


@pytest.fixture
def closed_pipe() -> Any:
    """The writing end of a pipe that nobody reads, as after `| head`."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("code", [0, 3])
def test_what_cannot_be_printed_changes_no_exit_status_of_a_finished_job(
    in_process: None, tmp_path: Path, checkpoint: Path, closed_pipe: int, code: int
) -> None:
    rows = [{"id": 1, "prompt": "漢"}, {"id": 2, "prompt": None if code else "alpha"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    labels = {"choices": ["größe", "漢字"], "max_error_rate": 0}
    job = job_values(tmp_path / "in.parquet", tmp_path / "out", checkpoint, input={"id": "id"}, **labels)
    del job["sampling"]
    first = invoke(tmp_path, job)
    assert first.exit_code == code, first.output
    shown = ("run", str(tmp_path / "job.yaml"), "--show", "2")
    with open("/dev/full", "w") as full:
        assert command(*shown, stdout=full, stderr=full).returncode == code
        if code:  # the other ways to fail share the code that has just run
            return
        done = command(*shown, stdout=full)
        assert done.returncode == 0
        assert "standard output cannot be written, and is dropped from here on: No space left on" in done.stderr
        assert command("report", str(tmp_path / "out"), stdout=full).returncode == 0
    done = command(*shown)
    assert done.returncode == 0 and "prompt: <s> \\u6f22<sep>\n" in done.stdout
    done = command(*shown, stdout=closed_pipe)
    assert done.returncode == 0 and "standard output" not in done.stderr


def test_a_store_that_fails_after_the_job_has_finished_is_no_failure(
    in_process: None,
    tmp_path: Path,
    job: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(summary, "first_answers", Mock(side_effect=StoreFailed("s3://bucket/out: the store failed")))
    done = invoke(tmp_path, job, "--show", "1", "--json")
    assert done.exit_code == 0, done.output
    assert "s3://bucket/out: the store failed; see `skipdecode report " in caplog.text
    assert json.loads(done.stdout)["rows"] == 3


@pytest.mark.parametrize("tool", ["pandas", "polars", "DuckDB"])
def test_the_printed_lines_read_the_answers_back(in_process: None, tmp_path: Path, checkpoint: Path, tool: str) -> None:
    pq.write_table(pa.table({"id": range(5), "prompt": ["alpha"] * 5}), tmp_path / "in.parquet")
    own = {"input": {"id": "id"}, "shard_rows": 2}
    done = invoke(tmp_path, job_values(tmp_path / "in.parquet", tmp_path / "it's out", checkpoint, **own))
    (line,) = re.findall(f"^in {tool}: (.*)$", done.stdout, re.M)
    library = pytest.importorskip(tool.lower())
    rows = library.sql(line).df() if tool == "DuckDB" else eval(line, {"pd": library, "pl": library})
    assert sorted(rows["id"]) == list(range(5))


def test_a_pipe_that_does_not_block_gets_everything() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen([sys.executable, "-m", "pipeline", "keys"], stdout=write, cwd=ROOT) as process:
        os.close(write)
        with open(read) as reader:
            assert "max_error_rate" in reader.read()
    assert process.returncode == 0
