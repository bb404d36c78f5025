"""Cuts input files into shards (stable row ranges), groups shards into read tasks, and reads Parquet shards."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.job import StorageConfig
from pipeline.input.files import INT96_UNIT, InputFile, damaged_input
from pipeline.storage.folder import filesystem

STREAM_BYTES = 128 * 2**20  # a row group with more uncompressed bytes is fetched page by page
FETCH_BYTES = 8 * 2**20  # bytes that are read ahead for each column of a large row group
BATCH_ROWS, BATCH_BYTES = 1024, 8 * 2**20  # limits of a batch; sizes are from the footer, decoded text may be larger


@dataclass(frozen=True, slots=True)
class Shard:
    """`rows` rows of one file, from row `first_row` on. A job commits whole shards. index: number of the shard."""

    index: int
    url: str
    first_row: int
    rows: int


def cut_shards(files: Iterable[InputFile], shard_rows: int, shard_bytes: int) -> list[Shard]:
    """Cut files into shards, in order. A shard of a Parquet file holds whole row groups, or a part of a large one.

    A shard of a text file has at most `shard_rows` rows and `shard_bytes` bytes, and may end inside a row group.
    """
    shards: list[Shard] = []

    def add(file: InputFile, first: int, rows: int) -> None:
        if rows:
            shards.append(Shard(len(shards), file.url, first, rows))

    for file in files:
        if file.format != "parquet":
            for first, end in _even_cuts(file, shard_rows, shard_bytes):
                add(file, first, end - first)
            continue
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


def _even_cuts(file: InputFile, shard_rows: int, shard_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield each shard's range of rows (start, end). Assumes that all rows of a row group have the same size."""
    start, size, first = 0, 0.0, 0
    for rows, group_bytes in zip(file.group_rows, file.group_bytes, strict=True):
        for row in range(first, first + rows):
            each = group_bytes / rows
            if row > start and (row - start == shard_rows or size + each > shard_bytes):
                yield start, row
                start, size = row, 0.0
            size += each
        first += rows
    if first > start:
        yield start, first


def read_groups(shards: Sequence[Shard], columns: Sequence[str], storage: StorageConfig) -> Iterator[pa.Table]:
    """Yield one table per shard, in order. All shards must be of one file. Each row group is read once, in batches.

    Raises UserError if the file is damaged or has fewer rows than planned.
    """
    try:
        yield from _tables(shards, columns, storage)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, pa.ArrowException) or type(error) is OSError:  # subclasses already name the cause
            raise damaged_input(shards[0].url, error) from None
        raise


def _tables(shards: Sequence[Shard], columns: Sequence[str], storage: StorageConfig) -> Iterator[pa.Table]:
    fs, path = filesystem(shards[0].url, storage)
    with fs.open(path, "rb") as file:
        footer = pq.read_metadata(file)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    starts = list(accumulate((group.num_rows for group in groups), initial=0))
    # large row groups are streamed page by page; small ones are read ahead
    large = any(group.total_byte_size > STREAM_BYTES for group in groups)
    with fs.open(path, "rb", cache_type="none" if large else "readahead") as file:
        parquet = pq.ParquetFile(
            file,
            metadata=footer,
            buffer_size=FETCH_BYTES if large else 0,
            pre_buffer=not large,  # fetches whole row groups, and ignores buffer_size
            coerce_int96_timestamp_unit=INT96_UNIT,
        )
        opened, first, batch = -1, 0, pa.record_batch([], [])  # the open row group; the batch's first row; the batch
        for shard in shards:
            slices, row, end = [], shard.first_row, shard.first_row + shard.rows
            while row < end:
                number = bisect_right(starts, row) - 1
                if number >= len(groups):
                    raise OSError("fewer rows than when the job was planned")
                if number != opened:
                    row_bytes = max(groups[number].total_byte_size // groups[number].num_rows, 1)
                    rows = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
                    batches = parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)
                    opened, first, batch = number, starts[number], _next(batches)
                while first + batch.num_rows <= row:
                    first, batch = first + batch.num_rows, _next(batches)
                slices.append(batch.slice(row - first, end - row))
                row += slices[-1].num_rows
            yield pa.Table.from_batches(slices)


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    batch = next(batches, None)
    if batch is None:
        raise OSError("fewer rows than its footer says")
    return batch


def group_shards(
    shards: Iterable[Shard], files: Iterable[InputFile], task_rows: int, task_bytes: int
) -> list[list[Shard]]:
    """Return a list of shards for each read task: consecutive shards of one file, up to `task_rows` and `task_bytes`.

    Shards of one row group stay in one task even above these limits, so that the row group is read only once. All
    shards of a gzip file stay in one task, because such a file can only be read from its start.
    """
    layout = {file.url: (file, list(accumulate(file.group_rows, initial=0))) for file in files}
    located = [(shard, *_locate(shard, *layout[shard.url])) for shard in shards]
    tasks: list[list[Shard]] = []
    rows, size = 0, 0.0
    for _, run in groupby(located, key=lambda item: (item[0].url, item[0] if item[1] is None else item[1])):
        unit = list(run)
        url = unit[0][0].url
        more_rows, more_size = sum(shard.rows for shard, _, _ in unit), sum(shard_bytes for _, _, shard_bytes in unit)
        fits = (rows + more_rows <= task_rows and size + more_size <= task_bytes) or url.lower().endswith(".gz")
        if not (tasks and tasks[-1][0].url == url and fits):
            tasks.append([])
            rows, size = 0, 0.0
        tasks[-1] += [shard for shard, _, _ in unit]
        rows, size = rows + more_rows, size + more_size
    return tasks


def _locate(shard: Shard, file: InputFile, starts: Sequence[int]) -> tuple[int | None, float]:
    """Return the row group of which `shard` is a part (None: it holds whole row groups), and the shard's bytes."""
    end = shard.first_row + shard.rows
    number = bisect_right(starts, shard.first_row) - 1
    size = 0.0
    for group in range(number, bisect_left(starts, end)):
        rows = min(end, starts[group + 1]) - max(shard.first_row, starts[group])
        size += file.group_bytes[group] * rows / max(file.group_rows[group], 1)
    is_part = starts[number] < shard.first_row or end < starts[number + 1]
    return (number if is_part else None), size
