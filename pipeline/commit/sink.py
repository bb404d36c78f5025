"""Commits shards. A shard is committed when its output file (part) is created. Then its commit record is written.

A part is created whole, and never twice: if a shard is answered again, the later part is discarded. If a process dies
before it writes the record, the record is rebuilt from the part. The glob ``*.parquet`` matches only committed parts.

    committed_shards (start of a run: checks earlier parts) ──> commit ──> load_records (end of a run) ──> finalize.py
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa

from actors.engine.errors import UserError, flat
from pipeline import metrics
from pipeline.answer.coordinator import Coordinator
from pipeline.answer.output import shard_metadata
from pipeline.answer.stats import ShardStats
from pipeline.commit.records import (
    Record,
    commit_record,
    drop_records,
    encode_record,
    loose_shards,
    merge,
    read_all,
    record_name,
    records_table,
    segments,
)
from pipeline.input.shards import Shard
from pipeline.messages import counted
from pipeline.plan.plan_files import JOB
from pipeline.runtime.announce import announced
from pipeline.runtime.quarantine import clear_quarantine, release_shard
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import FileInfo, Folder, read_json
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
SUCCESS = "_SUCCESS"
DAMAGED = "_job/damaged"  # folder into which --repair moves damaged parts
REPAIR = "run again with --repair, which keeps the file in _job/damaged and answers its shard again"
# How to check the parts of earlier runs. quick: compare the digests of local parts, and the sizes and tags of parts in
# a store. digests: compare the digests of all parts. repair: like digests, and move damaged parts to `DAMAGED`.
Check = Literal["quick", "digests", "repair"]
PARTS_AT_ONCE = 8  # maximum number of parts (output files) in memory at the same time
PART = re.compile(r"part-\d{6,}\.parquet")
OWN = re.compile(  # names of files in `_job` that jobs write
    r"(job|summary|results|runs|prediction|products-.+)\.json|(plan|inputs|stats)\.pq|schema\.arrow|"
    r"report\.html|probe-[0-9a-f]+"
)


class DamagedPart(UserError):
    """A part (output file of one shard) cannot be read, or does not hold the rows of its shard."""


def part_name(shard: int) -> str:
    return f"part-{shard:06d}.parquet"


def commit(folder: Folder, shard: Shard, part: bytes, stats: ShardStats, fingerprint: str) -> bool:
    """Commit a shard: create its output file with the bytes `part`, then its record. Return False if the file exists.

    Raises UserError if the existing file is damaged or belongs to another job.
    """
    began = time.perf_counter()
    if not folder.create(part_name(shard.index), part):
        _rebuild_record(folder, shard, fingerprint)
        return False
    stats = replace(stats, commit_seconds=time.perf_counter() - began)
    metrics.add("seconds", stats.commit_seconds, part="commit")
    record = commit_record(part, stats, folder.tag(part_name(shard.index)))
    folder.create(record_name(shard.index), encode_record(record, fingerprint))
    return True


def commit_shard(
    shard: Shard, part: bytes, stats: ShardStats, folder: Folder, fingerprint: str, coordinator: Coordinator
) -> None:
    """Commit a shard, remove its quarantine markers, and report the commit to `coordinator`."""
    first = commit(folder, shard, part, stats, fingerprint)
    release_shard(folder, shard.index)
    if first:
        metrics.add("rows", stats.rows)
        metrics.add("row_errors", stats.errors)
    counts = (stats.rows, stats.errors, stats.generated_tokens)
    coordinator.ended(shard.index, first, *counts, stats.error_kinds, stats.warnings)


def _rebuild_record(folder: Folder, shard: Shard, fingerprint: str) -> Record:
    """Validate a shard's output file, and return a commit record made from it. Save the record if none exists."""
    tag, part = folder.tag(part_name(shard.index)), folder.read(part_name(shard.index))
    record = commit_record(part, check_part(folder, shard, part, fingerprint), tag)
    folder.create(record_name(shard.index), encode_record(record, fingerprint))
    return record


