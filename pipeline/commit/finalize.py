"""Ends the commit protocol: checks that every planned row is committed once, then writes statistics and `_SUCCESS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipeline.answer.stats import STATS_SCHEMA, Totals, add_up, with_rates
from pipeline.commit.records import drop_records, read_all, record_name
from pipeline.commit.sink import REPAIR, SUCCESS, Check, damaged_parts, load_records, part_files, part_name
from pipeline.input.shards import Shard
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import FileInfo, Folder, write_json
from pipeline.storage.parquet import parquet_bytes

STATS, SUMMARY = "_job/stats.pq", "_job/summary.json"


class RowsMissing(Exception):
    """The committed rows differ from the planned rows. The message names the first file that is missing or wrong."""


def finalize(folder: Folder, manifest: Manifest) -> Totals:
    """Check that every planned row is committed once, write statistics and summary, and return the totals.

    If the check fails, remove `_SUCCESS` and the records of missing output files, so that the next run answers their
    shards. Then raise RowsMissing, whose message says what to do next.
    """
    records, parts = load_records(folder, manifest.shards, manifest.fingerprint)
    try:
        check_rows(records, parts, manifest.shards)
    except RowsMissing:
        folder.remove(SUCCESS)
        gone = [shard for shard in records["shard"].to_pylist() if shard not in parts]
        drop_records(folder, gone, manifest.fingerprint)
        raise
    return write_statistics(folder, manifest, records)


def write_success(folder: Folder, manifest: Manifest, totals: Totals) -> None:
    """Write the file `_SUCCESS`. totals: the return value of `finalize`."""
    write_json(folder, SUCCESS, summary(folder, manifest, totals), indent=2)


def finished_totals(folder: Folder, manifest: Manifest, check: Check = "quick") -> Totals | None:
    """Return a finished job's totals. Return None if `_SUCCESS`, a record or an output file is missing or damaged."""
    if not folder.exists(SUCCESS):
        return None
    records, damaged = read_all(folder, manifest.fingerprint)
    parts = part_files(folder, (shard.index for shard in manifest.shards))
    try:
        check_rows(records, parts, manifest.shards)
    except RowsMissing:
        return None
    if damaged or damaged_parts(folder, records, parts, check):
        return None
    return totals_of(records)


def check_rows(records: pa.Table, parts: Mapping[int, FileInfo], shards: Sequence[Shard]) -> None:
    """Raise RowsMissing if `records` or `parts` (shard -> output file) do not match the planned `shards`."""
    planned = {shard.index: shard.rows for shard in shards}
    recorded = {row["shard"]: row for row in records.select(["shard", "rows", "bytes"]).to_pylist()}
    for name, known in ((part_name, parts.keys()), (record_name, recorded.keys())):
        if surplus := known - planned.keys():
            raise RowsMissing(f"{name(min(surplus))} belongs to no shard of this job: delete it")
    wrong = [
        shard
        for shard, row in recorded.items()
        if shard not in parts or parts[shard].size != row["bytes"] or row["rows"] != planned[shard]
    ]
    if wrong:
        first, others = part_name(wrong[0]), f" (and {len(wrong) - 1:,} others)" if len(wrong) > 1 else ""
        if wrong[0] not in parts:
            raise RowsMissing(f"{first}{others} was committed and is gone: run the same command again to write it")
        raise RowsMissing(f"{first}{others} differs from what was committed: {REPAIR}")
    if missing := planned.keys() - recorded.keys():
        raise RowsMissing(f"{part_name(min(missing))} is missing: run the same command again to write it")


def write_statistics(folder: Folder, manifest: Manifest, records: pa.Table) -> Totals:
    """Write the files `STATS` and `SUMMARY` from `records`, and return the totals. The job may be unfinished."""
    totals = totals_of(records)
    folder.replace(STATS, parquet_bytes(with_rates(records.select(STATS_SCHEMA.names).cast(STATS_SCHEMA))))
    write_json(folder, SUMMARY, summary(folder, manifest, totals), indent=2)
    return totals


def summary(folder: Folder, manifest: Manifest, totals: Totals) -> dict[str, Any]:
    """Return the content of summary.json and `_SUCCESS`: `totals`, and values that identify the job and its plan."""
    return {
        "output": folder.url,
        "fingerprint": manifest.fingerprint,
        "planned_shards": len(manifest.shards),
        "planned_rows": manifest.rows,
        "nominal_speedup": manifest.identity["schedule"]["speedup"],
        "num_layers": manifest.identity["schedule"]["num_layers"],
        **totals.to_dict(),
    }


def totals_of(records: pa.Table) -> Totals:
    """Return the sums over all shards in `records`."""
    return add_up(records.select(STATS_SCHEMA.names).cast(STATS_SCHEMA))
