"""Print the statistics of a job and the result of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from pipeline.commit.finalize import STATS, SUMMARY
from pipeline.commit.results import recorded
from pipeline.commit.runs import JobRun, read_runs
from pipeline.commit.sink import SUCCESS, part_name
from pipeline.commit.table import recorded as table_records
from pipeline.generate.stats import STATS_SCHEMA, ShardStats, Totals, slowest_shards
from pipeline.messages import counted, parsed_control_tokens
from pipeline.plan import plan_files
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import clock_speedups, held_seconds
from pipeline.report.job_page import REPORT, first_rows
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import read_parquet

SHOWN_SHARDS = 20
SHOWN_LABELS, LABEL_CHARS = 10, 60
UNNAMED = "labels that are not counted by name"


@dataclass(frozen=True)
class JobResult:
    """Result of a run. totals: of the whole job; fresh_rows, seconds: of this run alone."""

    manifest: Manifest
    totals: Totals
    fresh_rows: int
    seconds: float


def print_report(
    console: Console, manifest: Manifest, shards: pa.Table, totals: Totals, runs: Sequence[JobRun] = ()
) -> None:
    """Print the table of shards, the slowest `SHOWN_SHARDS` if there are more, and the totals. runs: of the job."""
    held = held_seconds(runs, shards)
    slowest = slowest_shards(shards, SHOWN_SHARDS)
    shown = [ShardStats(**row) for row in slowest.select(STATS_SCHEMA.names).to_pylist()]
    title = "Shards" if len(shown) == totals.shards else f"The {len(shown)} slowest of {totals.shards} shards"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    columns = _columns(totals)
    for name in columns:
        table.add_column(name, justify="right")
    for shard in sorted(shown, key=lambda shard: shard.shard):
        table.add_row(*(value(shard) for value in columns.values()))
    console.print(table)
    layers = manifest.identity["schedule"]["num_layers"]
    decode, depth = "", "no decode steps: the prompt's pass gives the answer"
    if totals.mean_depth is not None:
        decode = f", decode {totals.decode_seconds:.1f}"
        ratio = "" if totals.layer_ratio is None else f", layer ratio {totals.layer_ratio:.2f}x"
        steps = f"{totals.layer_steps:,} layer steps where full depth runs {totals.full_layer_steps:,}"
        depth = f"mean depth {totals.mean_depth:.2f} of {layers}{ratio}: {steps}"
    answers = "" if totals.answers == totals.rows else f" ({totals.answers:,} answers)"
    console.print(
        f"\n{counted(totals.rows, 'row')}{answers} in {counted(totals.shards, 'shard')}, "
        f"{totals.errors:,} with an error; "
        f"{totals.prompt_tokens:,} prompt and {totals.generated_tokens:,} generated tokens\n"
        f"{depth}\n"
        f"actor seconds: prefill {totals.prefill_seconds:.1f}{decode}, "
        f"all {totals.generate_seconds:.1f}; prepare {totals.prepare_seconds:.1f}, commit {totals.commit_seconds:.1f}; "
        f"padding {100 * totals.padding_fraction:.1f}%\n"
        f"{_cost(totals, held, 'generated token' if totals.decode_steps else 'answer')}"
        f"cache {totals.cache_bytes / 2**20:.1f} MiB a batch at most, peak memory of an actor "
        f"{totals.peak_memory_bytes / 2**20:,.0f} MiB",
        highlight=False,
    )
    if totals.labels:
        console.print(_labels("labels", totals.labels, UNNAMED, totals.unnamed_labels), markup=False, highlight=False)
    whole, decode_alone = clock_speedups(manifest.agreement, totals, held)
    if whole is not None and totals.layer_steps < totals.full_layer_steps:
        alone = "" if decode_alone is None else f", decode alone {decode_alone:.2f}x"
        console.print(
            f"speed-up on the clock: {whole:.2f}x{alone}, over full depth as timed on the sampled rows", highlight=False
        )
    if manifest.agreement is not None:
        console.print(f"agreement with full depth, before the start: {manifest.agreement}", highlight=False)
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
    if totals.control_tokens:
        console.print(parsed_control_tokens(totals.control_tokens), highlight=False)
    for line in totals.warnings:
        console.print(f"warning: {line}", markup=False, highlight=False)
    if totals.duplicate_ids:
        lines = "".join(f"\n  {example}" for example in totals.duplicate_examples)
        console.print(
            f"warning: {totals.duplicate_ids:,} rows have the id of an earlier row{lines}",
            markup=False,
            highlight=False,
        )


def _columns(totals: Totals) -> dict[str, Callable[[ShardStats], str]]:
    """Titles of the shards' columns, and their cells; without those of decode steps where there are none."""
    steps = totals.decode_steps > 0
    columns: list[tuple[str, bool, Callable[[ShardStats], str]]] = [
        ("shard", True, lambda shard: str(shard.shard)),
        ("rows", True, lambda shard: f"{shard.rows:,}"),
        ("errors", True, lambda shard: f"{shard.errors:,}"),
        ("prompt tok", True, lambda shard: f"{shard.prompt_tokens:,}"),
        ("new tok", steps, lambda shard: f"{shard.generated_tokens:,}"),
        ("prefill s", True, lambda shard: f"{shard.prefill_seconds:.2f}"),
        ("decode s", steps, lambda shard: f"{shard.decode_seconds:.2f}"),
        ("tok/s", steps, lambda shard: f"{shard.tokens_per_second:,.0f}" if shard.tokens_per_second else "-"),
        (
            "rows/s",
            not steps,
            lambda shard: f"{shard.rows / shard.generate_seconds:,.1f}" if shard.tokens_per_second else "-",
        ),
        ("pad %", True, lambda shard: f"{100 * shard.padding_fraction:.1f}"),
        ("depth", steps, lambda shard: f"{shard.mean_depth:.2f}"),
    ]
    return {title: cell for title, is_shown, cell in columns if is_shown}


