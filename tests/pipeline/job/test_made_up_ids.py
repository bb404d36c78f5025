"""Ids that a job makes up: the file's path below the input and the row number, in one form for a whole output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from in_process import InProcess, answered_rows, job_values, run_and_read

from pipeline import nightly
from pipeline.advise.try_rows import answer_first_rows
from pipeline.config.job import JobConfig

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


def test_all_runs_over_growing_files_have_one_form(tmp_path: Path, checkpoint: Path) -> None:
    """They are relative to the input folder of the first run, whatever a later run lists."""
    source = tmp_path / "in"
    write(source, NAMES[:1])
    for path in (source, source / f"{NAMES[1]}.parquet"):
        config = JobConfig.model_validate(job(checkpoint, tmp_path / "out", path, since="last_success"))
        assert len(nightly.run(config, backend=InProcess()).finished) == 1
        write(source, NAMES[1:])
    found = [row for folder in (tmp_path / "out").glob("2*") for row in ids(answered_rows(folder))]
    assert sorted(found) == sorted(of_rows(*NAMES))
