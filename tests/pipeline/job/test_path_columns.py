"""Folders `name=value` of the input's paths are columns of the rows, wherever a job reads columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import job_values, run_and_read
from input_files import uploaded, write_values

from actors.engine.errors import UserError
from pipeline.advise.propose import read_columns
from pipeline.advise.try_rows import answer_first_rows
from pipeline.config.job import JobConfig, StorageConfig

PARTITIONS = ["dt=2026-11-01/lang=de", "dt=2026-11-02/lang=fr%20ca", "dt=2026-11-03/lang=__HIVE_DEFAULT_PARTITION__"]
ROWS = [("2026-11-01", "de"), ("2026-11-02", "fr ca"), ("2026-11-03", None)]


def write(folder: Path, kind: str, own: dict[str, Any] | None = None) -> None:
    """Two rows in each partition. own: further columns of the files."""
    for number, partition in enumerate(PARTITIONS):
        (folder / partition).mkdir(parents=True)
        rows = [{"prompt": f"name[{number}{row}]", **(own or {})} for row in range(2)]
        write_values(folder / partition / f"a.{kind}", rows)


def job(path: str, checkpoint: Path, output: Path, keep: list[str], **sections: Any) -> dict[str, Any]:
    source = {"id": "dt", "template": "{{ lang or '' }} {{ prompt }}"}
    own = {"sampling": {"max_new_tokens": 2}, "shard_rows": 2}
    return job_values(path, output, checkpoint, input=source, output={"keep": keep}, **own, **sections)


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        run_and_read(values)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_they_are_kept_used_by_templates_and_as_id(tmp_path: Path, checkpoint: Path, kind: str) -> None:
    write(tmp_path / "in", kind)
    values = job(f"{tmp_path}/in/**/*.{kind}", checkpoint, tmp_path / "out", ["lang"])
    rows = run_and_read(values)
    assert [(row["id"], row["lang"]) for row in rows] == [row for row in ROWS for _ in range(2)]
    assert {row["error"] for row in rows} == {None}
    tried = answer_first_rows(JobConfig.model_validate(values), 3)
    assert "de name[00]" in tried[0].prompt and tried[2].id == "2026-11-02"


def test_they_are_read_in_a_bucket_and_proposed_by_init(tmp_path: Path, checkpoint: Path, s3: StorageConfig) -> None:
    write(tmp_path / "in", "parquet")
    root = uploaded(tmp_path / "in", s3)
    storage = s3.model_dump()
    rows = run_and_read(job(root, checkpoint, tmp_path / "out", ["lang"], storage=storage))
    assert [(row["id"], row["lang"]) for row in rows] == [row for row in ROWS for _ in range(2)]
    _, schema = read_columns(root, s3)
    assert schema.field("dt").type == schema.field("lang").type == pa.string()


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_file_that_has_the_column_too_must_agree(tmp_path: Path, checkpoint: Path, kind: str) -> None:
    folder = tmp_path / "in" / "n=07"
    folder.mkdir(parents=True)
    write(folder, kind, {"n": 7})
    values = job(f"{tmp_path}/in/**/*.{kind}", checkpoint, tmp_path / "out", ["n"])
    if kind == "csv":
        assert "column 'n' is '7' in row 0, but '07' in the file's path" in refusal(values)  # text, not numbers
    else:
        assert {row["n"] for row in run_and_read(values)} == {7}
    folder.rename(tmp_path / "in" / "n=8")
    said = refusal(job(f"{tmp_path}/in/**/*.{kind}", checkpoint, tmp_path / "other", ["n"]))
    found = "'7'" if kind == "csv" else "7"
    assert f"/n=8/dt=2026-11-01/lang=de/a.{kind}: column 'n' is {found} in row 0, but '8' in the file's path; " in said


def test_a_column_that_neither_file_nor_path_has_is_named(tmp_path: Path, checkpoint: Path) -> None:
    write(tmp_path / "in", "parquet")
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "in" / "dt=2026-11-01" / "b.parquet")
    said = refusal(job(str(tmp_path / "in"), checkpoint, tmp_path / "out", []))
    assert said == f"{tmp_path}/in/dt=2026-11-01/b.parquet: no column 'lang'; it has prompt, dt"
