"""The commit protocol. A part file, created once and whole, *is* the commit of its shard; its record follows.

The first attempt wins; a later attempt discards its part. A part without a record (the process died between the two)
is validated and its record rebuilt. Readers that glob ``*.parquet`` see only whole, committed parts.

    commit ──> committed_shards (start of a run) ──> load_records (end of a run) ──> finalize.py
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from actors.engine.errors import UserError, flat
from pipeline import metrics
from pipeline.commit.records import (
    COMMITS,
    SEGMENTS,
    CommitRecord,
    encode_record,
    loose_shards,
    merge_records,
    read_loose,
    read_segments,
    record_name,
    records_table,
)
from pipeline.generate.coordinator import Coordinator
from pipeline.generate.output import shard_metadata
from pipeline.generate.stats import ShardStats
from pipeline.input.shards import Shard
from pipeline.plan.plan_files import JOB
from pipeline.runtime.quarantine import clear_quarantine, release_shard
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
SUCCESS = "_SUCCESS"
PARTS_AT_ONCE = 8  # parts that are held in memory whole
PART = re.compile(r"part-\d{6,}\.parquet")
OWN = re.compile(  # files in `_job` that jobs write
    r"(job|summary|duplicates|results|tables|runs|spent|prediction|products-.+)\.json|(plan|inputs|stats)\.parquet|schema\.arrow|"
    r"report\.html|probe-[0-9a-f]+"
)


def part_name(shard: int) -> str:
    return f"part-{shard:06d}.parquet"


def commit(folder: Folder, shard: Shard, part: bytes, stats: ShardStats, fingerprint: str) -> bool:
    """Commit a shard: create its part, then its record. False if an earlier attempt has committed it.

    Raises UserError if the existing part is damaged or another job's.
    """
    began = time.perf_counter()
    first = folder.create(part_name(shard.index), part)
    if first:
        stats = replace(stats, commit_seconds=time.perf_counter() - began)
        metrics.add("seconds", stats.commit_seconds, part="commit")
        folder.create(record_name(shard.index), encode_record(part, stats, fingerprint))
    else:
        rebuild_record(folder, shard, fingerprint)
    return first


def rebuild_record(folder: Folder, shard: Shard, fingerprint: str) -> CommitRecord:
    """Validate an existing part and create its record from the part itself. An existing record is kept."""
    part = folder.read(part_name(shard.index))
    stats = check_part(folder, shard, part, fingerprint)
    folder.create(record_name(shard.index), encode_record(part, stats, fingerprint))
    return CommitRecord(hashlib.sha256(part).hexdigest(), len(part), stats)


def check_part(folder: Folder, shard: Shard, part: bytes, fingerprint: str) -> ShardStats:
    """Validate the bytes of a part, and return the statistics that they hold.

    Times, memory and device are not in a part and are 0 or empty. folder: named in errors, not read. Raises
    UserError if the part is damaged, belongs to another job, or does not hold the rows of `shard`.
    """
    name = f"{folder.url}/{part_name(shard.index)}"
    try:
        table = read_parquet(part)
        if part[:4] != b"PAR1":  # pyarrow does not check it, other readers do
            raise UserError("no Parquet magic at its beginning")
        metadata = table.schema.metadata or {}
        ours = metadata.get(b"skipdecode.fingerprint") == fingerprint.encode()
        stats = ShardStats.of_part(shard.index, table, int(metadata[b"skipdecode.num_layers"])) if ours else None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        reason = "".join(char if char.isprintable() else "?" for char in flat(error))
        raise UserError(f"{name}: damaged ({reason}); delete it and run again") from None
    if stats is None:
        remedy = ", or start again with --overwrite" if b"skipdecode.fingerprint" in metadata else ""
        raise UserError(f"{name}: written by another {'job' if remedy else 'program'}; move it away{remedy}")
    named = all(metadata.get(key.encode()) == value.encode() for key, value in shard_metadata(shard).items())
    if not named or stats.rows != shard.rows:
        rows = f"{shard.rows} rows from row {shard.first_row} of {shard.url}"
        raise UserError(f"{name}: does not hold shard {shard.index} ({rows}); delete it and run again")
    return stats


def committed_shards(folder: Folder, shards: Iterable[Shard], fingerprint: str) -> set[int]:
    """Indices of the committed shards, at the start of a run; rebuilds the records of parts that have none.

    Trusts the records in segments; `load_records` checks every part at the end. Raises UserError for a part that is
    damaged or another job's.
    """
    planned = {shard.index: shard for shard in shards}
    loose = set(loose_shards(folder))  # before the parts: a part precedes its record, so none is missed
    segments, damaged = read_segments(folder, fingerprint)
    _drop_segments(folder, damaged)
    compacted = {shard for table in segments.values() for shard in table["shard"].to_pylist()} & planned.keys()
    last = max(compacted | loose, default=-1)
    unknown = [index for index in planned.keys() - compacted if index <= last]
    parts = part_sizes(folder, unknown, last).keys() & (planned.keys() - compacted)
    _rebuild_records(folder, [planned[index] for index in sorted(parts - loose)], fingerprint)
    gone = sorted((loose & planned.keys()) - compacted - parts)
    for index in gone:
        log.warning("%s was committed and is gone: its shard is run again", part_name(index))
    folder.remove_all([record_name(index) for index in gone])
    return compacted | parts


def load_records(folder: Folder, shards: Iterable[Shard], fingerprint: str) -> tuple[pa.Table, dict[int, int]]:
    """Records of all committed shards as in `merge_records`, and the size in bytes of every part by shard.

    Rebuilds records that are damaged or missing from their parts. Raises UserError for a part that is damaged or
    another job's.
    """
    planned = {shard.index: shard for shard in shards}
    loose, damaged = read_loose(folder, loose_shards(folder), fingerprint)  # before segments: records move there
    segments, damaged_segments = read_segments(folder, fingerprint)
    _drop_segments(folder, damaged_segments)
    for index in damaged:
        log.warning("%s/%s: damaged and removed", folder.url, record_name(index))
    folder.remove_all([record_name(index) for index in damaged])
    parts = part_sizes(folder, planned, max(planned, default=-1))
    table = merge_records([records_table(loose), *segments.values()])
    missing = sorted(parts.keys() & planned.keys() - set(table["shard"].to_pylist()))
    rebuilt = _rebuild_records(folder, [planned[index] for index in missing], fingerprint)
    return merge_records([table, records_table(rebuilt)]), parts


def part_sizes(folder: Folder, shards: Iterable[int], last: int) -> dict[int, int]:
    """Sizes in bytes, by shard, of the parts of `shards` and of all parts after shard `last`."""
    stems = {part_name(index)[: -len("000.parquet")] for index in shards}
    sizes = folder.sizes(stems, after=part_name(last) if last >= 0 else "")
    return {int(name[5:-8]): size for name, size in sizes.items() if PART.fullmatch(name)}


def _rebuild_records(folder: Folder, shards: Sequence[Shard], fingerprint: str) -> list[CommitRecord]:
    if shards:
        others = f" and {len(shards) - 1:,} others" if len(shards) > 1 else ""
        log.warning("%s%s had no commit record: validated and recorded", part_name(shards[0].index), others)
    return list(in_parallel(lambda shard: rebuild_record(folder, shard, fingerprint), shards, PARTS_AT_ONCE))


def _drop_segments(folder: Folder, names: Sequence[str]) -> None:
    for name in names:
        log.warning("%s/%s/%s: damaged or another job's, removed; its records are rebuilt", folder.url, SEGMENTS, name)
    folder.remove_all([f"{SEGMENTS}/{name}" for name in names])


def clear(folder: Folder) -> None:
    """Remove a job's files: `_SUCCESS` and parts first, then records, quarantine markers and the files of `_job`.

    The lease, temporaries and all other files of the folder stay. Checks nothing: the caller must hold the lease.
    """
    folder.remove_all([name for name in folder.names() if name == SUCCESS or PART.fullmatch(name)])
    for subfolder in (COMMITS, SEGMENTS):
        folder.remove_all([f"{subfolder}/{name}" for name in folder.names(subfolder)])
    clear_quarantine(folder)
    folder.remove_all([f"_job/{name}" for name in folder.names("_job") if OWN.fullmatch(name)])


def clear_temporaries(folder: Folder) -> None:
    """Remove half-written files of killed processes."""
    for name in folder.names("_job/tmp"):
        folder.remove(f"_job/tmp/{name}")


def check_output(folder: Folder, fingerprint: str) -> None:
    """Raise UserError unless the job's output, as this process sees it, holds the job: a local path may be another
    folder on each node.
    """
    try:
        known = json.loads(folder.read(JOB))["fingerprint"]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        known = None
    if known != fingerprint:
        raise UserError(
            f"output.path: {folder.url} on node {socket.gethostname()} is not the folder in which this job began: give "
            "a path that all nodes share, such as s3://bucket/folder"
        )


def commit_shard(
    shard: Shard, part: bytes, stats: ShardStats, folder: Folder, fingerprint: str, coordinator: Coordinator
) -> None:
    """Commit a shard, remove its quarantine markers and report the commit to the run's coordinator."""
    first = commit(folder, shard, part, stats, fingerprint)
    release_shard(folder, shard.index)
    if first:
        metrics.add("rows", stats.rows)
        metrics.add("row_errors", stats.errors)
    coordinator.ended(shard.index, first, stats.rows, stats.errors, stats.generated_tokens)
