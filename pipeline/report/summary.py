"""What a job did, from its commit records: `_job/stats.parquet`, `_job/summary.json`, `_SUCCESS` and a table."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from pipeline.commit.records import forget, record_name
from pipeline.commit.sink import part_name, settled
from pipeline.generate.stats import STATS_SCHEMA, ShardStats, Totals, add_up
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import Folder

STATS, SUMMARY, SUCCESS = "_job/stats.parquet", "_job/summary.json", "_SUCCESS"
SHOWN_SHARDS = 20


class RowsMissing(Exception):
    """The committed rows are not the planned ones; the message says which shard."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. fresh_rows, seconds: of this run alone."""

    manifest: Manifest
    totals: Totals
    fresh_rows: int
    seconds: float


def seal(folder: Folder) -> None:
    """Write `_SUCCESS`, after `complete`."""
    folder.replace(SUCCESS, folder.read(SUMMARY))


def complete(folder: Folder, manifest: Manifest) -> Totals:
    """Check that every planned row is committed once, then write statistics and summary.

    RowsMissing says what is wrong. What is believed no more is forgotten, so that the next run looks at it anew.
    """
    records, sizes = settled(folder, manifest.shards, manifest.fingerprint)
    planned = {shard.index: shard.rows for shard in manifest.shards}
    recorded = dict(zip(records["shard"].to_pylist(), records["rows"].to_pylist(), strict=True))
    for shard in sorted(sizes.keys() - planned.keys()):
        raise RowsMissing(f"{part_name(shard)} belongs to no shard of this job: delete it")
    for shard in sorted(recorded.keys() - planned.keys()):
        raise RowsMissing(f"{record_name(shard)} belongs to no shard of this job: delete it")
    wrong = [
        shard
        for shard, size in zip(records["shard"].to_pylist(), records["bytes"].to_pylist(), strict=True)
        if sizes.get(shard) != size or recorded[shard] != planned[shard]
    ]
    if wrong:
        folder.remove(SUCCESS)
        forget(folder, wrong, manifest.fingerprint)
        first, others = part_name(wrong[0]), f" (and {len(wrong) - 1:,} others)" if len(wrong) > 1 else ""
        if wrong[0] not in sizes:
            raise RowsMissing(f"{first}{others} was committed and is gone: run the same command again to answer it")
        raise RowsMissing(f"{first}{others} is not what was committed: delete it, then run the same command again")
    for shard in sorted(planned.keys() - recorded.keys()):
        raise RowsMissing(f"{part_name(shard)} is missing: run the same command again to answer it")
    return write_report(folder, manifest, records)


def write_report(folder: Folder, manifest: Manifest, records: pa.Table) -> Totals:
    """Statistics of all commit records, whether the job is finished or not."""
    shards = records.select(STATS_SCHEMA.names).cast(STATS_SCHEMA)
    totals = add_up(shards)
    sink = pa.BufferOutputStream()
    pq.write_table(shards, sink)
    folder.replace(STATS, sink.getvalue().to_pybytes())
    folder.replace(SUMMARY, (json.dumps(summary(folder, manifest, totals), indent=2) + "\n").encode())
    return totals


def summary(folder: Folder, manifest: Manifest, totals: Totals) -> dict[str, Any]:
    """Totals with what they are totals of."""
    return {
        "output": folder.url,
        "fingerprint": manifest.fingerprint,
        "planned_shards": len(manifest.shards),
        "planned_rows": manifest.rows,
        "nominal_speedup": manifest.identity["schedule"]["speedup"],
        "num_layers": manifest.identity["schedule"]["num_layers"],
        **totals.to_dict(),
    }


