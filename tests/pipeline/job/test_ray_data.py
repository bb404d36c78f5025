"""The READMEs' examples for those who have a Ray Data program already: run as they stand, on other paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

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


def example(says: str, checkpoint: Path, folder: Path) -> str:
    """The Python block of the READMEs that holds `says`, with paths of this test."""
    texts = [path.read_text() for path in (ROOT / "README.md", ROOT / "pipeline" / "README.md")]
    blocks = [one for text in texts for one in re.findall(r"```python\n(.*?)```", text, re.S) if says in one]
    assert len(blocks) == 1
    for name, path in (("configs/demo/checkpoint", checkpoint), ("prompts/", folder / "prompts")):
        assert f'"{name}"' in blocks[0]
        blocks[0] = blocks[0].replace(f'"{name}"', repr(str(path)))
    return blocks[0].replace('"answers/"', repr(str(folder / "answers")))


@pytest.mark.parametrize("actors", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_generator_in_a_program_of_ones_own(
    own_ray: None, checkpoint: Path, prompts: Path, tmp_path: Path, actors: int
) -> None:
    code = example("from actors import Generator", checkpoint, tmp_path)
    assert "num_cpus=1," in code  # a machine of three pretended cores has no room for more than halves
    assert "ActorPoolStrategy(size=2)" in code
    code = code.replace("num_cpus=1,", "num_cpus=0.5,").replace("size=2", f"size={actors}")
    exec(compile(code, "README.md", "exec"), {})
    rows = sorted(pq.read_table(tmp_path / "answers").to_pylist(), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert all(row["error"] is None and row["generated_tokens"] > 0 for row in rows)
    assert all(isinstance(row["generated_text"], str) and row["prompt"].startswith("name[") for row in rows)
    alike = [{row["generated_text"] for row in rows if row["prompt"] == one["prompt"]} for one in rows[:7]]
    assert all(len(texts) == 1 for texts in alike)  # greedy, whichever actor answered


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
