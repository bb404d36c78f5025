"""Parquet input files of tests."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path: Path, groups: list[int], first: int = 0) -> None:
    """A file whose row groups have these many rows, numbered from `first`."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("other", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            ids = list(range(first, first + rows))
            values = {"id": ids, "prompt": [f"prompt {row}" for row in ids], "other": [0.5] * rows}
            writer.write_table(pa.table(values, schema=schema), row_group_size=max(rows, 1))
            first += rows
