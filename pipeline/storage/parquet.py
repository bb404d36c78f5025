"""Parquet files that are read whole: of bytes, and columns of local files, for tune and evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.messages import listed

READ_AT_ONCE = 2**14  # rows, where not all are wanted


class MissingColumn(UserError):
    """A file lacks a column."""

    def __init__(self, path: str, column: str, names: Sequence[str]) -> None:
        super().__init__(f"{path}: no column {column!r}; it has {listed(names)}")
        self.column = column


def read_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file held in memory, in this thread alone.

    `pq.read_table` would hand the bytes to threads of Arrow, which let go of them some time after it has returned. If
    the interpreter ends meanwhile, the process aborts. Raises OSError or ArrowException if the file is damaged.
    """
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    return file.read(columns=columns, use_threads=False)


def column_names(path: str) -> list[str]:
    """Names of the file's columns. Raises UserError if it is not readable."""
    return list(_dataset(path).schema.names)


def read_columns(path: str, columns: Sequence[str], limit: int | None = None) -> list[list[Any]]:
    """The named columns as lists; no others are read, nor much past the first `limit` rows.

    Raises UserError that names the file, `MissingColumn` if it lacks a column.
    """
    data = _dataset(path)
    distinct = list(dict.fromkeys(columns))
    for column in distinct:
        if column not in data.schema.names:
            raise MissingColumn(path, column, data.schema.names)
    try:
        if limit is None:
            table = data.to_table(columns=distinct)
        else:
            table = data.head(limit, columns=distinct, batch_size=READ_AT_ONCE, batch_readahead=0, fragment_readahead=0)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return [table[column].to_pylist() for column in columns]


def _dataset(path: str) -> ds.Dataset:
    if "://" in path:
        raise UserError(f"{path}: tune and evaluate read local files; copy it here")
    try:
        return ds.dataset(path, format="parquet", partitioning="hive")
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}")
