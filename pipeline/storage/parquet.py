"""Columns of a local Parquet file, for the commands that read a whole one: tune and evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from actors.engine.errors import UserError

READ_AT_ONCE = 2**14  # rows, where not all are wanted


def read_columns(path: str, columns: Sequence[str], limit: int | None = None) -> list[list[Any]]:
    """The named columns, as lists; no others are read, nor much past the first `limit` rows.

    ValueError of one line names file and column.
    """
    if "://" in path:
        raise UserError(f"{path}: tune and evaluate read local files; copy it here")
    wanted = list(dict.fromkeys(columns))
    try:
        data = ds.dataset(path, format="parquet", partitioning="hive")
        names = data.schema.names
        missing = [column for column in wanted if column not in names]
        if not missing and limit is None:
            table = data.to_table(columns=wanted)
        elif not missing:
            table = data.head(limit, columns=wanted, batch_size=READ_AT_ONCE, batch_readahead=0, fragment_readahead=0)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    if missing:
        raise UserError(f"{path}: no column {missing[0]!r}; it has {', '.join(names)}")
    return [table[column].to_pylist() for column in columns]
