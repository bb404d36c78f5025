"""Rows of input files of any format, in the schema of the job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipeline.config.job import StorageConfig
from pipeline.read.files import InputFile, check_unchanged, read_footer
from pipeline.read.ipc import to_ipc
from pipeline.read.schema import conform, with_all
from pipeline.read.shards import Shard, read_shards
from pipeline.read.text_files import TextColumns, read_text, scan_text
from pipeline.storage.folder import STORE_ERRORS


def read_layout(
    url: str,
    size: int,
    version: str,
    storage: StorageConfig,
    kind: str,
    columns: TextColumns | None = None,
    limit: int | None = None,
) -> tuple[InputFile, pa.Schema]:
    """The pinned file and its schema: from a Parquet footer, or from a pass over a text. As `scan_text`."""
    if kind == "parquet":
        return read_footer(url, size, version, storage)
    return scan_text(url, size, version, storage, kind, columns or TextColumns(()), limit)


def read_rows(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """Tables of shards of one file, in order, with the column `ERROR`. Raises as `read_shards` and `read_text`."""
    if file.format == "parquet":
        yield from (conform(with_all(table, schema), schema) for table in read_shards(shards, schema.names, storage))
    else:
        yield from read_text(shards, file, schema, storage)


def read_pinned(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """`read_rows` of a pinned file. Raises UserError before the first table that a changed file would yield."""
    try:
        for table in read_rows(shards, file, schema, storage):
            check_unchanged(file, storage)
            yield table
    except (*STORE_ERRORS, pa.ArrowException, AssertionError, RuntimeError):
        check_unchanged(file, storage)  # a changed file is the cause
        raise


def read_blocks(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """A table of one row for each shard of one file: `shard` (its index), `url`, `first_row`, and `rows`, the shard's
    rows as IPC bytes in the job's schema. One row, so that no splitting of blocks tears the unit of commit apart."""
    for shard, table in zip(shards, read_pinned(shards, file, schema, storage), strict=True):
        yield pa.table(
            {
                "shard": pa.array([shard.index], pa.int64()),
                "url": [shard.url],
                "first_row": pa.array([shard.first_row], pa.int64()),
                "rows": pa.array([to_ipc(table)], pa.large_binary()),
            }
        )
