"""Commit records: a small file for each shard, rolled up into segments while the job runs.

    _job/commits/000123.json          the record of a shard, written by whoever committed it
    _job/segments/<sha256>.parquet    many records, named after its own digest; then the small files are removed

The records are the union of both. A crash before the small files are removed leaves some twice, and two runs that
roll up at once write the same rows: neither harms. The part is the commit, so a record can always be made again.
"""

from __future__ import annotations

import hashlib
import io
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

from actors.engine.errors import UserError
from pipeline.generate.stats import STATS_SCHEMA, ShardStats, to_table
from pipeline.storage.concurrency import in_parallel
from pipeline.storage.folder import STORE_ERRORS, Folder

log = logging.getLogger(__name__)
COMMITS, SEGMENTS = "_job/commits", "_job/segments"
ROLL_AT = 1000  # loose records
ROLL_SECONDS = 30.0  # between looks at how many there are
SEGMENT_ROWS = 10_000  # at most
RECORD, SEGMENT = re.compile(r"(\d{6,})\.json"), re.compile(r"([0-9a-f]{64})\.parquet")
DIGEST = re.compile(r"[0-9a-f]{64}")
RECORDS_SCHEMA = pa.schema([*STATS_SCHEMA, pa.field("sha256", pa.string()), pa.field("bytes", pa.int64())])


@dataclass(frozen=True)
class Record:
    """What is known of a committed part: the digest and the size of its file, and the shard's statistics."""

    sha256: str
    bytes: int
    stats: ShardStats


def record_name(shard: int) -> str:
    return f"{COMMITS}/{shard:06d}.json"


def encode(data: bytes, stats: ShardStats, fingerprint: str) -> bytes:
    """The record file of a part with these bytes."""
    values = {
        "shard": stats.shard,
        "fingerprint": fingerprint,
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "rows": stats.rows,
        "stats": asdict(stats),
    }
    return (json.dumps({**values, "check": _check(values)}, indent=1) + "\n").encode()


