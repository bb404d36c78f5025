"""Finds rows of earlier runs that have an error, for `input.retry: errors`, and cuts shards of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby

from pipeline.commit.records import read_records
from pipeline.commit.sink import part_name
from pipeline.config.job import StorageConfig
from pipeline.incremental.ledger import Ledger
from pipeline.input.files import Files
from pipeline.input.shards import Shard
from pipeline.messages import counted
from pipeline.plan import plan_files
from pipeline.storage.folder import Folder, open_folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
Rows = dict[str, set[int]]  # failed rows of each input file, by its URL


def failed_rows(root: Folder, ledger: Ledger, listed: Files, storage: StorageConfig) -> Rows:
    """Return the rows of unchanged files whose last answer in a successful run has an error.

    Args:
        listed: the present input files.
    """
    failed: Rows = {}
    versions: dict[str, tuple[int, str]] = {}
    for run in ledger.runs:
        folder = open_folder(f"{root.url.rstrip('/')}/{run.folder}", storage)
        manifest = plan_files.load(folder) if run.state == "success" else None
        if manifest is None:
            continue
        for file in manifest.files:
            if versions.get(file.url) != (file.size, file.version):
                versions[file.url], failed[file.url] = (file.size, file.version), set()
        records = read_records(folder, manifest.fingerprint).select(["shard", "errors"]).to_pylist()
        with_errors = {record["shard"] for record in records if record["errors"]}
        for shard in manifest.shards:
            failed[shard.url] -= set(range(shard.first_row, shard.first_row + shard.rows))
            if shard.index in with_errors:
                part = read_parquet(folder.read(part_name(shard.index)), ["sample_index", "error"]).to_pylist()
                row = shard.first_row - 1
                for answer in part:
                    row += answer.get("sample_index", 0) == 0
                    if answer["error"] is not None:
                        failed[shard.url].add(row)
    known = {url: rows for url, rows in failed.items() if rows}
    same = {url: rows for url, rows in known.items() if listed.get(url) == versions[url]}
    if gone := sorted(known.keys() - same.keys()):
        rows = sum(len(known[url]) for url in gone)
        log.warning("%s with an error not answered again: %s is gone or has changed", counted(rows, "row"), gone[0])
    return same


def shards_of(failed: Mapping[str, set[int]], shards: Sequence[Shard]) -> list[Shard]:
    """Return shards of the failed rows: one for each sequence of neighbouring rows, with new indices."""
    kept: list[Shard] = []
    for shard in shards:
        rows = sorted(failed[shard.url] & set(range(shard.first_row, shard.first_row + shard.rows)))
        for _, neighbours in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
            places = [row for _, row in neighbours]
            kept.append(Shard(len(kept), shard.url, places[0], len(places)))
    return kept