def check_part(folder: Folder, shard: Shard, part: bytes, fingerprint: str) -> ShardStats:
    """Validate the bytes of a shard's output file (`part`), and return the shard's statistics.

    Statistics that the file does not hold (times, memory, device) are 0 or empty. folder: used only in error messages.
    Raises UserError if the file is damaged, belongs to another job, or does not hold the rows of `shard`.
    """
    name = f"{folder.url}/{part_name(shard.index)}"
    try:
        table = read_parquet(part)
        if part[:4] != b"PAR1":  # pyarrow does not check these bytes, but other readers do
            raise UserError("does not begin with PAR1, as Parquet files do")
        metadata = table.schema.metadata or {}
        ours = metadata.get(b"skipdecode.fingerprint") == fingerprint.encode()
        stats = ShardStats.of_part(shard.index, table, int(metadata[b"skipdecode.num_layers"])) if ours else None
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        reason = "".join(char if char.isprintable() else "?" for char in flat(error))
        raise DamagedPart(f"{name}: damaged ({reason}); {REPAIR}") from None
    if stats is None:
        remedy = ", or start again with --overwrite" if b"skipdecode.fingerprint" in metadata else ""
        raise UserError(f"{name}: written by another {'job' if remedy else 'program'}; move it away{remedy}")
    named = all(metadata.get(key.encode()) == value.encode() for key, value in shard_metadata(shard).items())
    if not named or stats.rows != shard.rows:
        rows = f"{counted(shard.rows, 'row')} from row {shard.first_row} of {shard.url}"
        raise DamagedPart(f"{name}: does not hold shard {shard.index} ({rows}); {REPAIR}")
    return stats


def committed_shards(folder: Folder, shards: Sequence[Shard], fingerprint: str, check: Check = "quick") -> set[int]:
    """Check the output files (parts) at the start of a run, and return the indices of all committed shards.

    Rebuild missing records from the parts, and remove the records of missing parts. Raises UserError if a part is
    damaged or belongs to another job. With check = "repair", move damaged parts to `DAMAGED` instead.
    """
    records, parts = load_records(folder, shards, fingerprint, check)
    recorded = set(records["shard"].to_pylist()) & {shard.index for shard in shards}
    gone = sorted(recorded - parts.keys())
    for shard in gone:
        log.warning("%s was committed and is gone: its shard is answered again", part_name(shard))
    damaged = damaged_parts(folder, records, parts, check)
    if damaged and check != "repair":
        first, others = min(damaged), f" (and {len(damaged) - 1:,} others)" if len(damaged) > 1 else ""
        raise UserError(f"{folder.url}/{part_name(first)}{others}: {damaged[first]}; {REPAIR}")
    for shard in damaged:
        set_aside(folder, part_name(shard))
    drop_records(folder, [*gone, *damaged], fingerprint)
    return recorded - set(gone) - damaged.keys()


def load_records(
    folder: Folder, shards: Iterable[Shard], fingerprint: str, check: Check = "quick"
) -> tuple[pa.Table, dict[int, FileInfo]]:
    """Return all commit records as a table, and shard -> size and tag of its output file (part).

    Rebuild damaged and missing records from the parts. Raises UserError if a part belongs to another job, or if a part
    without a record is damaged. With check = "repair", move such damaged parts to `DAMAGED` instead.
    """
    planned = {shard.index: shard for shard in shards}
    records, damaged = read_all(folder, fingerprint)  # before the parts are listed, because a part precedes its record
    for name in damaged:
        log.warning("%s/%s: removed, because it is damaged or another job's; its records are rebuilt", folder.url, name)
    folder.remove_all(damaged)
    parts = part_files(folder, planned)
    missing = [planned[index] for index in sorted(parts.keys() & planned.keys() - set(records["shard"].to_pylist()))]

    def rebuilt(shard: Shard) -> Record | None:
        try:
            return _rebuild_record(folder, shard, fingerprint)
        except DamagedPart:
            if check != "repair":
                raise
            set_aside(folder, part_name(shard.index))
            del parts[shard.index]
            return None

    if missing:
        others = f" and {len(missing) - 1:,} others" if len(missing) > 1 else ""
        log.warning("%s%s had no commit record: the record is rebuilt", part_name(missing[0].index), others)
        found = [record for record in in_parallel(rebuilt, missing, PARTS_AT_ONCE) if record is not None]
        records = merge([records, records_table(found)])
    return records, parts


