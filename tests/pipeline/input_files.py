"""Input files of tests."""

from __future__ import annotations

import csv
import gzip
import io
import json
import uuid
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.job import StorageConfig
from pipeline.input.files import list_files, read_footer
from pipeline.input.shards import Shard
from pipeline.storage.folder import filesystem


def write_rows(path: Path, groups: list[int], first: int = 0) -> None:
    """A file whose row groups have these many rows, numbered from `first`."""
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string()), ("other", pa.float64())])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            ids = list(range(first, first + rows))
            values = {"id": ids, "prompt": [f"prompt {row}" for row in ids], "other": [0.5] * rows}
            writer.write_table(pa.table(values, schema=schema), row_group_size=max(rows, 1))
            first += rows


def write_values(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` to a file in the format that the suffix of its name shows."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return
    text = io.StringIO()
    if ".csv" in path.name:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(json.dumps(row) + "\n" for row in rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def uploaded(folder: Path, storage: StorageConfig) -> str:
    """The URL of a copy of the folder in the bucket."""
    root = f"s3://bucket/{uuid.uuid4().hex}"
    fs, inside = filesystem(root, storage)
    fs.put(f"{folder}/", inside, recursive=True)
    return root


def stage_input(path: Path, *tables: pa.Table, first: int = 0) -> dict[str, Any]:
    """Write a file with a row group for each table. Return arguments of `prepare` that make a shard of each.

    first: index of the first shard.
    """
    with pq.ParquetWriter(path, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    ((url, (size, version)),) = list_files([str(path)], StorageConfig()).items()
    file, schema = read_footer(url, size, version, StorageConfig())
    starts = accumulate((table.num_rows for table in tables), initial=0)
    shards = [
        Shard(first + index, url, start, table.num_rows)
        for index, (start, table) in enumerate(zip(starts, tables, strict=False))
    ]
    return {"shards": shards, "files": [file], "schema": schema, "storage": StorageConfig()}
