"""An output folder: files of others stay as they are, and the same command over a finished job changes nothing."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import files_of, job_config, report

from actors.engine.errors import UserError
from pipeline import job as jobs
from pipeline.config.job import JobConfig


@pytest.fixture
def config(tmp_path: Path, checkpoint: Path, made_up_parts: None) -> JobConfig:
    """A job of ten rows whose parts no model writes."""
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


OWN_FOLDERS = ("", "commits", "segments", "quarantine", "tmp", "lease")


@pytest.mark.parametrize("change", [lambda _: None, lost_plan, damaged_plan])
def test_a_jobs_own_files_are_replaced_and_the_users_notes_stay(
    config: JobConfig, change: Callable[[Path], None]
) -> None:
    jobs.run(config)
    folder = Path(config.output.path)
    notes = [folder / "README.md", *(folder / "_job" / name / "notes.txt" for name in OWN_FOLDERS)]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    change(folder)
    assert jobs.run(config, overwrite=True, limit=5).totals.rows == 5
    assert sorted(path.name for path in folder.glob("*.parquet")) == ["part-000000.parquet", "part-000001.parquet"]
    assert [path.read_text() for path in notes] == ["mine"] * len(notes)


def test_a_finished_job_run_again_writes_nothing(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch, reports: None
) -> None:
    first = jobs.run(config)
    before = files_of(config.output.path)
    assert f"{config.output.path}/_job/report.html" in before

    def write(*_: object) -> None:
        raise PermissionError("read-only")

    for name in ("create", "replace", "remove", "remove_all"):
        monkeypatch.setattr(f"pipeline.storage.folder.LocalFolder.{name}", write)
    again = jobs.run(config)
    assert (again.totals, again.fresh_rows) == (first.totals, 0)
    assert files_of(config.output.path) == before


def test_an_output_that_is_the_input_folder_is_refused_without_proposing_to_overwrite(config: JobConfig) -> None:
    folder = Path(config.input.path[0]).parent
    for path in (f"{folder}/*.parquet", str(folder)):
        section = config.input.model_copy(update={"path": [path]})
        values = {"input": section, "output": config.output.model_copy(update={"path": str(folder)})}
        with pytest.raises(UserError, match=r"^output\.path: .*; choose another folder$"):
            jobs.run(config.model_copy(update=values))


def test_an_unfinished_job_goes_on_after_a_file_was_uploaded_again(config: JobConfig) -> None:
    jobs.run(config)
    path, part = Path(config.input.path[0]), Path(config.output.path) / "part-000001.parquet"
    part.unlink()
    os.utime(path, ns=(1, 1))
    assert jobs.run(config).fresh_rows == 4


def test_a_half_done_job_with_a_damaged_plan_is_refused_and_answers_nothing(config: JobConfig) -> None:
    jobs.run(config)
    output = Path(config.output.path)
    (output / "_SUCCESS").unlink()
    (output / "part-000001.parquet").unlink()
    plan = output / "_job" / "plan.pq"
    data = bytearray(plan.read_bytes())
    data[len(data) // 2] ^= 4
    plan.write_bytes(bytes(data))
    before = files_of(output)
    with pytest.raises(UserError, match=r"^.*/_job/plan\.pq: damaged .*; restore the file from a copy, or start"):
        jobs.run(config)
    assert files_of(output) == before


@pytest.mark.parametrize("content", ["", "{}", "[]", "[{}]", '{"rows": null, "files": 1, "device_seconds": "x"}'])
def test_damaged_files_for_reports_are_ignored(config: JobConfig, content: str) -> None:
    config = config.model_copy(update={"input": config.input.model_copy(update={"id": "prompt"})})
    jobs.run(config)
    output = Path(config.output.path)
    for name in ("_job/runs.json", "_job/results.json"):
        (output / name).write_text(content)
    assert jobs.run(config).totals.rows == 10
    assert report(output).exit_code == 0
    (output / "part-000001.parquet").unlink()
    assert jobs.run(config).fresh_rows == 4
