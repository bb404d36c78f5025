"""The READMEs' examples for those who have a Ray Data program already: run as they stand, on other paths."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

ROOT = Path(__file__).parents[3]
ROWS = 120


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    folder = tmp_path / "prompts"
    folder.mkdir()
    table = pa.table({"id": list(range(ROWS)), "prompt": [f"name[Zizzi], area[{row % 7}]" for row in range(ROWS)]})
    for part in range(2):
        pq.write_table(table.slice(part * ROWS // 2, ROWS // 2), folder / f"{part}.parquet")
    return folder


def blocks_of(file: str) -> list[str]:
    """The Python blocks of a README."""
    return re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.S)


def example(says: str, checkpoint: Path, folder: Path) -> str:
    """The Python block of pipeline/README.md that holds `says`, with paths of this test."""
    blocks = [one for one in blocks_of("pipeline/README.md") if says in one]
    assert len(blocks) == 1
    for name, path in (("configs/demo/checkpoint", checkpoint), ("prompts/", folder / "prompts")):
        assert f'"{name}"' in blocks[0]
        blocks[0] = blocks[0].replace(f'"{name}"', repr(str(path)))
    return blocks[0].replace('"answers/"', repr(str(folder / "answers")))


def started(code: str, folder: Path, cpus: int) -> subprocess.Popen[str]:
    """Start a program in a process of its own, in a folder that stands for a clone, on a Ray of so many CPUs."""
    (folder / "configs").symlink_to(ROOT / "configs")
    code = f"import ray\nray.init(address='local', num_cpus={cpus}, include_dashboard=False)\n{code}"
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
    (block,) = [one for one in blocks_of("README.md") if "from actors import Generator" in one]
    return block


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_generator_in_a_program_of_ones_own(
    own_ray: None, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """README's program, as it stands. alone: in a process of its own, on a Ray of one CPU."""
    if alone:
        process = started(program(), tmp_path, 1)
        try:
            said, _ = process.communicate(timeout=300)
        finally:
            end(process)
        assert process.returncode == 0, said
    else:
        (tmp_path / "configs").symlink_to(ROOT / "configs")
        monkeypatch.chdir(tmp_path)
        exec(compile(program(), "README.md", "exec"), {})
    rows = sorted(pq.read_table(tmp_path / "answers").to_pylist(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert all(row["error"] is None and row["generated_tokens"] > 0 for row in rows)
    assert all(isinstance(row["generated_text"], str) and row["prompt"].startswith("name[") for row in rows)
    alike = [{row["generated_text"] for row in rows if row["prompt"] == one["prompt"]} for one in rows[:7]]
    assert all(len(texts) == 1 for texts in alike)  # greedy, whichever actor answered


@pytest.mark.slow
def test_a_pool_that_takes_every_cpu_says_so(prompts: Path, tmp_path: Path) -> None:
    assert "num_cpus=0," in program()
    process = started(program().replace("num_cpus=0,", "num_cpus=1,"), tmp_path, 2)
    deadline = threading.Timer(300, end, [process])
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


def test_the_same_job_written_with_ray_data_llm_is_valid(
    own_ray: None, checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    """All but its last line, which would start vLLM."""
    tree = ast.parse(example("ray.data.llm", checkpoint, tmp_path))
    assert "write_parquet" in ast.unparse(tree.body[-1])
    names: dict[str, Any] = {}
    exec(compile(ast.Module(tree.body[:-1], []), "README.md", "exec"), names)
    assert any("vLLM" in stage for stage in names["processor"].list_stage_names())
    assert isinstance(names["answers"], ray.data.Dataset)
