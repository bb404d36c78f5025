"""Ids that a job makes up: the file's path below the input and the row number, in one form for a whole output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import InProcess, answered_rows, job_values, run_and_read, run_in_process, run_interrupted

from pipeline import nightly
from pipeline.config.job import JobConfig
from pipeline.plan import manifest
from pipeline.try_rows import answer_first_rows

NAMES = ["d=1/part-0", "d=2/part-0"]


def write(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": ["alpha", "bravo"]}), folder / f"{name}.parquet")


def job(checkpoint: Path, output: Path, *paths: Path, **section: Any) -> dict[str, Any]:
    source = {"path": [str(path) for path in paths], **section}
    return job_values(paths[0], output, checkpoint, input=source, sampling={"max_new_tokens": 2}, shard_rows=2)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def of_rows(*names: str) -> list[str]:
    return [f"{name}.parquet:{row}" for name in names for row in range(2)]


def test_they_hold_the_path_below_the_input(tmp_path: Path, checkpoint: Path) -> None:
    source = tmp_path / "in"
    write(source, NAMES)
    values = job(checkpoint, tmp_path / "folder", source)
    assert ids(run_and_read(values)) == of_rows(*NAMES)
    assert [row.id for row in answer_first_rows(JobConfig.model_validate(values), 3)] == of_rows(*NAMES)[:3]
    assert ids(run_and_read(job(checkpoint, tmp_path / "glob", source / "*" / "*"))) == of_rows(*NAMES)
    both = job(checkpoint, tmp_path / "both", source / "d=1", source / "d=2" / "part-0.parquet")
    assert ids(run_and_read(both)) == of_rows(*NAMES)
    one = job(checkpoint, tmp_path / "one", source / "d=2" / "part-0.parquet")
    assert ids(run_and_read(one)) == of_rows("part-0")


def test_a_job_that_an_earlier_version_began_keeps_their_form(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "in", NAMES)
    config = JobConfig.model_validate(job(checkpoint, tmp_path / "out", tmp_path / "in"))
    with monkeypatch.context() as earlier:
        earlier.setattr(manifest, "input_root", lambda *_: None)
        run_interrupted(earlier, config)
    assert len(answered_rows(tmp_path / "out")) == 2
    run_in_process(config)
    assert ids(answered_rows(tmp_path / "out")) == of_rows("part-0") * 2


@pytest.mark.parametrize("earlier_version", [True, False])
def test_all_runs_over_a_growing_folder_have_one_form(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, earlier_version: bool
) -> None:
    write(tmp_path / "in", NAMES[:1])
    config = JobConfig.model_validate(job(checkpoint, tmp_path / "out", tmp_path / "in", since="last_success"))
    with monkeypatch.context() as earlier:
        if earlier_version:
            earlier.setattr(manifest, "input_root", lambda *_: None)
        nightly.run(config, backend=InProcess())
    write(tmp_path / "in", NAMES[1:])
    nightly.run(config, backend=InProcess())
    found = [row for folder in (tmp_path / "out").glob("2*") for row in ids(answered_rows(folder))]
    assert sorted(found) == sorted(of_rows("part-0") * 2 if earlier_version else of_rows(*NAMES))
