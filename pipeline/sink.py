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
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from ray.data import Datasink
from ray.data.block import Block, BlockAccessor

from pipeline.config import StorageConfig
from pipeline.source import Shard
from pipeline.stats import ShardStats, input_rows
from pipeline.storage import Folder, open_folder

log = logging.getLogger(__name__)
COMMITS = "_job/commits"
PART = re.compile(r"part-\d{6,}\.parquet")


def part_name(shard: int) -> str:
    return f"part-{shard:06d}.parquet"


def record_name(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"


def commit(folder: Folder, shard: Shard, data: bytes, stats: ShardStats, fingerprint: str) -> bool:
    """Commit a shard's part and then its record; False if an earlier attempt had committed it.

    Raises ValueError if a part of that name is there and is not this job's.
    """
    began = time.perf_counter()
    first = folder.create(part_name(shard.index), data)
    if first:
        stats = replace(stats, commit_seconds=time.perf_counter() - began)
        folder.create(record_name(shard.index), _record(data, stats))
    else:
        adopt(folder, shard, fingerprint)
    return first


def adopt(folder: Folder, shard: Shard, fingerprint: str) -> None:
    """Check a part that is there and make its record, if it has none, from what the part itself tells."""
    data = folder.read(part_name(shard.index))
    folder.create(record_name(shard.index), _record(data, _stats_of_part(folder, shard, data, fingerprint)))


def committed(folder: Folder, shards: Iterable[Shard], fingerprint: str) -> set[int]:
    """Indices of the shards that are committed, after parts without a record have been adopted.

    Raises ValueError for a part that is not this job's.
    """
    listed = {shard.index: shard for shard in shards}
    records = set(folder.names(COMMITS))  # before the parts: a part comes first, so none is missed for its record
    parts = set(folder.names())
    done = {index for index in listed if part_name(index) in parts}
    for index in sorted(done):
        if f"{index:06d}.json" not in records:
            log.warning("%s had no commit record: checked and adopted", part_name(index))
            adopt(folder, listed[index], fingerprint)
    for index in sorted(set(listed) - done):
        if f"{index:06d}.json" in records:
            log.warning("%s is gone although it was committed: its shard is run again", part_name(index))
            folder.remove(record_name(index))
    return done


def read_records(folder: Folder) -> list[ShardStats]:
    """Statistics of all commit records, by shard. ValueError names a record that cannot be read."""
    found = []
    for name in folder.names(COMMITS):
        try:
            found.append(ShardStats.from_record(json.loads(folder.read(f"{COMMITS}/{name}"))["stats"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder.url}/{COMMITS}/{name}: not a commit record ({type(error).__name__}); delete it and run again"
            ) from None
    return sorted(found, key=lambda stats: stats.shard)


def clear(folder: Folder) -> None:
    """Remove what an earlier job left in an output folder: parts first, what vouches for them last."""
    for name in folder.names():
        if name == "_SUCCESS" or PART.fullmatch(name):
            folder.remove(name)
    for name in folder.names(COMMITS):
        folder.remove(f"{COMMITS}/{name}")
    for name in folder.names("_job"):
        if name != "lease.json":
            folder.remove(f"_job/{name}")


def clear_temporaries(folder: Folder) -> None:
    """Remove what killed processes left half-written."""
    for name in folder.names("_job/tmp"):
        folder.remove(f"_job/tmp/{name}")


def _record(data: bytes, stats: ShardStats) -> bytes:
    values = {
        "shard": stats.shard,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "rows": stats.rows,
        "stats": asdict(stats),
    }
    return (json.dumps(values, indent=1) + "\n").encode()


def _stats_of_part(folder: Folder, shard: Shard, data: bytes, fingerprint: str) -> ShardStats:
    name = f"{folder.url}/{part_name(shard.index)}"
    try:
        parquet = pq.ParquetFile(io.BytesIO(data))
        table = parquet.read()
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{name}: damaged ({' '.join(str(error).split())}); delete it and run again") from None
    metadata = parquet.schema_arrow.metadata or {}
    if metadata.get(b"skipdecode.fingerprint", b"").decode() != fingerprint:
        raise ValueError(f"{name}: written by another job; move it away, or start anew with --overwrite")
    if metadata.get(b"skipdecode.shard") != str(shard.index).encode() or input_rows(table) != shard.rows:
        raise ValueError(f"{name}: does not hold shard {shard.index} ({shard.rows} rows); delete it and run again")
    return ShardStats.of_part(shard.index, table, int(metadata[b"skipdecode.num_layers"]))


class CommitSink(Datasink[None]):
    """Ray Data sink: commits each shard of each block. tally: a `Tally` actor that is told of each one."""

    def __init__(self, url: str, storage: StorageConfig, fingerprint: str, tally: Any) -> None:
        self.url = url
        self.storage = storage
        self.fingerprint = fingerprint
        self.tally = tally

    def write(self, blocks: Iterable[Block], ctx: Any) -> None:
        folder = open_folder(self.url, self.storage)
        for block in blocks:
            for row in BlockAccessor.for_block(block).to_arrow().to_pylist():
                stats = ShardStats.from_record(json.loads(row["stats"]))
                shard = Shard(stats.shard, "", 0, stats.rows)  # where it came from is not asked here
                first = commit(folder, shard, row["part"], stats, self.fingerprint)
                self.tally.ended.remote(stats.shard, first, stats.rows, stats.errors, stats.generated_tokens)


def commit_shards(batch: pa.Table, sink: CommitSink) -> pa.Table:
    """Ray Data stage over finished shards: commits them through the sink and passes on their indices."""
    sink.write([batch], None)
    return batch.select(["shard"])
