"""Columns of a local Parquet file, for the commands that read a whole one: tune and evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def read_columns(path: str, columns: Sequence[str]) -> list[list[Any]]:
    """The named columns, as lists. ValueError of one line names file and column."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    for column in columns:
        if column not in table.column_names:
            raise ValueError(f"{path}: no column {column!r}; it has {', '.join(table.column_names)}")
    return [table[column].to_pylist() for column in columns]
