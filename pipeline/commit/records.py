"""Commit records: one small file per shard, compacted into segments while the job runs.

    _job/commits/000123.json          the record of a shard, written by the actor that committed it
    _job/segments/<sha256>.parquet    many records, named after the file's digest; their small files are then removed

All records are the union of both. A crash before the small files are removed leaves duplicates, and two runs that
compact at the same time write the same rows; both are harmless. The part is the commit: a lost record is rebuilt
from its part.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.engine.errors import UserError, flat
from pipeline.generate.stats import LATER, STATS_SCHEMA, ShardStats, to_table
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import STORE_ERRORS, Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
COMMITS, SEGMENTS = "_job/commits", "_job/segments"
COMPACT_AT = 1000  # loose records
COMPACT_SECONDS = 30.0  # between two counts of the loose records
SEGMENT_ROWS = 10_000  # at most
RECORD, SEGMENT = re.compile(r"(\d{6,})\.json"), re.compile(r"([0-9a-f]{64})\.parquet")
DIGEST = re.compile(r"[0-9a-f]{64}")
RECORDS_SCHEMA = pa.schema([*STATS_SCHEMA, pa.field("sha256", pa.string()), pa.field("bytes", pa.int64())])


@dataclass(frozen=True)
class CommitRecord:
    """A committed part: digest and size in bytes of its file, and the shard's statistics."""

    sha256: str
    bytes: int
    stats: ShardStats


