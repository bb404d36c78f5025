"""The commit protocol. A part file, created once and whole, *is* the commit of its shard; its record follows.

The first attempt wins and a later one drops its own. A part whose record is missing, because the process died
between the two, is checked and adopted. Readers that glob ``*.parquet`` see only whole, committed parts.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.engine.errors import UserError
from pipeline.commit.records import (
    COMMITS,
    SEGMENTS,
    Record,
    encode,
    joined,
    loose_records,
    read_loose,
    read_segments,
    record_name,
    records_table,
)
from pipeline.generate.stats import ShardStats
from pipeline.read.shards import Shard
from pipeline.runtime.quarantine import clear_quarantine, release_shard
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder

log = logging.getLogger(__name__)
PARTS_AT_ONCE = 8  # of those that are read whole
PART = re.compile(r"part-\d{6,}\.parquet")


def part_name(shard: int) -> str:
    return f"part-{shard:06d}.parquet"


def commit(folder: Folder, shard: Shard, data: bytes, stats: ShardStats, fingerprint: str) -> bool:
    """Commit a shard's part and then its record; False if an earlier attempt had committed it.

    Raises ValueError if a part of that name is there and is not this job's.
    """
    began = time.perf_counter()
    first = folder.create(part_name(shard.index), data)
    if first:
        stats = replace(stats, commit_seconds=time.perf_counter() - began)
        folder.create(record_name(shard.index), encode(data, stats, fingerprint))
    else:
        adopt(folder, shard, fingerprint)
    return first


def adopt(folder: Folder, shard: Shard, fingerprint: str) -> Record:
    """Check a part that is there and make its record, if it has none, from what the part itself tells."""
    data = folder.read(part_name(shard.index))
    stats = check_part(folder, shard, data, fingerprint)
    folder.create(record_name(shard.index), encode(data, stats, fingerprint))
    return Record(hashlib.sha256(data).hexdigest(), len(data), stats)


def check_part(folder: Folder, shard: Shard, data: bytes, fingerprint: str) -> ShardStats:
    """What a part tells of itself. ValueError if it is damaged, another job's, or does not hold the shard."""
    name = f"{folder.url}/{part_name(shard.index)}"
    try:
        parquet = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
        table = parquet.read()
        if data[:4] != b"PAR1":  # which pyarrow does not look at and other readers do
            raise UserError("no Parquet magic at its beginning")
        metadata = parquet.schema_arrow.metadata or {}
        ours = metadata.get(b"skipdecode.fingerprint") == fingerprint.encode()
        stats = ShardStats.of_part(shard.index, table, int(metadata[b"skipdecode.num_layers"])) if ours else None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        said = "".join(one if one.isprintable() else "?" for one in " ".join(str(error).split()))
        raise UserError(f"{name}: damaged ({said}); delete it and run again") from None
    if stats is None:
        raise UserError(f"{name}: written by another job; move it away, or start anew with --overwrite")
    if metadata.get(b"skipdecode.shard") != str(shard.index).encode() or stats.rows != shard.rows:
        raise UserError(f"{name}: does not hold shard {shard.index} ({shard.rows} rows); delete it and run again")
    return stats


def committed(folder: Folder, shards: Iterable[Shard], fingerprint: str) -> set[int]:
    """Indices of the shards that are committed, after parts without a record have been adopted.

    A record in a segment is believed; `settled` looks at every part. Raises ValueError for a part that is not
    this job's.
    """
    planned = {shard.index: shard for shard in shards}
    loose = set(loose_records(folder))  # before the parts: a part comes first, so none is missed for its record
    segments, damaged = read_segments(folder, fingerprint)
    _drop_segments(folder, damaged)
    rolled = {shard for table in segments.values() for shard in table["shard"].to_pylist()} & planned.keys()
    last = max(rolled | loose, default=-1)
    unsure = [index for index in planned.keys() - rolled if index <= last]
    parts = part_sizes(folder, unsure, last).keys() & (planned.keys() - rolled)
    _adopt_all(folder, [planned[index] for index in sorted(parts - loose)], fingerprint)
    gone = sorted((loose & planned.keys()) - rolled - parts)
    for index in gone:
        log.warning("%s is gone although it was committed: its shard is run again", part_name(index))
    folder.remove_all([record_name(index) for index in gone])
    return rolled | parts


