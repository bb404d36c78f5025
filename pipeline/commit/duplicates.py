"""Counts rows with repeated ids in a job, because a join on a repeated id would duplicate rows.

For each row, 16 bytes are written to one of several temporary files: a 64-bit hash of the id, and the row's position.
The hash selects the file, so that equal hashes are in one file. Then each file is sorted by hash, in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryFile, gettempdir

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from actors.engine.errors import UserError
from pipeline.commit.sink import part_name
from pipeline.generate.stats import Totals, id_value
from pipeline.input.shards import Shard
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder, read_json, write_json

DUPLICATES = "_job/duplicates.json"
ROWS_AT_ONCE = 2**22  # approximate number of rows per temporary file: each file is sorted in memory
EXAMPLES = 3


@dataclass(frozen=True)
class Duplicates:
    """Content of the file `DUPLICATES`: number of rows that have the id of an earlier row, and lines with examples."""

    rows: int
    examples: list[str]


def count_repeated(
    columns: Iterable[pa.ChunkedArray], shards: Sequence[Shard], ids_of: Callable[[Shard], pa.ChunkedArray]
) -> tuple[int, list[str]]:
    """Return the number of rows that have the id of an earlier row, and up to `EXAMPLES` lines with examples.

    columns: the ids of each shard, in the order of `shards`. ids_of: function that reads the ids of one shard again.
    """
    rows = sum(shard.rows for shard in shards)
    found, places = 0, list[tuple[int, int]]()
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile()) for _ in range(rows // ROWS_AT_ONCE + 1)]
        first = 0
        for column in columns:
            known = np.flatnonzero(column.is_valid())  # skip rows without an id, e.g. unreadable rows
            pairs = np.stack([_hashes(column.drop_null()), first + known], axis=1)  # [N, 2]: hash, row's position
            first += len(column)
            file_of = pairs[:, 0].view(np.uint64) % np.uint64(len(files))
            order = np.argsort(file_of, kind="stable")
            ends = np.searchsorted(file_of[order], np.arange(1, len(files)))
            try:
                for file, some in zip(files, np.split(pairs[order], ends), strict=True):
                    file.write(some.tobytes())
            except OSError as error:
                needs = (
                    f"counting repeated ids needs {16 * rows:,} bytes in {gettempdir()}; set TMPDIR to another folder"
                )
                raise OSError(error.errno, f"{error.strerror}: {needs}") from None
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
        both = [row(place) for place in pair]
        texts = [str(id_value(ids_of(shard)[offset])) for shard, offset in both]
        if texts[0] != texts[1]:  # they only have the same hash
            found -= 1
            continue
        where = " and ".join(f"row {shard.first_row + offset} of {shard.url}" for shard, offset in both)
        examples.append(f"{texts[0][:80]!r}: {where}")
    return found, examples


def record_duplicates(folder: Folder, manifest: Manifest) -> None:
    """Count repeated ids in all committed output files, and write the count and examples to the file `DUPLICATES`."""

    def ids_of(shard: Shard) -> pa.ChunkedArray:
        return _ids(folder, part_name(shard.index))

    found, examples = count_repeated(in_parallel(ids_of, manifest.shards), manifest.shards, ids_of)
    write_json(folder, DUPLICATES, asdict(Duplicates(found, examples)))


def with_duplicates(folder: Folder, totals: Totals) -> Totals:
    """Add the count and examples of repeated ids to `totals`, if ids were counted. Return the totals."""
    found = read_json(folder, DUPLICATES, Duplicates)
    return totals if found is None else replace(totals, duplicate_ids=found.rows, duplicate_examples=found.examples)


def repeated_error(found: int, examples: Sequence[str]) -> UserError:
    """Return the error to raise for repeated ids if the job does not allow them (`input.duplicate_ids: error`)."""
    listed = "; ".join(examples)
    problem = f"input.id: {counted(found, 'row')} with the id of an earlier row, such as {listed}"
    return UserError(f"{problem}; make the ids unique, or set input.duplicate_ids: warn")


def _hashes(ids: pa.ChunkedArray) -> np.ndarray:
    """Return the hashes of N ids, [N]. Equal ids have equal hashes within one process. An integer is its own hash."""
    if types.is_timestamp(ids.type):  # drop the time zone, which this machine may not know
        ids = ids.cast(pa.timestamp(ids.type.unit)).cast(pa.int64())
    if types.is_integer(ids.type):
        return np.asarray(ids.cast(pa.int64(), safe=False).to_numpy())
    bytes_or_nested = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_nested)
    if not any(is_kind(ids.type) for is_kind in bytes_or_nested):
        ids = ids.cast(pa.large_string())  # compare as text, because Python cannot represent all dates
    values = ids.to_pylist()
    return np.fromiter(map(hash, map(repr, values) if types.is_nested(ids.type) else values), np.int64, len(ids))


def _ids(folder: Folder, name: str) -> pa.ChunkedArray:
    """Return the id of each input row, from a part (output file of one shard)."""
    with folder.open(name) as opened:
        table = pq.ParquetFile(opened).read(columns=["id", "sample_index"], use_threads=False)
    return table.filter(pa.compute.equal(table["sample_index"], 0))["id"]
