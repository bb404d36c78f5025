"""Parquet inputs -> stable shards -> a Ray Data source. A shard is a row range of one file.

Between here and the sink one Ray Data row carries one whole shard, its rows as Arrow IPC bytes, so that
Ray's splitting of blocks cannot tear apart the unit of commit, retry and statistics.
"""

from __future__ import annotations

import glob
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from actors.engine.errors import UserError
from pipeline.config.job import StorageConfig
from pipeline.read.schema import conform
from pipeline.storage.folder import STORE_ERRORS, filesystem

Files = Mapping[str, tuple[int, str]]  # URL -> (bytes, version)
STREAM_BYTES = 128 * 2**20  # of a row group, uncompressed; a larger one is fetched bit by bit
FETCH_BYTES = 8 * 2**20  # fetched at once of each column then
BATCH_ROWS, BATCH_BYTES = 1024, 8 * 2**20  # decoded at once; texts that repeat are larger than their row group tells


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


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows first_row ... first_row + rows - 1 of a file; `index` numbers the shards of the job."""

    index: int
    url: str
    first_row: int
    rows: int


def list_files(
    paths: Sequence[str], storage: StorageConfig, *, may_be_empty: bool = False
) -> dict[str, tuple[int, str]]:
    """URL -> (bytes, version) of every input file, in the order given, files of a folder or glob by name.

    Raises ValueError of one line for a path that matches nothing. may_be_empty: a folder or a glob may; a
    folder in a bucket is gone with its last file.
    """
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        fs, inside = filesystem(path, storage)
        prefix = "" if isinstance(fs, LocalFileSystem) else "s3://"
        try:
            if glob.has_magic(inside):
                entries = fs.glob(inside, detail=True)
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
            if may_be_empty and prefix:
                continue
            raise UserError(f"{path}: no such file or folder") from None
        except (*STORE_ERRORS, ValueError) as error:
            raise UserError(f"{path}: cannot be listed: {' '.join(str(error).split())}") from None
        files = {name: entry for name, entry in entries.items() if entry["type"] == "file"}
        if not files and not may_be_empty:
            raise UserError(wanted)
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
        raise UserError(f"{url}: not readable as Parquet: {' '.join(str(error).split())}") from None
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
    """Tables of shards of one file, in order. A row group is read once, in batches, and no further than needed.

    Raises OSError of one line that names a file that is damaged, or holds fewer rows than it says.
    """
    try:
        yield from _tables(shards, columns, storage)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, pa.ArrowException) or type(error) is OSError:  # other kinds, StoreFailed, say more
            text = " ".join(str(error).split())
            raise OSError(f"{shards[0].url}: cannot be read, damaged or cut short: {text}") from None
        raise


def _tables(shards: Sequence[Shard], columns: Sequence[str], storage: StorageConfig) -> Iterator[pa.Table]:
    fs, path = filesystem(shards[0].url, storage)
    with fs.open(path, "rb") as file:
        footer = pq.read_metadata(file)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    starts = list(accumulate((group.num_rows for group in groups), initial=0))
    # pages of a large row group are fetched as they are decoded and no more; of small ones a store gives many at once
    large = any(group.total_byte_size > STREAM_BYTES for group in groups)
    with fs.open(path, "rb", cache_type="none" if large else "readahead") as file:
        parquet = pq.ParquetFile(file, metadata=footer, pre_buffer=not large, buffer_size=FETCH_BYTES if large else 0)
        opened, first, batch = -1, 0, pa.record_batch([], [])
        for shard in shards:
            pieces, row, end = [], shard.first_row, shard.first_row + shard.rows
            while row < end:
                number = bisect_right(starts, row) - 1
                if number >= len(groups):
                    raise OSError("fewer rows than when the job was planned")
                if number != opened:
                    width = max(groups[number].total_byte_size // groups[number].num_rows, 1)
                    rows = max(1, min(BATCH_ROWS, BATCH_BYTES // width))
                    batches = parquet.iter_batches(rows, row_groups=[number], columns=list(columns))
                    opened, first, batch = number, starts[number], _next(batches)
                while first + batch.num_rows <= row:
                    first, batch = first + batch.num_rows, _next(batches)
                pieces.append(batch.slice(row - first, end - row))
                row += pieces[-1].num_rows
            yield pa.Table.from_batches(pieces)


def read_pinned(
    shards: Sequence[Shard], file: InputFile, columns: Sequence[str], storage: StorageConfig
) -> Iterator[pa.Table]:
    """`read_shards` of a file that must be, at every table, as it is pinned; ValueError names it if it is not."""
    try:
        for table in read_shards(shards, columns, storage):
            _check_version(file, storage)
            yield table
    except (*STORE_ERRORS, pa.ArrowException, AssertionError, RuntimeError):
        _check_version(file, storage)  # then that is why
        raise


def _check_version(file: InputFile, storage: StorageConfig) -> None:
    fs, path = filesystem(file.url, storage)
    try:
        entry = fs.info(path)
        same = (int(entry["size"]), _version(entry, fs, path)) == (file.size, file.version)
    except FileNotFoundError:
        raise UserError(f"{file.url}: gone since the job began") from None
    if not same:
        raise UserError(f"{file.url}: changed since the job began")


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    batch = next(batches, None)
    if batch is None:
        raise OSError("fewer rows than its footer says")
    return batch


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


def read_units(
    shards: Iterable[Shard], files: Iterable[InputFile], task_rows: int, task_bytes: int
) -> list[list[Shard]]:
    """Shards of each read task: consecutive ones of one file, within both limits.

    All pieces of one row group stay together, above the limits if need be, so that it is read once.
    """
    layout = {file.url: (file, list(accumulate(file.group_rows, initial=0))) for file in files}
    placed = [(shard, *_place(shard, *layout[shard.url])) for shard in shards]
    tasks: list[list[Shard]] = []
    rows, size = 0, 0.0
    for _, run in groupby(placed, key=lambda one: (one[0].url, one[1] if one[1] is not None else one[0])):
        unit = list(run)
        more_rows, more_size = sum(shard.rows for shard, _, _ in unit), sum(one for _, _, one in unit)
        fits = rows + more_rows <= task_rows and size + more_size <= task_bytes
        if not (tasks and tasks[-1][0].url == unit[0][0].url and fits):
            tasks.append([])
            rows, size = 0, 0.0
        tasks[-1] += [shard for shard, _, _ in unit]
        rows, size = rows + more_rows, size + more_size
    return tasks


def _place(shard: Shard, file: InputFile, starts: Sequence[int]) -> tuple[int | None, float]:
    """The row group that the shard is a piece of, None if it holds whole ones; and its bytes."""
    end = shard.first_row + shard.rows
    number = bisect_right(starts, shard.first_row) - 1
    size = 0.0
    for group in range(number, bisect_left(starts, end)):
        rows = min(end, starts[group + 1]) - max(shard.first_row, starts[group])
        size += file.group_bytes[group] * rows / max(file.group_rows[group], 1)
    piece = starts[number] < shard.first_row or end < starts[number + 1]
    return (number if piece else None), size


class ShardSource(Datasource):
    """Ray Data source of shards: a block a shard, with its index, file, first row and rows as IPC bytes, brought
    to the job's schema.

    A read task takes consecutive shards of one file, at most `task_rows` rows and `task_bytes` bytes of them.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        files: Sequence[InputFile],
        schema: pa.Schema,
        storage: StorageConfig,
        task_rows: int,
        task_bytes: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tasks = read_units(shards, files, task_rows, task_bytes)
        self.files = {file.url: file for file in files}
        self.schema = schema
        self.storage = storage

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        schema, storage = self.schema, self.storage

        def task(shards: list[Shard]) -> ReadTask:
            file = self.files[shards[0].url]

            def read() -> Iterator[pa.Table]:
                for shard, table in zip(shards, read_pinned(shards, file, schema.names, storage), strict=True):
                    yield pa.table(
                        {
                            "shard": pa.array([shard.index], pa.int64()),
                            "url": [shard.url],
                            "first_row": pa.array([shard.first_row], pa.int64()),
                            "rows": pa.array([to_ipc(conform(table, schema))], pa.large_binary()),
                        }
                    )

            metadata = BlockMetadata(
                num_rows=len(shards), size_bytes=None, input_files=(shards[0].url,), exec_stats=None
            )
            return ReadTask(read, metadata)

        return [task(shards) for shards in self.tasks]
