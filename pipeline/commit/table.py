"""Adds a finished job's output files (parts) to an Iceberg or Delta table as one snapshot (see `output.format`).

The files are not copied: the table refers to them. The snapshot holds the job's fingerprint. If a run is killed after
the commit to the table, the next run finds the snapshot and adds nothing. The file `_job/tables.json`, written before
and after this commit, lists the tables that may refer to the parts. --overwrite refuses to remove such parts.
"""

from __future__ import annotations

import hashlib
import io
import logging
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from actors.engine.errors import UserError
from pipeline.commit.records import read_records
from pipeline.commit.sink import part_name
from pipeline.config.job import JobConfig
from pipeline.input.table import CommitConflict, OutputTable, PartFile, output_table, real_url, table_name
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest
from pipeline.runtime.announce import announced
from pipeline.storage.folder import Folder, write_json

log = logging.getLogger(__name__)
RECORD = "_job/tables.json"
# a table accepts the answers of a job only once; a job with another seed is another job
AGAIN = "to add them again, remove their rows from the table, set another sampling.seed, and choose another output.path"
TRIES = 20  # maximum number of attempts to commit; an attempt fails if another writer commits first


@dataclass(frozen=True)
class TableRecord:
    """An entry in `_job/tables.json`: a table that may hold the job's output files (parts)."""

    table: str  # the table's name or folder
    parts: str  # digest of all parts that were added to the table
    snapshot: int | None = None  # the snapshot with the parts; None until the commit to the table has succeeded


def check_table(config: JobConfig, schema: pa.Schema) -> None:
    """Raise UserError if the output table cannot hold files with this schema. Call this during planning."""
    if not config.output.is_table:
        return
    names = [name.lower() for name in schema.names]
    if twice := [name for name in schema.names if names.count(name.lower()) > 1]:
        both = " and ".join(map(repr, twice[:2]))
        raise UserError(f"output.keep: columns {both} differ only in case, which a table does not allow; rename one")
    if config.output.format == "delta":
        folder, table = map(real_url, (config.output.path, table_name(config.output)))
        if not f"{folder}/".startswith(f"{table}/"):
            raise UserError(
                f"output.table: {table_name(config.output)} does not hold output.path {config.output.path}; choose an "
                "output.path inside the Delta table's folder, because the table's data files must be there"
            )
    output_table(config.output, config.storage).check(schema)


def commit_table(folder: Folder, manifest: Manifest, config: JobConfig) -> None:
    """Add a complete job's output files (parts) to its output table, unless the table holds them already.

    Raises UserError if the table cannot hold the parts, or holds earlier versions of the job's parts.
    """
    if not config.output.is_table:
        return
    records, name = read_records(folder, manifest.fingerprint).sort_by("shard"), table_name(config.output)
    digest = hashlib.sha256("".join(records["sha256"].to_pylist()).encode()).hexdigest()
    known = recorded(folder)
    earlier = known.get(_key(config))
    if earlier is not None and earlier.snapshot is not None and earlier.parts == digest:
        return

    def record(snapshot: int | None) -> None:
        tables = {**known, _key(config): TableRecord(name, digest, snapshot)}
        write_json(folder, RECORD, {key: asdict(table) for key, table in tables.items()})

    with announced(f"adding {counted(records.num_rows, 'part')} to the table"):
        table = output_table(config.output, config.storage)
        snapshot = table.snapshot_of(manifest.fingerprint)
        if snapshot is None:
            record(None)
            snapshot = _append(table, folder, manifest, records)
        elif earlier is None:
            log.warning(
                "%s: nothing is added, because snapshot %d added this job's answers from another output.path; %s",
                name,
                snapshot,
                AGAIN,
            )
        elif earlier.parts != digest:
            raise UserError(
                f"{name}: snapshot {snapshot} holds parts of {folder.url} that were lost and answered again with other "
                f"bytes; {AGAIN}"
            )
    record(snapshot)


def has_table(folder: Folder, config: JobConfig) -> bool:
    """Return whether `_job/tables.json` records that the output table holds the parts. True if there is no table."""
    if not config.output.is_table:
        return True
    record = recorded(folder).get(_key(config))
    return record is not None and record.snapshot is not None


def recorded(folder: Folder) -> dict[str, TableRecord]:
    """Return the tables that may hold the folder's parts, by key (`_key`). Raises UserError if `RECORD` is damaged."""
    try:
        return TypeAdapter(dict[str, TableRecord]).validate_json(folder.read(RECORD))
    except FileNotFoundError:
        return {}
    except ValueError:
        raise UserError(
            f"{folder.url}/{RECORD}: damaged; restore it from a copy, or remove it if no table holds these parts"
        ) from None


def check_no_table(folder: Folder) -> None:
    """Raise UserError if a table may hold the folder's parts, because removing them would break the table."""
    for record in recorded(folder).values():
        raise UserError(
            f"{folder.url}: its parts are data files of table {record.table}, which --overwrite would break; choose "
            "another output.path"
        )


def _append(table: OutputTable, folder: Folder, manifest: Manifest, records: pa.Table) -> int:
    """Append the job's parts to `table`, and return the new snapshot. Retry if another writer commits first."""
    columns = (records[name].to_pylist() for name in ("shard", "bytes", "answers"))
    rows, root = zip(*columns, strict=True), real_url(folder.url)
    parts = [PartFile(f"{root}/{part_name(shard)}", size, answers) for shard, size, answers in rows]
    schema = pq.read_schema(io.BytesIO(folder.read(part_name(manifest.shards[0].index))))
    for left in reversed(range(TRIES)):
        try:
            return table.append(parts, schema.remove_metadata(), manifest.fingerprint)
        except CommitConflict:
            if (snapshot := table.snapshot_of(manifest.fingerprint)) is not None:
                return snapshot
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def _key(config: JobConfig) -> str:
    name = table_name(config.output)
    return f"iceberg:{config.storage.catalog.name}:{name}" if config.output.format == "iceberg" else f"delta:{name}"
