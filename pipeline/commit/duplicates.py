"""Counts repeated ids in a job, because a join on a repeated id would duplicate rows.

For each row, a 64-bit hash of its id and the row's position go to a temporary file, 16 bytes in all. The hash selects
the file, so that equal hashes are in the same file. The files are sorted in memory, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.commit.sink import part_name
from pipeline.generate.stats import Totals, id_value
from pipeline.input.shards import Shard
from pipeline.plan.manifest import Manifest
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, read_json, write_json

DUPLICATES = "_job/duplicates.json"
ROWS_AT_ONCE = 2**22  # approximate rows of a temporary file, which is sorted in memory
EXAMPLES = 3
NULL = -(2**62) - 7919  # replaces a null in a column of integer ids


def count_repeated(
    columns: Iterable[pa.ChunkedArray], shards: Sequence[Shard], ids_of: Callable[[Shard], pa.ChunkedArray]
) -> tuple[int, list[str]]:
    """Return the number of rows whose id an earlier row of the job has, and up to `EXAMPLES` examples.

    columns: the ids of each shard, in order. ids_of: reads the ids of one shard again, for the examples.
    """
    rows = sum(shard.rows for shard in shards)
    found, places = 0, list[tuple[int, int]]()
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile()) for _ in range(rows // ROWS_AT_ONCE + 1)]
        first = 0
        for column in columns:
            pairs = np.stack([_hashes(column), np.arange(first, first + len(column))], axis=1)
            first += len(column)
            which = pairs[:, 0].view(np.uint64) % np.uint64(len(files))
            order = np.argsort(which, kind="stable")
            ends = np.searchsorted(which[order], np.arange(1, len(files)))
            for file, some in zip(files, np.split(pairs[order], ends), strict=True):
                file.write(some.tobytes())
        for file in files:
            file.seek(0)
            pairs = np.frombuffer(file.read(), np.int64).reshape(-1, 2)
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
            repeats = np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0])
            found += len(repeats)
            for place in repeats[: EXAMPLES - len(places)]:
                places.append((int(pairs[place, 1]), int(pairs[place + 1, 1])))
    ends = np.cumsum([shard.rows for shard in shards])

    def row(place: int) -> tuple[Shard, int]:
        number = int(np.searchsorted(ends, place, side="right"))
        return shards[number], place - int(ends[number]) + shards[number].rows

    examples = []
    for pair in places:
        (shard, offset), _ = rows_of_pair = [row(place) for place in pair]
        text = str(id_value(ids_of(shard)[offset]))
        where = " and ".join(f"row {shard.first_row + offset} of {shard.url}" for shard, offset in rows_of_pair)
        examples.append(f"{text[:80]!r}: {where}")
    return found, examples


def record_duplicates(folder: Folder, manifest: Manifest) -> None:
    """Count the repeated ids in the committed parts, and write the count and examples to `DUPLICATES`."""

    def ids_of(shard: Shard) -> pa.ChunkedArray:
        return _ids(folder, part_name(shard.index))

    found, examples = count_repeated(in_parallel(ids_of, manifest.shards), manifest.shards, ids_of)
    write_json(folder, DUPLICATES, {"rows": found, "examples": examples})


def with_duplicates(folder: Folder, totals: Totals) -> Totals:
    """Return the totals with count and examples of the job's repeated ids; unchanged if they were not counted."""
    values = read_json(folder, DUPLICATES)
    if not isinstance(values, dict):
        return totals
    return replace(totals, duplicate_ids=int(values["rows"]), duplicate_examples=list(values["examples"]))


def repeated_error(found: int, examples: Sequence[str]) -> UserError:
    """Return the error for a job that refuses repeated ids (`input.duplicate_ids: error`)."""
    listed = "; ".join(examples)
    return UserError(f"input.id: {found:,} rows have the id of an earlier row, such as {listed} (input.duplicate_ids)")


def _hashes(ids: pa.ChunkedArray) -> np.ndarray:
    """Return a hash of each id [N]. Equal ids have equal hashes within this process. An integer is its own hash."""
    if pa.types.is_timestamp(ids.type):  # a time zone changes no equality, and may be unknown here
        ids = ids.cast(pa.timestamp(ids.type.unit)).cast(pa.int64())
    if pa.types.is_integer(ids.type):
        return np.asarray(ids.cast(pa.int64(), safe=False).fill_null(NULL).to_numpy())
    if pa.types.is_fixed_size_binary(ids.type):  # e.g. Parquet's UUIDs, which are no text
        ids = ids.cast(pa.binary())
    if not (pa.types.is_nested(ids.type) or pa.types.is_binary(ids.type) or pa.types.is_large_binary(ids.type)):
        ids = ids.cast(pa.large_string())  # as text, because Python cannot represent all dates
    values = ids.to_pylist()
    return np.fromiter(map(hash, map(repr, values) if pa.types.is_nested(ids.type) else values), np.int64, len(ids))


def _ids(folder: Folder, name: str) -> pa.ChunkedArray:
    """Return the id of each input row in a part (output file of one shard). Reads only the columns that this needs."""
    with folder.open(name) as opened:
        file = pq.ParquetFile(opened)
        names = [one for one in ("id", "sample_index") if one in file.schema_arrow.names]
        table = file.read(columns=names, use_threads=False)
    if "sample_index" in names:
        table = table.filter(pa.compute.equal(table["sample_index"], 0))
    return table["id"]
