"""A file in the output folder that no job of this program wrote is never deleted or replaced; nothing else changes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_config
from ray_free_run import MadeUpParts

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.config.job import JobConfig


@pytest.fixture
def config(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """A job of ten rows whose parts no model writes."""
    monkeypatch.setattr(jobs, "ray_backend", lambda **_: MadeUpParts())
    pq.write_table(pa.table({"prompt": [f"prompt {row}" for row in range(10)]}), tmp_path / "in.parquet")
    return job_config(tmp_path / "in.parquet", tmp_path / "out", checkpoint, shard_rows=4)


def state(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"x": [1]}), sink)
    return sink.getvalue()


FOREIGN: dict[str, bytes] = {
    "part-000000.parquet": parquet(),
    "part-000007.parquet": b"not Parquet",
    "others.parquet": parquet(),
    "_SUCCESS": b"",
    "_job/job.json": json.dumps({"name": "nightly build"}).encode(),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_another_programs_file_is_refused_by_name(config: JobConfig, name: str, overwrite: bool) -> None:
    folder = Path(config.output.path)
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(FOREIGN[name])
    before = state(folder)
    with pytest.raises(
        UserError, match=name if overwrite or not name.endswith("parquet") else "Parquet files, but no job"
    ) as caught:
        jobs.run(config, overwrite=overwrite)
    assert state(folder) == before and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["part-000000.parquet", "part-000003.parquet", "_SUCCESS", "answers.jsonl", "answers-0001.jsonl"]
)
def test_another_programs_file_in_a_jobs_own_folder_is_refused_too(config: JobConfig, name: str) -> None:
    jobs.run(config)
    folder = Path(config.output.path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(FOREIGN.get(name, parquet()))
    before = state(folder)
    output = config.output.model_copy(update={"format": "jsonl"})
    with pytest.raises(UserError, match=name):
        jobs.run(config.model_copy(update={"output": output}), overwrite=True)
    assert state(folder) == before


def lost_plan(folder: Path) -> None:
    (folder / "_job" / "job.json").unlink()


def damaged_plan(folder: Path) -> None:
    path = folder / "_job" / "job.json"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("change", [lambda _: None, lost_plan, damaged_plan])
def test_a_jobs_own_files_are_replaced_and_the_users_notes_stay(
    config: JobConfig, change: Callable[[Path], None]
) -> None:
    jobs.run(config)
    folder = Path(config.output.path)
    (folder / "_job" / "notes.txt").write_text("mine")
    (folder / "README.md").write_text("mine")
    change(folder)
    assert jobs.run(config, overwrite=True, limit=5).totals.rows == 5
    assert sorted(path.name for path in folder.glob("*.parquet")) == ["part-000000.parquet", "part-000001.parquet"]
    assert (folder / "_job" / "notes.txt").read_text() == (folder / "README.md").read_text() == "mine"