def settled(folder: Folder, shards: Iterable[Shard], fingerprint: str) -> tuple[pa.Table, dict[int, int]]:
    """The records of all committed shards, by shard, and every part's size in bytes.

    Records that are damaged, or missing beside their part, are made again. Raises ValueError for a part that is
    not this job's.
    """
    planned = {shard.index: shard for shard in shards}
    loose, damaged = read_loose(folder, loose_records(folder), fingerprint)  # before segments that may take them
    segments, broken = read_segments(folder, fingerprint)
    _drop_segments(folder, broken)
    sound = [one for one in loose if _fits(one, planned.get(one.stats.shard))]
    damaged += [one.stats.shard for one in loose if not _fits(one, planned.get(one.stats.shard))]
    for index in damaged:
        log.warning("%s/%s: damaged and removed", folder.url, record_name(index))
    folder.remove_all([record_name(index) for index in damaged])
    parts = part_sizes(folder, planned, max(planned, default=-1))
    table = joined([records_table(sound), *segments.values()])
    missing = sorted(parts.keys() & planned.keys() - set(table["shard"].to_pylist()))
    adopted = _adopt_all(folder, [planned[index] for index in missing], fingerprint)
    return joined([table, records_table(adopted)]), parts


def _fits(record: Record, shard: Shard | None) -> bool:
    return shard is None or record.stats.rows == shard.rows


def part_sizes(folder: Folder, shards: Iterable[int], last: int) -> dict[int, int]:
    """Size in bytes, by shard, of the parts of these shards, and of all whose name comes after the last shard's."""
    stems = {part_name(index)[: -len("000.parquet")] for index in shards}
    found = folder.sizes(stems, after=part_name(last) if last >= 0 else "")
    return {int(name[5:-8]): size for name, size in found.items() if PART.fullmatch(name)}


def _adopt_all(folder: Folder, shards: Sequence[Shard], fingerprint: str) -> list[Record]:
    """Adopt parts that have no record; each is held in memory whole, so few at once."""
    if shards:
        others = f" and {len(shards) - 1:,} others" if len(shards) > 1 else ""
        log.warning("%s%s had no commit record: checked and adopted", part_name(shards[0].index), others)
    return list(in_parallel(lambda shard: adopt(folder, shard, fingerprint), shards, PARTS_AT_ONCE))


def _drop_segments(folder: Folder, names: Sequence[str]) -> None:
    for name in names:
        log.warning(
            "%s/%s/%s: damaged or another job's, removed; what it held is made again", folder.url, SEGMENTS, name
        )
    folder.remove_all([f"{SEGMENTS}/{name}" for name in names])


def clear(folder: Folder) -> None:
    """Remove what an earlier job left in an output folder: parts first, what vouches for them last."""
    folder.remove_all([name for name in folder.names() if name == "_SUCCESS" or PART.fullmatch(name)])
    for subfolder in (COMMITS, SEGMENTS):
        folder.remove_all([f"{subfolder}/{name}" for name in folder.names(subfolder)])
    clear_quarantine(folder)
    folder.remove_all([f"_job/{name}" for name in folder.names("_job")])


def clear_temporaries(folder: Folder) -> None:
    """Remove what killed processes left half-written."""
    for name in folder.names("_job/tmp"):
        folder.remove(f"_job/tmp/{name}")


def commit_shards(batch: pa.Table, folder: Folder, fingerprint: str, coordinator: Any) -> pa.Table:
    """Ray Data stage over finished shards, columns part and stats: commits each and passes on its index.

    coordinator: a `Coordinator` actor that is told of each one.
    """
    for row in batch.select(["part", "stats"]).to_pylist():
        stats = ShardStats.from_record(json.loads(row["stats"]))
        shard = Shard(stats.shard, "", 0, stats.rows)  # where it came from is not asked here
        first = commit(folder, shard, row["part"], stats, fingerprint)
        release_shard(folder, stats.shard)
        coordinator.ended.remote(stats.shard, first, stats.rows, stats.errors, stats.generated_tokens)
    return batch.select(["shard"])
