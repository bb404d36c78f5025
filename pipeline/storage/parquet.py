"""Reads and writes Parquet files held in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file from its bytes, in this thread only.

    `pq.read_table` would use Arrow's threads, which may hold the bytes for some time after the call. If the
    interpreter exits while they do, the process aborts. Raises OSError or ArrowException if the file is damaged.
    """
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    return file.read(columns=columns, use_threads=False)


def parquet_bytes(table: pa.Table, **options: Any) -> bytes:
    """Return the bytes of a Parquet file with the rows of `table`. options: arguments of `pq.write_table`."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    data: bytes = sink.getvalue().to_pybytes()
    return data