def _labels(title: str, found: Mapping[str, int], others: str, other_answers: int) -> str:
    """How many answers each of the most frequent labels is, and how many are none of them."""
    counts = [(_short(label), count) for label, count in found.items()]
    rest = sum(count for _, count in counts[SHOWN_LABELS:])
    shown = counts[:SHOWN_LABELS]
    if rest:
        shown.append((f"{len(counts) - SHOWN_LABELS} other labels", rest))
    if other_answers:
        shown.append((others, other_answers))
    answers = sum(count for _, count in shown)
    listed = ", ".join(f"{label} {count:,} ({count / answers:.1%})" for label, count in shown)
    return f"{title}: {listed or 'no answer has one'}"


def _short(text: str) -> str:
    """On one line."""
    return " ".join(text.split())[:LABEL_CHARS]


def _cost(totals: Totals, held: float | None, unit: str) -> str:
    """Return lines of device-seconds and money, in all and for a million of a unit such as a token, if there are any.

    held: device-seconds with start-up and idle.
    """
    if not totals.generated_tokens:
        return ""
    price, lines = totals.money / totals.device_seconds if totals.device_seconds else 0.0, ""
    for name, seconds in (("at work", totals.device_seconds), ("with start-up and idle", held)):
        if seconds is not None:
            amounts = [(seconds, ",.1f"), (1e6 * seconds / totals.generated_tokens, ",.0f")]
            whole, each = (
                f"{amount:{form}} device-seconds" + (f" and money {price * amount:,.4g}" if price else "")
                for amount, form in amounts
            )
            lines += f"cost {name}: {whole}; {each} for a million {unit}s\n"
    return lines


def print_result(console: Console, folder: Folder, result: JobResult, show: int) -> None:
    """Print `show` rows with their answers, the statistics of a run, and the paths of its output."""
    for row, full_depth in _shown_rows(folder, result.manifest, show) if show else []:
        console.print(f"\n[{row['id']}]", markup=False, highlight=False)
        for name in ("prompt", "generated_text", "error"):
            if row.get(name) is not None:
                shown = name.replace("generated_text", "answer")
                console.print(f"  {shown}: {row[name]}", markup=False, highlight=False)
        if full_depth is not None:
            console.print(f"  full depth's answer: {full_depth}", markup=False, highlight=False)
    if show:
        console.print()
    if result.fresh_rows:
        statistics = read_parquet(folder.read(STATS))
        print_report(console, result.manifest, statistics, result.totals, read_runs(folder))
        rate = result.fresh_rows / result.seconds
        rows = counted(result.fresh_rows, "row")
        console.print(f"{rows} in {result.seconds:.1f} s with start-up, {rate:,.1f} rows/s", highlight=False)
    else:
        console.print(f"nothing left to do: all {result.totals.rows:,} rows are answered already", highlight=False)
    written = sorted(recorded(folder))
    if written:
        console.print(f"JSON Lines: {', '.join(f'{folder.url}/{name}' for name in written)}", highlight=False)
    for table in table_records(folder).values():
        console.print(f"table: {table.table}, snapshot {table.snapshot}", markup=False, highlight=False)
    report = f", report: {folder.url}/{REPORT}" if folder.exists(REPORT) else ""
    console.print(
        f"answers: {folder.url}/part-*.parquet\n"
        f"statistics: {folder.url}/{STATS}, summary: {folder.url}/{SUMMARY}{report}",
        highlight=False,
    )


def last_errors(folder: Folder) -> list[tuple[int, int]]:
    """Errors and rows of the finished job in a folder, from `_SUCCESS`; empty if it is gone, or answered rows again."""
    try:
        manifest = plan_files.load(folder)
        if manifest is not None and manifest.batching.retries:
            return []
        values = json.loads(folder.read(SUCCESS))
    except FileNotFoundError:
        return []
    return [(values["errors"], values["rows"])]


def _shown_rows(folder: Folder, manifest: Manifest, count: int) -> list[tuple[dict[str, Any], str | None]]:
    """Rows with full depth's answers: those on which agreement was measured, where there are any, else the first."""
    urls = {file.digest or file.version: file.url for file in manifest.files}
    shown: list[tuple[dict[str, Any], str | None]] = []
    for example in () if manifest.agreement is None else manifest.agreement.examples:
        if len(shown) == count:
            break
        for shard in manifest.shards:
            place = example.row - shard.first_row
            if shard.url == urls.get(example.content) and 0 <= place < shard.rows:
                part = read_parquet(folder.read(part_name(shard.index)))
                if part.num_rows == shard.rows:  # one answer a row
                    shown.append((part.slice(place, 1).to_pylist()[0], example.text))
    return shown or [(row, None) for row in first_rows(folder, count)]
