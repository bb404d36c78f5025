"""Parquet files held in memory."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq


def read_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a Parquet file held in memory, in this thread alone.

    `pq.read_table` hands the bytes to Arrow's threads, which release them some time after it has returned. If
    the interpreter ends meanwhile, the process aborts. Raises OSError or ArrowException if the file is damaged.
    """
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    return file.read(columns=columns, use_threads=False)
