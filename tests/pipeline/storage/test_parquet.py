"""Columns of a Parquet file: those asked for, from as little of the file as need be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.storage.parquet import read_columns


@given(rows=st.integers(0, 9), group=st.integers(1, 4), limit=st.none() | st.integers(1, 12))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_rows_whatever_the_row_groups(tmp_path: Path, rows: int, group: int, limit: int | None) -> None:
    texts, ids = [f"text {row}" for row in range(rows)], [[row] if row % 3 else None for row in range(rows)]
    table = pa.table({"text": pa.array(texts, pa.string()), "ids": pa.array(ids, pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    path = str(tmp_path / "a.parquet")
    assert read_columns(path, ("ids", "text", "ids"), limit) == [ids[:limit], texts[:limit], ids[:limit]]


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
    assert read_columns(str(path), ("good",), limit) == [["a", "b", "c"][:limit]]
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read_columns(str(path), ("torn",), limit)


def test_refusals_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1], "b": [2]}), path)
    (tmp_path / "text").write_text("no Parquet")
    for given_, message in (
        ("s3://bucket/a.parquet", "s3://bucket/a.parquet: tune and evaluate read local files; copy it here"),
        (str(path), f"{path}: no column 'c'; it has a, b"),
        (str(tmp_path / "none"), f"{tmp_path}/none: cannot be read as Parquet"),
        (str(tmp_path / "text"), f"{tmp_path}/text: cannot be read as Parquet"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") as refused:
            read_columns(given_, ("a", "c"))
        assert "\n" not in str(refused.value)


def test_nothing_gives_bytes_or_python_files_to_threads_of_arrow() -> None:
    """Such a thread lets go of them after the read has returned: a process that ends meanwhile aborts, or hangs."""
    threaded = (".read_table", ".ParquetDataset", ".read_csv", ".open_csv", ".read_json", ".open_json")
    found = []
    for path in (*Path("pipeline").rglob("*.py"), *Path("actors").rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name, given = ast.unparse(call.func), {one.arg: ast.unparse(one.value) for one in call.keywords}
            optional = name.endswith(".iter_batches") or (name.endswith(".read") and "columns" in given)
            if (
                name.endswith(threaded)
                or given.keys() & {"pre_buffer", "filesystem"}
                or (optional and given.get("use_threads") != "False")
            ):
                found.append(f"{path}:{call.lineno}: {name}")
    assert found == []
