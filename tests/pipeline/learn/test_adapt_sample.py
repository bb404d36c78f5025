"""The rows that an adaptation draws from a job's input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from adapt_fakes import ROWS, values, write_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.job import JobConfig, StorageConfig
from pipeline.input.files import list_files
from pipeline.learn.adapt.rows import layout, read_sample
from pipeline.storage.folder import open_folder


def sampled(config: JobConfig, drawn: list[int]) -> pa.Table:
    files, schema = layout(config, list_files(config.input.path, config.storage))
    table, readable = read_sample(config, files, schema, drawn)
    assert readable == [True] * len(drawn)
    return table


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs") / "in")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1))
def test_the_sample_is_the_rows_drawn_in_their_order(inputs: Path, checkpoint: Path, drawn: list[int]) -> None:
    folder = inputs.parent
    config = JobConfig.model_validate(values(inputs, folder / "out", checkpoint, references="right"))
    table = sampled(config, drawn)
    whole = pq.read_table(inputs)
    assert table.column_names == ["key", "q", "right"]  # what the job reads, and the references
    assert table.schema.field("key").type == pa.int16()
    assert table.to_pylist() == whole.select(table.column_names).take(drawn).to_pylist()


def test_only_row_groups_with_drawn_rows_are_read(
    inputs: Path, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JobConfig.model_validate(values(inputs, tmp_path / "out", checkpoint))
    read: list[tuple[str, int]] = []
    plain = pq.ParquetFile.iter_batches

    def noting(file: Any, *args: Any, row_groups: list[int], **more: Any) -> Any:
        read.append((str(file.metadata.num_rows), row_groups[0]))
        return plain(file, *args, row_groups=row_groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    sampled(config, [29, 3, 0])
    assert read == [("13", 0), ("16", 3)]


def test_the_sample_of_a_bucket(s3: StorageConfig, inputs: Path, tmp_path: Path, checkpoint: Path) -> None:
    bucket = open_folder("s3://bucket/adapt", s3)
    for path in inputs.iterdir():
        bucket.replace(path.name, path.read_bytes())
    job = {**values("s3://bucket/adapt", tmp_path / "out", checkpoint), "storage": s3.model_dump()}
    table = sampled(JobConfig.model_validate(job), [20, 4])
    assert table["key"].to_pylist() == [20, 4]
