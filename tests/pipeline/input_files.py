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

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.input.files import file_format, list_files, read_footer
from pipeline.input.rows import common_schema, path_values, read_layout, read_shards
from pipeline.input.schema import ERROR
from pipeline.input.shards import Shard, cut_shards
from pipeline.input.text_files import TextColumns
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


def read_columns(
    path: str, columns: Sequence[str], storage: StorageConfig, limit: int | None = None, optional: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Each column's values in the first `limit` rows of the files at `path`, by the pipeline's own reading.

    optional: further columns. A column that any of the files lacks is left out.
    """
    wanted = list(dict.fromkeys([*columns, *optional]))
    footers = [
        read_layout(url, *entry, storage, file_format(url, None), TextColumns(wanted))
        for url, entry in list_files([path], storage).items()
    ]
    for name in optional:
        if any(name not in {*schema.names, *path_values(file.url)} for file, schema in footers):
            wanted.remove(name)
    files, values = [file for file, _ in footers], {name: list[Any]() for name in wanted}
    shards = cut_shards(files, min(limit or 2**14, 2**14), 2**26)
    for shard, table in read_shards(files, shards, common_schema(footers, wanted, storage), storage):
        error = next((error for error in table[ERROR].to_pylist() if error is not None), None)
        if error is not None:
            raise UserError(f"{shard.url}: {error}")
        for name, read in values.items():
            read += table[name].to_pylist()
        if limit is not None and all(len(read) >= limit for read in values.values()):
            break
    return {name: read[:limit] for name, read in values.items()}
