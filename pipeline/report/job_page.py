"""`_job/report.html`: what a job did, in one file without network. Written before `_SUCCESS`; never fails a job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError
from pipeline.commit.duplicates import with_duplicates
from pipeline.commit.finalize import STATS
from pipeline.commit.runs import JobRun, read_runs, versions
from pipeline.commit.sink import part_name
from pipeline.config.job import StorageConfig
from pipeline.generate.stats import STATS_SCHEMA, Totals, add_up, slowest_shards
from pipeline.input.rows import read_shards
from pipeline.messages import counted
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import clock_speedups, error_kinds, held_seconds, run_spans
from pipeline.report.page import count, flat, render, seconds, write_page
from pipeline.storage.folder import STORE_ERRORS, Folder
from pipeline.storage.parquet import read_parquet

REPORT = "_job/report.html"
SHOWN_SHARDS, SHOWN_RUNS, SHOWN_LABELS, SHOWN_ANSWERS = 10, 20, 100, 10
LABEL_CHARS, ANSWER_CHARS = 200, 1000
Cards = list[tuple[str, str]]  # title and figure


def write_report(folder: Folder, manifest: Manifest, storage: StorageConfig) -> None:
    """Write the report of a job whose statistics are written. An error is a warning, with its traceback in a log."""
    write_page(folder, REPORT, lambda: job_page(folder, manifest, read_parquet(folder.read(STATS)), storage))


def job_page(folder: Folder, manifest: Manifest, shards: pa.Table, storage: StorageConfig) -> bytes:
    """Return the page of a job, finished or not.

    Args:
        folder: its output, of which `_job/runs.json`, `_job/duplicates.json` and one part are read.
        shards: statistics as in `STATS_SCHEMA`, of committed shards.
        storage: of the input, of which the first rows are read.
    """
    shards = shards.select(STATS_SCHEMA.names).combine_chunks()
    totals, runs = with_duplicates(folder, add_up(shards)), read_runs(folder)
    spans, held = run_spans(runs, shards), held_seconds(runs, shards)
    values = {
        "title": f"SkipDecode: {folder.url}",
        "url": folder.url,
        "made": time.time(),
        "manifest": manifest,
        "totals": totals,
        "spans": spans,
        "answers": _answers(folder, manifest, shards, storage),
        "labels": _labels(totals, manifest.identity.get("choices") or ()),
        "reasons": [
            ("stop", totals.stopped),
            ("length", totals.cut_off),
            ("error", totals.answers - totals.stopped - totals.cut_off),
        ],
        "kinds": error_kinds(shards),
        "cost": _cost(totals, runs, held, sum(end - begin for begin, end in spans)),
        "speedups": _speedups(manifest, totals, held),
        "slowest": _slowest(shards, manifest),
        "runs": [(number, begin, end - begin) for number, (begin, end) in enumerate(spans, 1)][-SHOWN_RUNS:],
        "configuration": flat(runs[-1].config) if runs else [],
        "identity": flat({key: value for key, value in manifest.identity.items() if key != "answers_version"}),
        "batching": [(name, str(value)) for name, value in vars(manifest.batching).items() if name != "prefix"],
        "versions": list((runs[-1].versions if runs else versions()).items()),
    }
    return render("job_page.html", values)


def _cost(totals: Totals, runs: Sequence[JobRun], held: float | None, wall: float) -> Cards:
    """Return rows, tokens, time and money. held: device-seconds of all runs. wall: seconds of all runs."""
    cards = [("rows", count(totals.rows)), ("rows with an error", count(totals.errors))]
    if totals.answers != totals.rows:
        cards.insert(1, ("output rows", count(totals.answers)))
    if totals.duplicate_ids:
        cards.append(("rows that repeat an id", count(totals.duplicate_ids)))
    cards.append(("prompt tokens", count(totals.prompt_tokens)))
    if totals.decode_steps:
        cards.append(("generated tokens", count(totals.generated_tokens)))
    if wall:
        cards.append((f"wall clock, {counted(max(len(runs), 1), 'run')}", seconds(wall)))
        cards.append(("rows/s of the wall clock", count(totals.rows / wall)))
        if totals.decode_steps:
            cards.append(("tokens/s of the wall clock", count(totals.generated_tokens / wall)))
    if held is not None:
        cards.append(("device-hours, with start-up and idle", f"{held / 3600:.3g}"))
        if totals.generated_tokens:
            unit, work = "tokens" if totals.decode_steps else "answers", totals.device_seconds_per_million_tokens
            cards.append((f"device-seconds per million {unit}, at work", count(work)))
            cards.append(("the same with start-up and idle", count(1e6 * held / totals.generated_tokens)))
        if (price := runs[-1].price_per_hour) is not None:
            cards.append(("money, at the job’s price", f"{held / 3600 * price:,.4g}"))
    return cards


def _speedups(manifest: Manifest, totals: Totals, held: float | None) -> Cards:
    """Return the three speed-ups, as far as they are known. held: device-seconds of all runs."""
    schedule = manifest.identity["schedule"]
    layers, speedup = schedule["num_layers"], schedule["speedup"]
    prompt_layers = schedule["depths"][0] if schedule.get("prompt") == "first" else layers
    skips = totals.layer_steps < totals.full_layer_steps or prompt_layers < layers
    cards = [("nominal: asked for", f"{speedup:g}x" if speedup else "own depths" if skips else "1x, full depth")]
    if prompt_layers < layers:
        cards.append((f"layers over prompts, of {layers}", str(prompt_layers)))
    if totals.layer_ratio is not None and totals.mean_depth is not None:
        cards.append(("layer ratio: layers at full depth ÷ layers run, decode", f"{totals.layer_ratio:.2f}x"))
        cards.append((f"mean depth of {layers} layers, decode", f"{totals.mean_depth:.2f}"))
    clock = clock_speedups(manifest.agreement, totals, held)
    for title, found in zip(("whole run", "decode alone"), clock, strict=True):
        if skips and found is not None:
            cards.append((f"wall clock, {title}, over full depth", f"{found:.2f}x"))
    return cards


def _labels(totals: Totals, known: Iterable[str]) -> list[tuple[str, int]]:
    """Return label and answers: the most frequent ones, then those of `known` that no answer is, then all others."""
    counts = dict(totals.labels)
    if counts:
        counts |= {label: 0 for label in known if label not in counts}
    listed = list(counts.items())
    rest = sum(count for _, count in listed[SHOWN_LABELS:]) + totals.unnamed_labels
    shown = [(label[:LABEL_CHARS], count) for label, count in listed[:SHOWN_LABELS]]
    return [*shown, ("all others", rest)] if rest or len(listed) > SHOWN_LABELS else shown


def _slowest(shards: pa.Table, manifest: Manifest) -> list[dict[str, Any]]:
    """Return the shards that took longest, with their place in the input."""
    names = ["shard", "rows", "errors", "generate_seconds", "node"]
    rows = slowest_shards(shards, SHOWN_SHARDS).select(names).to_pylist()
    return [{**row, "part": part_name(row["shard"]), "input": manifest.shards[row["shard"]]} for row in rows]


def _answers(folder: Folder, manifest: Manifest, shards: pa.Table, storage: StorageConfig) -> list[dict[str, Any]]:
    """Return the first answers with their prompts, as far as parts and input can be read."""
    names, found = ("id", "generated_text", "finish_reason", "error"), list[dict[str, Any]]()
    with suppress(OSError, ValueError):
        for index in sorted(shards["shard"].to_pylist()):
            if len(found) >= SHOWN_ANSWERS:
                break
            rows = [row for row in read_parquet(folder.read(part_name(index))).to_pylist() if not row["sample_index"]]
            for row, prompt in zip(rows, _prompts(manifest, index, storage), strict=False):
                texts = {name: None if row[name] is None else str(row[name])[:ANSWER_CHARS] for name in names}
                found.append({"prompt": prompt, **texts})
    return found[:SHOWN_ANSWERS]


def _prompts(manifest: Manifest, index: int, storage: StorageConfig) -> list[str]:
    """Return the columns of a shard's first rows that make their prompts; empty texts if the input cannot be read."""
    shard, section = manifest.shards[index], manifest.identity.get("input", {})
    shard = replace(shard, rows=min(shard.rows, SHOWN_ANSWERS))
    try:
        ((_, table),) = read_shards(manifest.files, [shard], manifest.schema, storage)
    except (*STORE_ERRORS, UserError, pa.ArrowException):
        return [""] * shard.rows
    template, column = section.get("template") or "", section.get("prompt") or section.get("messages") or "prompt"
    read = [name for name in manifest.schema.names if name != section.get("id")]
    used = [name for name in read if name == column or re.search(rf"\b{re.escape(name)}\b", template)] or read
    rows = table.select(used).to_pylist()
    return [
        "\n".join(_text(value) if len(used) == 1 else f"{name}: {_text(value)}" for name, value in row.items())
        for row in rows
    ]


def _text(value: Any) -> str:
    """Return a value of a prompt's column as text: of a chat the roles and contents of its messages."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "content" in value[0]:
        value = "\n".join(f"{message.get('role')}: {message['content']}" for message in value)
    value = "" if value is None else value
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))[:ANSWER_CHARS]


def first_rows(folder: Folder, count: int, shard: int = 0) -> list[dict[str, Any]]:
    """Return the first rows of a shard's part. Raises OSError or ValueError for a part that cannot be read."""
    rows: list[dict[str, Any]] = read_parquet(folder.read(part_name(shard))).slice(0, count).to_pylist()
    return rows
