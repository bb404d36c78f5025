"""Prints the statistics of a job and the result of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from pipeline.answer.stats import STATS_SCHEMA, Totals, slowest_shards, with_rates
from pipeline.commit.finalize import STATS, SUMMARY
from pipeline.commit.records import read_records
from pipeline.commit.results import recorded
from pipeline.commit.runs import JobRun, read_runs
from pipeline.commit.sink import SUCCESS
from pipeline.config.job import StorageConfig
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import error_kinds, first_answers, label_counts, total_lines
from pipeline.report.job_page import REPORT
from pipeline.storage.folder import Folder, read_json
from pipeline.storage.parquet import read_parquet

SHOWN_SHARDS, SHOWN_KINDS = 20, 5
SHOWN_LABELS, LABEL_CHARS = 10, 60
COLUMNS = {  # title -> statistic of a shard, and its format
    "shard": ("shard", ""),
    "rows": ("rows", ","),
    "errors": ("errors", ","),
    "prompt tok": ("prompt_tokens", ","),
    "new tok": ("generated_tokens", ","),
    "prefill s": ("prefill_seconds", ".2f"),
    "decode s": ("decode_seconds", ".2f"),
    "tok/s": ("tokens_per_second", ",.0f"),
    "rows/s": ("rows_per_second", ",.1f"),
    "padding": ("padding_fraction", ".1%"),
    "depth": ("mean_depth", ".2f"),
}


@dataclass(frozen=True)
class JobResult:
    """Result of a run. totals: statistics of the whole job. fresh_rows, seconds: rows and time of this run only."""

    manifest: Manifest
    totals: Totals
    fresh_rows: int
    seconds: float


def print_report(
    console: Console, manifest: Manifest, shards: pa.Table, totals: Totals, runs: Sequence[JobRun] = ()
) -> None:
    """Print a table of the slowest shards (at most `SHOWN_SHARDS`), then the totals. runs: the job's runs."""
    shown = with_rates(slowest_shards(shards.select(STATS_SCHEMA.names), SHOWN_SHARDS)).sort_by("shard").to_pylist()
    title = "Shards" if len(shown) == totals.shards else f"The {len(shown)} slowest of {totals.shards} shards"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    hidden = ("rows/s",) if totals.decode_steps else ("new tok", "decode s", "tok/s", "depth")
    columns = {title: column for title, column in COLUMNS.items() if title not in hidden}
    for title in columns:
        table.add_column(title, justify="right")
    for shard in shown:
        table.add_row(*("-" if shard[name] is None else format(shard[name], form) for name, form in columns.values()))
    console.print(table)
    console.print()
    lines = list(total_lines(manifest, totals, runs, shards))
    if labels := label_counts(totals, manifest, SHOWN_LABELS):
        answers = sum(count for _, count in labels)
        shares = (f"{label[:LABEL_CHARS]} {count:,} ({count / answers:.1%})" for label, count in labels)
        lines.append(f"labels: {', '.join(shares)}")
    kinds = [kind for kind in error_kinds(shards) if kind["kind"]][:SHOWN_KINDS]
    for one in kinds:
        row = f" (row {one['row_id']})" if one["row_id"] else ""
        lines.append(f"error: {one['answers']:,} x {one['example']}{row}")
    lines += [f"warning: {line}" for line in totals.warnings]
    console.print("\n".join(lines))


def print_result(console: Console, folder: Folder, result: JobResult, show: int, storage: StorageConfig) -> None:
    """Print `show` rows with their answers, the statistics of a run, and the paths of its output."""
    if show:
        for prompt, row in first_answers(folder, read_records(folder, result.manifest.fingerprint), show):
            console.print(f"\n[{'no id' if row['id'] is None else row['id']}]")
            for title, text in (("prompt", prompt), ("answer", row["generated_text"]), ("error", row["error"])):
                if text is not None:
                    console.print(f"  {title}: {text}")
        console.print()
    if result.fresh_rows:
        shards = read_parquet(folder.read(STATS))
        print_report(console, result.manifest, shards, result.totals, read_runs(folder))
        of_all = result.fresh_rows < result.totals.rows
        lines = [f"this run answered {counted(result.fresh_rows, 'row')} of them"] if of_all else []
    else:
        rows = f"{counted(result.totals.rows, 'row')}, {result.totals.errors:,} with an error"
        lines = [f"nothing left to do: the output has {rows}"]
    if written := sorted(recorded(folder)):
        lines.append(f"JSON Lines: {', '.join(f'{folder.url}/{name}' for name in written)}")
    report = f", report: {folder.url}/{REPORT}" if folder.exists(REPORT) else ""
    answers = f"{folder.url}/part-*.parquet"
    lines.append(f"answers: {answers}")
    if "://" not in folder.url or storage.endpoint_url is None:  # else the readers need the endpoint and its keys too
        if not written:  # pandas reads whole folders, but only of Parquet
            lines.append(f"in pandas: pd.read_parquet({folder.url!r})")
        lines.append(f"in polars: pl.read_parquet({answers!r})")  # which refuses the folder, because of _SUCCESS
        lines.append("in DuckDB: FROM '{}'".format(answers.replace("'", "''")))
    lines.append(f"statistics: {folder.url}/{STATS}, summary: {folder.url}/{SUMMARY}{report}")
    console.print("\n".join(lines))


def last_errors(folder: Folder) -> list[tuple[int, int]]:
    """Return a finished job's numbers of errors and of rows, as a list with one pair.

    The list is empty if `_SUCCESS` is missing or damaged.
    """
    totals = read_json(folder, SUCCESS, Totals)
    return [] if totals is None else [(totals.errors, totals.rows)]