def print_report(console: Console, manifest: Manifest, shards: pa.Table, totals: Totals) -> None:
    """The table of shards, the slowest ones if they are many, and the totals."""
    slowest = shards.sort_by([("generate_seconds", "descending"), ("shard", "ascending")]).slice(0, SHOWN_SHARDS)
    shown = [ShardStats(**row) for row in slowest.select(STATS_SCHEMA.names).to_pylist()]
    title = "Shards" if len(shown) == totals.shards else f"The {len(shown)} slowest of {totals.shards} shards"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in (
        "shard",
        "rows",
        "errors",
        "prompt tok",
        "new tok",
        "prefill s",
        "decode s",
        "tok/s",
        "pad %",
        "depth",
    ):
        table.add_column(name, justify="right")
    for one in sorted(shown, key=lambda one: one.shard):
        table.add_row(
            str(one.shard),
            f"{one.rows:,}",
            f"{one.errors:,}",
            f"{one.prompt_tokens:,}",
            f"{one.generated_tokens:,}",
            f"{one.prefill_seconds:.2f}",
            f"{one.decode_seconds:.2f}",
            f"{one.tokens_per_second:,.0f}",
            f"{100 * one.padding_fraction:.1f}",
            f"{one.mean_depth:.2f}",
        )
    console.print(table)
    layers = manifest.identity["schedule"]["num_layers"]
    depth = "no decode steps" if totals.mean_depth is None else f"mean depth {totals.mean_depth:.2f} of {layers}"
    ratio = "" if totals.layer_ratio is None else f", layer ratio {totals.layer_ratio:.2f}x"
    answers = "" if totals.answers == totals.rows else f" ({totals.answers:,} answers)"
    console.print(
        f"\n{totals.rows:,} rows{answers} in {totals.shards} shards, {totals.errors:,} with an error; "
        f"{totals.prompt_tokens:,} prompt and {totals.generated_tokens:,} generated tokens\n"
        f"{depth}{ratio}: {totals.layer_steps:,} layer steps where full depth runs {totals.full_layer_steps:,}\n"
        f"actor seconds: prefill {totals.prefill_seconds:.1f}, decode {totals.decode_seconds:.1f}, "
        f"all {totals.generate_seconds:.1f}; prepare {totals.prepare_seconds:.1f}, commit {totals.commit_seconds:.1f}; "
        f"padding {100 * totals.padding_fraction:.1f}%\n"
        f"cache {totals.cache_bytes / 2**20:.1f} MiB a batch at most, peak memory of an actor "
        f"{totals.peak_memory_bytes / 2**20:,.0f} MiB",
        highlight=False,
    )
    if totals.shared_prompt_tokens:
        shared = f"{totals.shared_prompt_tokens:,} prompt tokens"
        console.print(
            f"{shared} were not computed again: beginnings, prompts and samples that rows share", highlight=False
        )
    if totals.out_of_memory:
        console.print(
            f"memory ran out in {totals.out_of_memory:,} batches, which were halved: a lower actors.cache_bytes or "
            "max_new_tokens saves the time",
            highlight=False,
        )
    if totals.duplicate_ids:
        console.print(f"warning: {totals.duplicate_ids:,} rows share their id with another row of their shard")


def print_outcome(console: Console, folder: Folder, outcome: Outcome, show: int) -> None:
    """What a run has done, and where it lies; before it, `show` rows with their answers."""
    for row in first_rows(folder, show) if show else []:
        console.print(f"\n[{row['id']}]", markup=False, highlight=False)
        for name in ("prompt", "generated_text", "error"):
            if row.get(name) is not None:
                shown = name.replace("generated_text", "answer")
                console.print(f"  {shown}: {row[name]}", markup=False, highlight=False)
    if show:
        console.print()
    if outcome.fresh_rows:
        shards = pq.read_table(io.BytesIO(folder.read(STATS)))
        print_report(console, outcome.manifest, shards, outcome.totals)
        rate = outcome.fresh_rows / outcome.seconds
        console.print(
            f"{outcome.fresh_rows:,} rows in {outcome.seconds:.1f} s with start-up, {rate:,.1f} rows/s", highlight=False
        )
    else:
        console.print(f"nothing left to do: all {outcome.totals.rows:,} rows are answered already", highlight=False)
    console.print(
        f"answers: {folder.url}/part-*.parquet\nstatistics: {folder.url}/{STATS}, summary: {folder.url}/{SUMMARY}",
        highlight=False,
    )


def last_errors(folder: Folder) -> list[tuple[int, int]]:
    """Errors and rows of the finished job in a folder, from its summary; none if it holds none any more."""
    try:
        values = json.loads(folder.read(SUMMARY))
    except FileNotFoundError:
        return []
    return [(values["errors"], values["rows"])]


def first_rows(folder: Folder, count: int) -> list[dict[str, Any]]:
    """The first rows of the first part."""
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(folder.read(part_name(0)))).slice(0, count).to_pylist()
    return rows
