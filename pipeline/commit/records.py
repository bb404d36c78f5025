"""Stores commit records: one small file per shard. While the job runs, they are merged into segments (compaction).

    _job/commits/000123.json     the record of one shard, written by the actor that committed the shard
    _job/segments/<sha256>.pq    a segment: many records in one file, named by its digest; replaces small files

A record may be in both a small file and a segment, or in two segments, for example after a crash during compaction.
Such copies are harmless. A lost record is rebuilt from the shard's output file (part). Without segments, it would take
several minutes to read the records of 250,000 shards.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from actors.engine.errors import UserError, flat
from pipeline.answer.stats import STATS_SCHEMA, ShardStats
from pipeline.storage.concurrency import in_parallel, repeating
from pipeline.storage.folder import STORE_ERRORS, Folder
from pipeline.storage.parquet import parquet_bytes, read_parquet

log = logging.getLogger(__name__)
COMMITS, SEGMENTS = "_job/commits", "_job/segments"
COMPACT_AT = 1000  # a compaction begins when there are at least this many small record files
COMPACT_SECONDS = 30.0  # time between two compactions
SEGMENT_ROWS = 10_000  # maximum number of records in a segment
RECORD, DIGEST = re.compile(r"(\d{6,})\.json"), re.compile(r"[0-9a-f]{64}")
Record = dict[str, Any]  # a row of `RECORDS_SCHEMA`: a shard's statistics, and its output file's digest, size and tag
RECORDS_SCHEMA = pa.schema([*STATS_SCHEMA, ("sha256", pa.string()), ("bytes", pa.int64()), ("tag", pa.string())])


def record_name(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"


def commit_record(part: bytes, stats: ShardStats, tag: str = "") -> Record:
    """Return a shard's commit record. part: bytes of the output file. tag: the file's ETag in the store, or ""."""
    return {**asdict(stats), "sha256": hashlib.sha256(part).hexdigest(), "bytes": len(part), "tag": tag}


def encode_record(record: Record, fingerprint: str) -> bytes:
    """Return a record as the bytes of its JSON file."""
    values = {
        **{name: record[name] for name in ("shard", "sha256", "bytes", "tag", "rows")},
        "fingerprint": fingerprint,
        "stats": {name: record[name] for name in STATS_SCHEMA.names},
    }
    return (json.dumps({**values, "check": _check(values)}, indent=1) + "\n").encode()


def decode_record(text: bytes, shard: int, fingerprint: str) -> Record | None:
    """Decode the content of a record file. Return None if it is damaged, or belongs to another shard or job."""
    try:
        values = json.loads(text)
        check, digest, size = values.pop("check"), values["sha256"], values["bytes"]
        stats = ShardStats.from_record(values["stats"])
        valid = (
            check == _check(values)
            and values["fingerprint"] == fingerprint
            and values["shard"] == stats.shard == shard
            and values["rows"] == stats.rows
            and type(size) is int
            and 0 <= size < 2**63
            and DIGEST.fullmatch(digest) is not None
        )
        return {**asdict(stats), "sha256": digest, "bytes": size, "tag": values["tag"]} if valid else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check(values: Mapping[str, object]) -> str:
    """Return a digest of a record's values. It reveals a damaged record, even if only one digit has changed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def records_table(records: Sequence[Record]) -> pa.Table:
    """Return a table with one row per record, in the order of `records`."""
    return pa.Table.from_pylist(list(records), schema=RECORDS_SCHEMA)


def loose_shards(folder: Folder) -> list[int]:
    """Return the sorted indices of all shards that have a small record file."""
    return sorted(int(match[1]) for name in folder.names(COMMITS) if (match := RECORD.fullmatch(name)))


def _read_loose(folder: Folder, shards: Sequence[int], fingerprint: str) -> tuple[list[Record], list[str]]:
    """Read the small record files of `shards` that still exist. Return the records, and the names of damaged files."""

    def read(shard: int) -> Record | str | None:
        try:
            return decode_record(folder.read(record_name(shard)), shard, fingerprint) or record_name(shard)
        except FileNotFoundError:  # a compaction has removed the file since the listing
            return None

    results = list(in_parallel(read, shards))
    return [one for one in results if isinstance(one, dict)], [one for one in results if isinstance(one, str)]


