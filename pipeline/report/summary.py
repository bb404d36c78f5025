"""Print the statistics of a job and the result of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from pipeline.storage.folder import Folder, read_json
from pipeline.storage.parquet import read_parquet

SHOWN_SHARDS = 20
SHOWN_LABELS, LABEL_CHARS = 10, 60


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
    shown = [ShardStats(**row) for row in slowest_shards(shards, SHOWN_SHARDS).select(STATS_SCHEMA.names).to_pylist()]
    title = "Shards" if len(shown) == totals.shards else f"The {len(shown)} slowest of {totals.shards} shards"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    columns = _columns(totals)
    for name in columns:
        table.add_column(name, justify="right")
    for shard in sorted(shown, key=lambda shard: shard.shard):
        table.add_row(*(value(shard) for value in columns.values()))
    console.print(table)
    console.print()
    for line in _lines(manifest, totals, held_seconds(runs, shards)):
        console.print(line, markup=False, highlight=False)


def _lines(manifest: Manifest, totals: Totals, held: float | None) -> Iterator[str]:
    """Yield the lines of a job's totals. held: device-seconds with start-up and idle."""
    answers = "" if totals.answers == totals.rows else f" ({totals.answers:,} answers)"
    yield (
        f"{counted(totals.rows, 'row')}{answers} in {counted(totals.shards, 'shard')}, {totals.errors:,} with an "
        f"error; {totals.prompt_tokens:,} prompt and {totals.generated_tokens:,} generated tokens"
    )
    decode = ""
    if totals.mean_depth is None:
        yield "no decode steps: the prompt's pass gives the answer"
    else:
        decode = f", decode {totals.decode_seconds:.1f}"
        ratio = "" if totals.layer_ratio is None else f", layer ratio {totals.layer_ratio:.2f}x"
        yield (
            f"mean depth {totals.mean_depth:.2f} of {manifest.identity['schedule']['num_layers']}{ratio}: "
            f"{totals.layer_steps:,} layer steps where full depth runs {totals.full_layer_steps:,}"
        )
    yield (
        f"actor seconds: prefill {totals.prefill_seconds:.1f}{decode}, all {totals.generate_seconds:.1f}; "
        f"prepare {totals.prepare_seconds:.1f}, commit {totals.commit_seconds:.1f}; "
        f"padding {100 * totals.padding_fraction:.1f}%"
    )
    yield from _cost(totals, held)
    yield (
        f"cache {totals.cache_bytes / 2**20:.1f} MiB a batch at most, peak memory of an actor "
        f"{totals.peak_memory_bytes / 2**20:,.0f} MiB"
    )
    if totals.labels:
        yield _labels(totals)
    whole, decode_alone = clock_speedups(manifest.agreement, totals, held)
    if whole is not None and totals.layer_steps < totals.full_layer_steps:
        alone = "" if decode_alone is None else f", decode alone {decode_alone:.2f}x"
        yield f"speed-up on the clock: {whole:.2f}x{alone}, over full depth as timed on the sampled rows"
    if manifest.agreement is not None:
        yield f"agreement with full depth, before the start: {manifest.agreement}"
    if totals.shared_prompt_tokens:
        shared = f"{totals.shared_prompt_tokens:,} prompt tokens"
        yield f"{shared} were not computed again: beginnings, prompts and samples that rows share"
    if totals.out_of_memory:
        yield (
            f"memory ran out in {totals.out_of_memory:,} batches, which were halved: a lower actors.cache_bytes or "
            "max_new_tokens saves the time"
        )
    if totals.control_tokens:
        yield parsed_control_tokens(totals.control_tokens)
    yield from (f"warning: {line}" for line in totals.warnings)
    if totals.duplicate_ids:
        yield f"warning: {totals.duplicate_ids:,} rows have the id of an earlier row"
        yield from (f"  {example}" for example in totals.duplicate_examples)


