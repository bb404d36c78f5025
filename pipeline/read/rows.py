"""Rows of input files of any format, in the schema of the job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import pyarrow as pa

from pipeline.config.job import StorageConfig
from pipeline.read.files import InputFile, check_unchanged, read_footer
from pipeline.read.ipc import to_ipc
from pipeline.read.schema import conform, with_all
from pipeline.read.shards import Shard, read_parquet
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


def read_shards(
    files: Sequence[InputFile], shards: Iterable[Shard], schema: pa.Schema, storage: StorageConfig
) -> Iterator[tuple[Shard, pa.Table]]:
    """Each shard with its rows in the job's schema and the column `ERROR`; neighbours of one file are read in one go.

    files: the pinned files, at least those of the shards.

    Raises UserError before the first table that a changed file would yield, else as `read_parquet` and `read_text`.
    """
    by_url = {file.url: file for file in files}
    for url, neighbours in groupby(shards, key=lambda shard: shard.url):
        file, of_file = by_url[url], list(neighbours)
        try:
            for shard, table in zip(of_file, read_rows(of_file, file, schema, storage), strict=True):
                check_unchanged(file, storage)
                yield shard, table
        except (*STORE_ERRORS, pa.ArrowException, AssertionError, RuntimeError):
            check_unchanged(file, storage)  # a changed file is the cause
            raise


def read_rows(
    shards: Sequence[Shard], file: InputFile, schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """Tables of shards of one file, in order, with the column `ERROR`. Raises as `read_parquet` and `read_text`."""
    if file.format != "parquet":
        return read_text(shards, file, schema, storage)
    return (conform(with_all(table, schema), schema) for table in read_parquet(shards, schema.names, storage))


def read_blocks(
    files: Sequence[InputFile], shards: Iterable[Shard], schema: pa.Schema, storage: StorageConfig
) -> Iterator[pa.Table]:
    """A table of one row for each shard: `shard` (its index), `url`, `first_row`, and `rows`, the shard's
    rows as IPC bytes in the job's schema. One row, so that no splitting of blocks tears the unit of commit apart."""
    for shard, table in read_shards(files, shards, schema, storage):
        yield pa.table(
            {
                "shard": pa.array([shard.index], pa.int64()),
                "url": [shard.url],
                "first_row": pa.array([shard.first_row], pa.int64()),
                "rows": pa.array([to_ipc(table)], pa.large_binary()),
            }
        )
