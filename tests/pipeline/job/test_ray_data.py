"""The recipe for those who have a Ray Data program already, as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from cli_command import HANGING_SECONDS
from shown_commands import printed_lines

from actors.answers import ANSWER_TYPES

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[3]


def started(code: str, folder: Path, cpus: int) -> subprocess.Popen[str]:
    """Start a program in a process of its own, in a folder that stands for a clone, on a Ray of so many CPUs."""
    (folder / "configs").symlink_to(ROOT / "configs")
    settings = f"{{'address': 'local', 'num_cpus': {cpus}, 'include_dashboard': False}}"
    code = f"from pipeline.run import ray_head\nray_head.start({settings})\n{code}"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def program() -> str:
    return (ROOT / "configs" / "recipes" / "ray_data" / "program.py").read_text()


def test_the_generator_in_a_program_of_ones_own_runs_on_one_cpu(tmp_path: Path) -> None:
    """The recipe's program, as it stands, but that it also writes its answers: without an error, the column `error` has
    a type, and files of blocks with and without errors can be read together."""
    writes = "answers = answers.materialize()\n    answers.write_parquet('answers')\n    for row in answers.take_all():"
    assert "for row in answers.take_all():" in program()
    process = started(program().replace("for row in answers.take_all():", writes), tmp_path, 1)
    try:
        said, _ = process.communicate(timeout=HANGING_SECONDS)
    finally:
        end(process)
    assert process.returncode == 0, said
    shown = printed_lines("configs/recipes/ray_data/README.md")
    assert len(shown) == 4 and set(shown) <= set(said.splitlines()), said
    schema = pq.read_schema(next((tmp_path / "answers").glob("*.parquet")))
    assert {name: schema.field(name).type for name in ANSWER_TYPES} == ANSWER_TYPES


@pytest.mark.slow
def test_a_pool_that_takes_every_cpu_says_so(tmp_path: Path) -> None:
    assert "num_cpus=0," in program()
    process = started(program().replace("num_cpus=0,", "num_cpus=1,"), tmp_path, 2)
    deadline = threading.Timer(HANGING_SECONDS, end, [process])
    deadline.start()
    try:
        assert process.stdout is not None
        assert any("no rows came in 20 s, and 0 CPUs of the cluster are free" in line for line in process.stdout)
    finally:
        deadline.cancel()
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """End a program and the Ray that it started."""
    if process.poll() is not None:
        return
    found = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    for one in psutil.wait_procs(found, timeout=20)[1]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
