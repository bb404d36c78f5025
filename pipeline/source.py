"""Parquet inputs -> stable shards -> a Ray Data source. A shard is a row range of one file.

Between here and the sink one Ray Data row carries one whole shard, its rows as Arrow IPC bytes, so that
Ray's splitting of blocks cannot tear apart the unit of commit, retry and statistics.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from pipeline.config import StorageConfig
from pipeline.storage import STORE_ERRORS, filesystem


@dataclass(frozen=True)
class InputFile:
    """An input file as it is pinned: size in bytes, version (etag, or mtime in ns), rows of its row groups."""

    url: str
    size: int
    version: str
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.group_rows)


@dataclass(frozen=True)
class Shard:
    """Rows first_row ... first_row + rows - 1 of a file; `index` numbers the shards of the job."""

    index: int
    url: str
    first_row: int
    rows: int


def list_files(paths: Sequence[str], storage: StorageConfig) -> dict[str, tuple[int, str]]:
    """URL -> (bytes, version) of every input file, in the order given, files of a folder or glob by name.

    Raises ValueError of one line for a path that matches nothing.
    """
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        fs, inside = filesystem(path, storage)
        prefix = "" if isinstance(fs, LocalFileSystem) else "s3://"
        try:
            if glob.has_magic(inside):
                entries = {name: fs.info(name) for name in fs.glob(inside)}
                wanted = f"{path}: matches no file"
            elif fs.isdir(inside):
                entries = {
                    name: entry
                    for name, entry in fs.find(inside, detail=True).items()
                    if name.endswith(".parquet") and not _hidden(name[len(inside) :])
                }
                wanted = f"{path}: folder without .parquet files"
            else:
                entries = {inside: fs.info(inside)}
                wanted = ""
        except FileNotFoundError:
            raise ValueError(f"{path}: no such file or folder") from None
        except (*STORE_ERRORS, ValueError) as error:
            raise ValueError(f"{path}: cannot be listed: {' '.join(str(error).split())}") from None
        files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
        if not files:
            raise ValueError(wanted)
        for name in sorted(files):
            found[prefix + name] = (int(files[name]["size"]), _version(files[name], fs, name))
    return found


def _hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def _version(entry: dict[str, Any], fs: fsspec.AbstractFileSystem, name: str) -> str:
    if isinstance(fs, LocalFileSystem):
        return str(os.stat(name).st_mtime_ns)
    return str(entry.get("ETag") or entry.get("LastModified")).strip('"')


def read_footer(url: str, size: int, version: str, storage: StorageConfig) -> tuple[InputFile, pa.Schema]:
    """The file's pinned facts and its schema. ValueError names a file that is not readable Parquet."""
    fs, path = filesystem(url, storage)
    try:
        with fs.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
            schema = parquet.schema_arrow
    except (*STORE_ERRORS, pa.ArrowException) as error:
        raise ValueError(f"{url}: not readable as Parquet: {' '.join(str(error).split())}") from None
    rows = tuple(group.num_rows for group in groups)
    return InputFile(url, size, version, rows, tuple(group.total_byte_size for group in groups)), schema


def cut_shards(files: Iterable[InputFile], shard_rows: int, shard_bytes: int) -> list[Shard]:
    """Shards of all files, in order: whole row groups while they fit the limits, larger groups cut inside."""
    shards: list[Shard] = []

    def add(file: InputFile, first: int, rows: int) -> None:
        if rows:
            shards.append(Shard(len(shards), file.url, first, rows))

    for file in files:
        first = start = held_rows = held_bytes = 0
        for rows, size in zip(file.group_rows, file.group_bytes, strict=True):
            if held_rows and (held_rows + rows > shard_rows or held_bytes + size > shard_bytes):
                add(file, start, held_rows)
                start, held_rows, held_bytes = first, 0, 0
            if rows > shard_rows or size > shard_bytes:
                most = max(1, min(shard_rows, rows * shard_bytes // max(size, 1)))
                for offset in range(0, rows, most):
                    add(file, first + offset, min(most, rows - offset))
                start = first + rows
            else:
                held_rows, held_bytes = held_rows + rows, held_bytes + size
            first += rows
        add(file, start, held_rows)
    return shards


def read_shards(shards: Sequence[Shard], columns: Sequence[str], storage: StorageConfig) -> Iterator[pa.Table]:
    """Tables of shards of one file, in order; a row group that several need is read once."""
    fs, path = filesystem(shards[0].url, storage)
    with fs.open(path, "rb") as file:
        parquet = pq.ParquetFile(file)
        starts = [0]
        for number in range(parquet.metadata.num_row_groups):
            starts.append(starts[-1] + parquet.metadata.row_group(number).num_rows)
        held: dict[int, pa.Table] = {}
        for shard in shards:
            end = shard.first_row + shard.rows
            needed = [
                number
                for number in range(len(starts) - 1)
                if starts[number] < end and starts[number + 1] > shard.first_row
            ]
            held = {
                number: held[number] if number in held else parquet.read_row_group(number, columns=list(columns))
                for number in needed
            }
            table = pa.concat_tables([held[number] for number in needed])
            table = table.slice(shard.first_row - starts[needed[0]], shard.rows)
            assert table.num_rows == shard.rows, f"{shard.url} is shorter than its footer said"
            yield table


def to_ipc(table: pa.Table) -> bytes:
    """A table as one Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_ipc(data: bytes) -> pa.Table:
    """The table of `to_ipc`."""
    return pa.ipc.open_stream(data).read_all()


class ShardSource(Datasource):
    """Ray Data source of shards: a block a shard, with its index, file, first row and rows as IPC bytes.

    A read task takes consecutive shards of one file, at most `task_rows` rows of them.
    """

    def __init__(self, shards: Sequence[Shard], columns: Sequence[str], storage: StorageConfig, task_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shards = list(shards)
        self.columns = list(columns)
        self.storage = storage
        self.task_rows = task_rows

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        groups: list[list[Shard]] = []
        for shard in self.shards:
            last = groups[-1] if groups else []
            if last and last[0].url == shard.url and sum(one.rows for one in last) + shard.rows <= self.task_rows:
                last.append(shard)
            else:
                groups.append([shard])
        columns, storage = self.columns, self.storage

        def task(group: list[Shard]) -> ReadTask:
            def read() -> Iterator[pa.Table]:
                for shard, table in zip(group, read_shards(group, columns, storage), strict=True):
                    yield pa.table(
                        {
                            "shard": pa.array([shard.index], pa.int64()),
                            "url": [shard.url],
                            "first_row": pa.array([shard.first_row], pa.int64()),
                            "rows": pa.array([to_ipc(table)], pa.large_binary()),
                        }
                    )

            metadata = BlockMetadata(num_rows=len(group), size_bytes=None, input_files=(group[0].url,), exec_stats=None)
            return ReadTask(read, metadata)

        return [task(group) for group in groups]