def decode(text: bytes, shard: int, fingerprint: str) -> Record | None:
    """The record of a shard; None if the file is damaged, or another shard's or job's."""
    try:
        values = json.loads(text)
        check = values.pop("check", None)
        record = Record(values["sha256"], values["bytes"], ShardStats.from_record(values["stats"]))
        sound = (
            values["shard"] == record.stats.shard == shard
            and values["rows"] == record.stats.rows
            and type(record.bytes) is int
            and 0 <= record.bytes < 2**63
            and DIGEST.fullmatch(record.sha256) is not None
            # versions before the first segments wrote neither of these two
            and values.get("fingerprint", fingerprint) == fingerprint
            and check in (None, _check(values))
        )
        return record if sound else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _check(values: dict[str, object]) -> str:
    """Of all that a record says: one digit changed would otherwise go unnoticed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def records_table(records: Sequence[Record]) -> pa.Table:
    """One row a record, in their order."""
    table = to_table(record.stats for record in records)
    table = table.append_column("sha256", pa.array([record.sha256 for record in records], pa.string()))
    return table.append_column("bytes", pa.array([record.bytes for record in records], pa.int64()))


def loose_records(folder: Folder) -> list[int]:
    """Shards with a record file of their own."""
    return sorted(int(found[1]) for name in folder.names(COMMITS) if (found := RECORD.fullmatch(name)))


def read_loose(folder: Folder, shards: Iterable[int], fingerprint: str) -> tuple[list[Record], list[int]]:
    """Records from files of their own, and the shards whose file is damaged; a file that is gone is left out."""

    def read(shard: int) -> Record | int | None:
        try:
            record = decode(folder.read(record_name(shard)), shard, fingerprint)
        except FileNotFoundError:  # rolled up since it was listed
            return None
        return shard if record is None else record

    found = list(in_parallel(read, shards))
    return [one for one in found if isinstance(one, Record)], [one for one in found if isinstance(one, int)]


def read_segments(folder: Folder, fingerprint: str) -> tuple[dict[str, pa.Table], list[str]]:
    """Segments by name, and the names of those that are damaged, or that a run of another job has left since."""

    def read(name: str) -> pa.Table | None:
        try:
            data = folder.read(f"{SEGMENTS}/{name}")
        except FileNotFoundError:  # replaced by another since it was listed
            return RECORDS_SCHEMA.empty_table()
        found = SEGMENT.fullmatch(name)
        if not found or hashlib.sha256(data).hexdigest() != found[1]:
            return None
        table = pq.read_table(io.BytesIO(data))
        if table.schema.metadata.get(b"skipdecode.fingerprint") != fingerprint.encode():
            return None
        return table if table.schema.equals(RECORDS_SCHEMA) else None

    names = folder.names(SEGMENTS)
    tables = dict(zip(names, in_parallel(read, names), strict=True))
    return {name: one for name, one in tables.items() if one is not None}, [
        name for name in names if tables[name] is None
    ]


def joined(tables: Iterable[pa.Table]) -> pa.Table:
    """One row a shard, by shard; of two records of one the one that was not made again from the part."""
    table = pa.concat_tables([RECORDS_SCHEMA.empty_table(), *(one.replace_schema_metadata() for one in tables)])
    table = table.sort_by([("shard", "ascending"), ("adopted", "ascending")])
    shards = table["shard"].to_numpy()
    return table.filter(pa.array(np.append(True, shards[1:] != shards[:-1])[: len(shards)]))


def sound_records(folder: Folder, fingerprint: str) -> tuple[pa.Table, list[str]]:
    """All records that can be read, one row a shard, by shard; and a line for each file that cannot."""
    loose, damaged = read_loose(folder, loose_records(folder), fingerprint)  # before the segments that may take them
    segments, broken = read_segments(folder, fingerprint)
    names = [record_name(shard) for shard in damaged] + [f"{SEGMENTS}/{name}" for name in broken]
    return joined([records_table(loose), *segments.values()]), [
        f"{folder.url}/{name}: damaged; run the job again, which makes it anew from its parts" for name in names
    ]


def read_records(folder: Folder, fingerprint: str) -> pa.Table:
    """All records, one row a shard, by shard. ValueError names a file that cannot be read."""
    records, problems = sound_records(folder, fingerprint)
    if problems:
        raise UserError(problems[0])
    return records


def write_segment(folder: Folder, table: pa.Table, fingerprint: str) -> None:
    """Write records into a new segment; one with the same rows may be there already."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"skipdecode.fingerprint": fingerprint}), sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    folder.create(f"{SEGMENTS}/{hashlib.sha256(data).hexdigest()}.parquet", data)


def roll_up(folder: Folder, fingerprint: str, least: int = ROLL_AT) -> int:
    """Move loose records, if there are at least so many, into segments; how many were moved.

    Damaged ones are left: whoever reads all records at the end makes them again from their parts.
    """
    shards = loose_records(folder)
    moved = 0
    for first in range(0, len(shards) if len(shards) >= least else 0, SEGMENT_ROWS):
        records, _ = read_loose(folder, shards[first : first + SEGMENT_ROWS], fingerprint)
        if records:
            write_segment(folder, records_table(records), fingerprint)
            folder.remove_all([record_name(record.stats.shard) for record in records])
            moved += len(records)
    return moved


def forget(folder: Folder, shards: Sequence[int], fingerprint: str) -> None:
    """Remove the records of shards, so that they count as open again."""
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
    """Rolls records up beside the job, from `with` to its end."""

    def __init__(self, folder: Folder, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="roll-up", daemon=True)

    def __enter__(self) -> Compaction:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._stop.is_set()  # once more after a good end
            if last and self._failed:
                return
            try:
                roll_up(self.folder, self.fingerprint)
            except STORE_ERRORS as error:  # the store may come back; what was not rolled up lies there still
                log.warning("commit records could not be rolled up: %s", " ".join(str(error).split()))
            if last:
                return
            self._stop.wait(ROLL_SECONDS)