def part_files(folder: Folder, shards: Iterable[int]) -> dict[int, FileInfo]:
    """Return shard -> size and tag of its output file, for `shards` and for all shards with higher numbers."""
    shards = set(shards)
    stems = {part_name(index)[: -len("000.parquet")] for index in shards}
    found = folder.listed(stems, after=part_name(max(shards)) if shards else "")
    return {int(name[5:-8]): info for name, info in found.items() if PART.fullmatch(name)}


def damaged_parts(
    folder: Folder, records: pa.Table, parts: Mapping[int, FileInfo], check: Check = "quick"
) -> dict[int, str]:
    """Return shard -> difference, for each output file in `parts` that differs from its record.

    Compare sizes and digests. With check = "quick", do not read a file in a store whose tag (ETag) is the one that its
    record holds.
    """
    damaged, digests = dict[int, str](), dict[int, str]()
    for record in records.select(["shard", "bytes", "sha256", "tag"]).to_pylist():
        shard, size, tag = record["shard"], record["bytes"], record["tag"]
        if (found := parts.get(shard)) is None:
            continue
        if found.size != size:
            damaged[shard] = f"damaged ({found.size:,} bytes, {size:,} were committed)"
        elif check != "quick" or not tag or tag != found.tag:  # a local file has no tag
            digests[shard] = record["sha256"]

    def differs(shard: int) -> bool:
        return hashlib.sha256(folder.read(part_name(shard))).hexdigest() != digests[shard]

    with announced(f"checking the digests of {len(digests):,} parts"):
        for shard, wrong in zip(digests, in_parallel(differs, digests, PARTS_AT_ONCE), strict=True):
            if wrong:
                damaged[shard] = "damaged (sha256 differs from the commit's)"
    return damaged


def set_aside(folder: Folder, name: str) -> None:
    """Move a damaged file to the folder `DAMAGED`: copy it, check the copy, then remove the file."""
    data = folder.read(name)
    copy = f"{DAMAGED}/{name.removesuffix('.parquet')}-{hashlib.sha256(data).hexdigest()[:16]}.pq"
    folder.create(copy, data)
    if folder.read(copy) != data:
        raise OSError(f"{folder.url}/{copy}: the copy differs from {name}, so {name} was not removed")
    folder.remove(name)
    log.warning("%s/%s was damaged: kept as %s; its shard is answered again", folder.url, name, copy)


def clear(folder: Folder) -> None:
    """Remove a job's files, beginning with `_SUCCESS` and the output files (parts). Keep the lease and all other files.

    The caller must hold the lease.
    """
    folder.remove_all([name for name in folder.names() if name == SUCCESS or PART.fullmatch(name)])
    folder.remove_all([*map(record_name, loose_shards(folder)), *segments(folder)])
    clear_quarantine(folder)
    folder.remove_all([f"_job/{name}" for name in folder.names("_job") if OWN.fullmatch(name)])


def clear_temporaries(folder: Folder) -> None:
    """Remove the temporary files of killed processes (see `LocalFolder`)."""
    folder.remove_all([f"_job/tmp/{name}" for name in folder.names("_job/tmp") if re.search(r"\.[0-9a-f]{32}$", name)])


def check_output(folder: Folder, fingerprint: str) -> None:
    """Raise UserError if `folder` does not hold the job. A local path may name different folders on different nodes."""
    if (read_json(folder, JOB, dict[str, Any]) or {}).get("fingerprint") != fingerprint:
        raise UserError(
            f"output.path: {folder.url} on node {socket.gethostname()} is not the folder in which this job began: give "
            "a path that all nodes share, such as s3://bucket/folder"
        )