def _columns(totals: Totals) -> dict[str, Callable[[ShardStats], str]]:
    """Titles of the shards' columns, and their cells; without those of decode steps where there are none."""
    columns: dict[str, Callable[[ShardStats], str]] = {
        "shard": lambda shard: str(shard.shard),
        "rows": lambda shard: f"{shard.rows:,}",
        "errors": lambda shard: f"{shard.errors:,}",
        "prompt tok": lambda shard: f"{shard.prompt_tokens:,}",
        "new tok": lambda shard: f"{shard.generated_tokens:,}",
        "prefill s": lambda shard: f"{shard.prefill_seconds:.2f}",
        "decode s": lambda shard: f"{shard.decode_seconds:.2f}",
        "tok/s": lambda shard: f"{shard.tokens_per_second:,.0f}" if shard.tokens_per_second else "-",
        "rows/s": lambda shard: f"{shard.rows / shard.generate_seconds:,.1f}" if shard.tokens_per_second else "-",
        "pad %": lambda shard: f"{100 * shard.padding_fraction:.1f}",
        "depth": lambda shard: f"{shard.mean_depth:.2f}",
    }
    hidden = {"rows/s"} if totals.decode_steps else {"new tok", "decode s", "tok/s", "depth"}
    return {title: cell for title, cell in columns.items() if title not in hidden}


def _labels(totals: Totals) -> str:
    """How many answers each of the most frequent labels is, and how many are none of them."""
    counts = [(" ".join(label.split())[:LABEL_CHARS], count) for label, count in totals.labels.items()]
    shown, rest = counts[:SHOWN_LABELS], sum(count for _, count in counts[SHOWN_LABELS:])
    shown.append((f"{len(counts) - SHOWN_LABELS} other labels", rest))
    shown.append(("labels that are not counted by name", totals.unnamed_labels))
    answers = sum(count for _, count in shown)
    return "labels: " + ", ".join(f"{label} {count:,} ({count / answers:.1%})" for label, count in shown if count)


def _cost(totals: Totals, held: float | None) -> Iterator[str]:
    """Yield device-seconds and money, in all and for a million tokens or answers. held: with start-up and idle."""
    if not totals.generated_tokens:
        return
    price = totals.money / totals.device_seconds if totals.device_seconds else 0.0
    unit = "generated token" if totals.decode_steps else "answer"
    for name, seconds in (("at work", totals.device_seconds), ("with start-up and idle", held)):
        if seconds is not None:
            each = 1e6 * seconds / totals.generated_tokens
            whole, million = (f" and money {price * amount:,.4g}" if price else "" for amount in (seconds, each))
            amounts = f"{seconds:,.1f} device-seconds{whole}; {each:,.0f} device-seconds{million}"
            yield f"cost {name}: {amounts} for a million {unit}s"


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
        print_report(console, result.manifest, read_parquet(folder.read(STATS)), result.totals, read_runs(folder))
        rows, rate = counted(result.fresh_rows, "row"), result.fresh_rows / result.seconds
        lines = [f"{rows} in {result.seconds:.1f} s with start-up, {rate:,.1f} rows/s"]
    else:
        lines = [f"nothing left to do: all {result.totals.rows:,} rows are answered already"]
    if written := sorted(recorded(folder)):
        lines.append(f"JSON Lines: {', '.join(f'{folder.url}/{name}' for name in written)}")
    lines += [f"table: {table.table}, snapshot {table.snapshot}" for table in table_records(folder).values()]
    report = f", report: {folder.url}/{REPORT}" if folder.exists(REPORT) else ""
    lines.append(f"answers: {folder.url}/part-*.parquet")
    lines.append(f"statistics: {folder.url}/{STATS}, summary: {folder.url}/{SUMMARY}{report}")
    for line in lines:
        console.print(line, markup=False, highlight=False)


def last_errors(folder: Folder) -> list[tuple[int, int]]:
    """Errors and rows of the finished job in a folder, from `_SUCCESS`; empty if it is gone, or answered rows again."""
    manifest, values = plan_files.load(folder), read_json(folder, SUCCESS)
    retries = manifest is not None and manifest.batching.retries
    return [] if retries or values is None else [(values["errors"], values["rows"])]


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