def _read_segments(folder: Folder, fingerprint: str) -> tuple[dict[str, pa.Table], list[str]]:
    """Return segment name -> records, and the names of segments that are damaged or belong to another job."""

    def read(name: str) -> pa.Table | None:
        try:
            data = folder.read(name)
        except FileNotFoundError:  # another segment has replaced this one since the listing
            return RECORDS_SCHEMA.empty_table()
        if name != _segment_name(data):
            return None
        table = read_parquet(data)
        if table.schema.metadata.get(b"skipdecode.fingerprint") != fingerprint.encode():
            return None
        known = set(RECORDS_SCHEMA.names) <= set(table.column_names)
        return table.select(RECORDS_SCHEMA.names).cast(RECORDS_SCHEMA) if known else None

    names = segments(folder)
    tables = dict(zip(names, in_parallel(read, names), strict=True))
    found = {name: table for name, table in tables.items() if table is not None}
    return found, [name for name in names if name not in found]


def segments(folder: Folder) -> list[str]:
    """Return the names of all segments."""
    return [f"{SEGMENTS}/{name}" for name in folder.names(SEGMENTS) if DIGEST.fullmatch(name.removesuffix(".pq"))]


def _segment_name(data: bytes) -> str:
    return f"{SEGMENTS}/{hashlib.sha256(data).hexdigest()}.pq"


def read_all(folder: Folder, fingerprint: str) -> tuple[pa.Table, list[str]]:
    """Return all valid records (one row per shard, sorted by shard), and names of damaged files. Change no files."""
    # read small files before segments, because a compaction moves records from small files into segments
    loose, damaged = _read_loose(folder, loose_shards(folder), fingerprint)
    segments, damaged_segments = _read_segments(folder, fingerprint)
    return merge([records_table(loose), *segments.values()]), damaged + damaged_segments


def merge(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tables of records into one row per shard, sorted by shard. Prefer original records to rebuilt ones."""
    table = pa.concat_tables(tables).sort_by([("shard", "ascending"), ("rebuilt", "ascending")])
    shards = table["shard"].to_numpy()
    return table.filter(pa.array(np.append(True, shards[1:] != shards[:-1])[: len(shards)]))


def read_records(folder: Folder, fingerprint: str) -> pa.Table:
    """Return all records, one row per shard, sorted by shard. Raises UserError if a record file is damaged."""
    records, damaged = read_all(folder, fingerprint)
    if damaged:
        raise UserError(damaged_record(folder, damaged[0]))
    return records


def damaged_record(folder: Folder, name: str) -> str:
    return f"{folder.url}/{name}: damaged; run the job again to rebuild it from the output files"


def write_segment(folder: Folder, table: pa.Table, fingerprint: str) -> None:
    """Write the records in `table` as a segment, unless a segment with these records exists."""
    data = parquet_bytes(table.replace_schema_metadata({"skipdecode.fingerprint": fingerprint}), compression="zstd")
    folder.create(_segment_name(data), data)


def compact(folder: Folder, fingerprint: str, least: int = COMPACT_AT) -> None:
    """Move the records in small files into segments if there are at least `least` small files.

    Damaged files stay where they are. Their records are rebuilt at the end of the job.
    """
    shards = loose_shards(folder)
    for first in range(0, len(shards) if len(shards) >= least else 0, SEGMENT_ROWS):
        records, _ = _read_loose(folder, shards[first : first + SEGMENT_ROWS], fingerprint)
        if records:
            write_segment(folder, records_table(records), fingerprint)
            folder.remove_all([record_name(record["shard"]) for record in records])


def drop_records(folder: Folder, shards: Sequence[int], fingerprint: str) -> None:
    """Remove the records of `shards`, so that these shards are answered again."""
    for name, table in _read_segments(folder, fingerprint)[0].items() if shards else ():
        kept = table.filter(pc.invert(pc.is_in(table["shard"], pa.array(shards, pa.int64()))))
        if kept.num_rows < table.num_rows:
            if kept.num_rows:
                write_segment(folder, kept, fingerprint)
            folder.remove(name)
    folder.remove_all([record_name(shard) for shard in shards])


@contextmanager
def compacting(folder: Folder, fingerprint: str) -> Iterator[None]:
    """Compact records every `COMPACT_SECONDS` in a thread while the `with` block runs."""

    def work() -> None:
        try:
            compact(folder, fingerprint)
        except STORE_ERRORS as error:  # go on: no record is lost, and the store may recover
            log.warning("commit records could not be compacted; trying again later: %s", flat(error))

    with repeating(work, COMPACT_SECONDS, "compaction"):
        yield
