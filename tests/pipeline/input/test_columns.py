"""Whole columns of files: those asked for, from as little of a file as need be, those of its path included."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.rows import read_columns

LOCAL = StorageConfig()


@given(rows=st.integers(0, 9), group=st.integers(1, 4), limit=st.none() | st.integers(1, 12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_rows_whatever_the_row_groups(tmp_path: Path, rows: int, group: int, limit: int | None) -> None:
    texts, ids = [f"text {row}" for row in range(rows)], [[row] if row % 3 else None for row in range(rows)]
    table = pa.table({"text": pa.array(texts, pa.string()), "ids": pa.array(ids, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    path = str(tmp_path / "a.parquet")
    assert read_columns(path, ("ids", "text", "ids"), LOCAL, limit) == {"ids": ids[:limit], "text": texts[:limit]}


@pytest.mark.parametrize("limit", [None, 2])
def test_other_columns_are_not_read(tmp_path: Path, limit: int | None) -> None:
    """Their pages are torn, and nobody minds."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"good": ["a", "b", "c"], "torn": ["x" * 9999] * 3}), path, compression="none")
    torn = pq.read_metadata(path).row_group(0).column(1)
    start = torn.dictionary_page_offset or torn.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + torn.total_compressed_size] = b"\xff" * torn.total_compressed_size
    path.write_bytes(data)
    assert read_columns(str(path), ("good",), LOCAL, limit) == {"good": ["a", "b", "c"][:limit]}
    with pytest.raises(UserError, match="cannot be read, since it is damaged or cut short"):
        read_columns(str(path), ("torn",), LOCAL, limit)


def test_refusals_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    (tmp_path / "text").write_text("no Parquet")
    for place, message in (
        (str(path), f"{path}: no column 'c'; it has a, b"),
        (str(tmp_path / "none"), f"{tmp_path}/none: no such file or folder"),
        (str(tmp_path / "text"), f"{tmp_path}/text: not readable as Parquet"),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(message)}") as refused:
            read_columns(place, ("a", "c"), LOCAL)
        assert "\n" not in str(refused.value)


def test_columns_of_paths_and_text_files_and_those_that_may_be_missing(tmp_path: Path) -> None:
    for day in ("1", "__HIVE_DEFAULT_PARTITION__", "a%20b"):
        (tmp_path / f"dt={day}").mkdir()
        (tmp_path / f"dt={day}" / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    read = read_columns(f"{tmp_path}/*/*.jsonl", ["text", "dt"], LOCAL, limit=5, optional=["id"])
    assert read == {"text": ["x", "y", "x", "y", "x"], "dt": ["1", "1", None, None, "a b"]}