def record_name(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"


def encode_record(part: bytes, stats: ShardStats, fingerprint: str) -> bytes:
    """The record file of a part with these bytes."""
    values = {
        "shard": stats.shard,
        "fingerprint": fingerprint,
        "sha256": hashlib.sha256(part).hexdigest(),
        "bytes": len(part),
        "rows": stats.rows,
        "stats": asdict(stats),
    }
    return (json.dumps({**values, "check": _check(values)}, indent=1) + "\n").encode()


def decode_record(text: bytes, shard: int, fingerprint: str) -> CommitRecord | None:
    """The record of a shard; None if the file is damaged, or belongs to another shard or job."""
    try:
        values = json.loads(text)
        check = values.pop("check")
        record = CommitRecord(values["sha256"], values["bytes"], ShardStats.from_record(values["stats"]))
        valid = (
            check == _check(values)
            and values["fingerprint"] == fingerprint
            and values["shard"] == record.stats.shard == shard
            and values["rows"] == record.stats.rows
            and type(record.bytes) is int
            and 0 <= record.bytes < 2**63
            and DIGEST.fullmatch(record.sha256) is not None
        )
        return record if valid else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check(values: dict[str, object]) -> str:
    """Digest of a record's values: without it a changed digit would go unnoticed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def records_table(records: Sequence[CommitRecord]) -> pa.Table:
    """One row per record, in their order."""
    table = to_table(record.stats for record in records)
    table = table.append_column("sha256", pa.array([record.sha256 for record in records], pa.string()))
    return table.append_column("bytes", pa.array([record.bytes for record in records], pa.int64()))


def loose_shards(folder: Folder) -> list[int]:
    """Shards with a record file of their own."""
    return sorted(int(match[1]) for name in folder.names(COMMITS) if (match := RECORD.fullmatch(name)))


def read_loose(folder: Folder, shards: Iterable[int], fingerprint: str) -> tuple[list[CommitRecord], list[int]]:
    """The loose records of these shards, and the shards whose record is damaged. Skips files that are gone."""

    def read(shard: int) -> CommitRecord | int | None:
        try:
            record = decode_record(folder.read(record_name(shard)), shard, fingerprint)
        except FileNotFoundError:  # compacted since it was listed
            return None
        return shard if record is None else record

    results = list(in_parallel(read, shards))
    records = [result for result in results if isinstance(result, CommitRecord)]
    return records, [result for result in results if isinstance(result, int)]


def read_segments(folder: Folder, fingerprint: str) -> tuple[dict[str, pa.Table], list[str]]:
    """Segments by name, and the names of segments that are damaged or belong to another job."""

    def read(name: str) -> pa.Table | None:
        try:
            data = folder.read(f"{SEGMENTS}/{name}")
        except FileNotFoundError:  # replaced by another since it was listed
            return RECORDS_SCHEMA.empty_table()
        match = SEGMENT.fullmatch(name)
        if not match or hashlib.sha256(data).hexdigest() != match[1]:
            return None
        table = read_parquet(data)
        if table.schema.metadata.get(b"skipdecode.fingerprint") != fingerprint.encode():
            return None
        table = _with_later_columns(table)
        kept = [name for name in RECORDS_SCHEMA.names if name in table.column_names]
        table = table.select(kept)  # earlier versions had further columns
        return table if table.schema.equals(RECORDS_SCHEMA) else None

    names = folder.names(SEGMENTS)
    tables = dict(zip(names, in_parallel(read, names), strict=True))
    segments = {name: table for name, table in tables.items() if table is not None}
    return segments, [name for name in names if name not in segments]


def _with_later_columns(table: pa.Table) -> pa.Table:
    """A segment with the columns that those of older versions lack; others as they are."""
    for name in LATER.keys() - set(table.column_names):
        value = pa.scalar(LATER[name], RECORDS_SCHEMA.field(name).type)
        table = table.append_column(name, pa.repeat(value, table.num_rows))
    return table.select(RECORDS_SCHEMA.names) if set(table.column_names) == set(RECORDS_SCHEMA.names) else table


def merge_records(tables: Iterable[pa.Table]) -> pa.Table:
    """One row per shard, sorted by shard. An original record precedes one that was rebuilt from the part."""
    table = pa.concat_tables([RECORDS_SCHEMA.empty_table(), *(table.replace_schema_metadata() for table in tables)])
    table = table.sort_by([("shard", "ascending"), ("rebuilt", "ascending")])
    shards = table["shard"].to_numpy()
    return table.filter(pa.array(np.append(True, shards[1:] != shards[:-1])[: len(shards)]))


def read_valid_records(folder: Folder, fingerprint: str) -> tuple[pa.Table, list[str]]:
    """All valid records as in `merge_records`, and one line for each damaged file. Changes nothing."""
    # loose records first: a compaction moves them into segments, never back
    loose, damaged = read_loose(folder, loose_shards(folder), fingerprint)
    segments, damaged_segments = read_segments(folder, fingerprint)
    names = [record_name(shard) for shard in damaged] + [f"{SEGMENTS}/{name}" for name in damaged_segments]
    return merge_records([records_table(loose), *segments.values()]), [
        f"{folder.url}/{name}: damaged; run the job again to rebuild it from its parts" for name in names
    ]


def read_records(folder: Folder, fingerprint: str) -> pa.Table:
    """All records as in `merge_records`. Raises UserError that names a damaged file."""
    records, problems = read_valid_records(folder, fingerprint)
    if problems:
        raise UserError(problems[0])
    return records


def write_segment(folder: Folder, table: pa.Table, fingerprint: str) -> None:
    """Write records into a new segment. A segment with the same rows may exist already."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"skipdecode.fingerprint": fingerprint}), sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    folder.create(f"{SEGMENTS}/{hashlib.sha256(data).hexdigest()}.parquet", data)


def compact(folder: Folder, fingerprint: str, least: int = COMPACT_AT) -> int:
    """Move loose records into segments if there are at least `least`; the number moved.

    Damaged records stay: the end of the job rebuilds them from their parts.
    """
    shards = loose_shards(folder)
    moved = 0
    for first in range(0, len(shards) if len(shards) >= least else 0, SEGMENT_ROWS):
        records, _ = read_loose(folder, shards[first : first + SEGMENT_ROWS], fingerprint)
        if records:
            write_segment(folder, records_table(records), fingerprint)
            folder.remove_all([record_name(record.stats.shard) for record in records])
            moved += len(records)
    return moved


def drop_records(folder: Folder, shards: Sequence[int], fingerprint: str) -> None:
    """Remove the records of shards whose parts are gone, so that the shards are open again."""
    gone = pa.array(shards, pa.int64())
    segments, _ = read_segments(folder, fingerprint)
    for name, table in segments.items():
        kept = table.filter(pc.invert(pc.is_in(table["shard"], gone)))
        if kept.num_rows < table.num_rows:
            if kept.num_rows:
                write_segment(folder, kept, fingerprint)
            folder.remove(f"{SEGMENTS}/{name}")
    folder.remove_all([record_name(shard) for shard in shards])


class Compaction:
    """A thread that compacts records while the `with` block runs, and once more after it ends well."""

    def __init__(self, folder: Folder, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compaction", daemon=True)

    def __enter__(self) -> Compaction:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._stop.is_set()
            if last and self._failed:
                return
            try:
                compact(self.folder, self.fingerprint)
            except STORE_ERRORS as error:  # loose records stay where they are; the store may recover
                log.warning("commit records could not be compacted: %s", flat(error))
            if last:
                return
            self._stop.wait(COMPACT_SECONDS)
