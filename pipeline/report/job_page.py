"""`_job/report.html`: what a job did, in one file without network. Written before `_SUCCESS`; never fails a job."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from pipeline.commit.duplicates import with_duplicates
from pipeline.commit.finalize import STATS
from pipeline.commit.runs import read_runs, versions
from pipeline.commit.sink import part_name
from pipeline.config.job import JobConfig
from pipeline.generate.stats import STATS_SCHEMA, Totals, add_up, slowest_shards
from pipeline.messages import one_line, write_log
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import clock_speedups, error_kinds, held_seconds, run_spans
from pipeline.report.page import flat, render
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
REPORT = "_job/report.html"
SHOWN_SHARDS, SHOWN_RUNS, SHOWN_LABELS, SHOWN_ANSWERS = 10, 20, 100, 10
LABEL_CHARS, ANSWER_CHARS = 200, 1000


def write_report(folder: Folder, manifest: Manifest, config: JobConfig) -> None:
    """Write the report of a job whose statistics are written. An error is a warning, with its traceback in a log."""
    try:
        folder.replace(REPORT, job_page(folder, manifest, read_parquet(folder.read(STATS))))
    except Exception as error:  # the answers are all there: a report is not worth a failed job
        traceback = write_log(error)
        log.warning(
            "%s/%s was not written: %s%s; `skipdecode report %s --html` writes it",
            folder.url,
            REPORT,
            one_line(error),
            f" (traceback: {traceback})" if traceback else "",
            folder.url,
        )


def job_page(folder: Folder, manifest: Manifest, shards: pa.Table) -> bytes:
    """Return the page of a job, finished or not.

    Args:
        folder: its output, of which `_job/runs.json`, `_job/duplicates.json` and one part are read.
        shards: statistics as in `STATS_SCHEMA`, of committed shards.
    """
    shards = shards.select(STATS_SCHEMA.names).combine_chunks()
    totals, runs = with_duplicates(folder, add_up(shards)), read_runs(folder)
    spans, held = run_spans(runs, shards), held_seconds(runs, shards)
    last = runs[-1] if runs else None
    hours = None if held is None else held / 3600
    whole_clock, decode_clock = clock_speedups(manifest.agreement, totals, held)
    schedule = manifest.identity["schedule"]
    prompt_layers = schedule["depths"][0] if schedule.get("prompt") == "first" else schedule["num_layers"]
    reasons = [("stop", totals.stopped), ("length", totals.cut_off)]
    values = {
        "title": f"SkipDecode: {folder.url}",
        "url": folder.url,
        "made": time.time(),
        "manifest": manifest,
        "totals": totals,
        "finished": totals.rows == manifest.rows,
        "skips": totals.layer_steps < totals.full_layer_steps or prompt_layers < schedule["num_layers"],
        "prompt_layers": prompt_layers,
        "decodes": totals.decode_steps > 0,
        "wall": sum(end - begin for begin, end in spans),
        "device_hours": hours,
        "held": held,
        "clock": whole_clock,
        "decode_clock": decode_clock,
        "money": None if last is None or last.price_per_hour is None or hours is None else hours * last.price_per_hour,
        "schedule": schedule,
        "runs": [
            {"number": number + 1, "began": begin, "seconds": end - begin, "ended": end}
            for number, (begin, end) in enumerate(spans)
        ][-SHOWN_RUNS:],
        "seconds": [
            (name, getattr(totals, f"{name}_seconds"))
            for name in ("prefill", "decode", "generate", "prepare", "commit")
        ],
        "reasons": [*reasons, ("error", totals.answers - totals.stopped - totals.cut_off)],
        "labels": _labels(totals, manifest.identity.get("choices") or ()),
        "kinds": error_kinds(shards),
        "slowest": _slowest(shards, manifest),
        "answers": _answers(folder, shards),
        "configuration": flat(last.config) if last else [],
        "identity": flat({key: value for key, value in manifest.identity.items() if key != "answers_version"}),
        "batching": [(name, str(value)) for name, value in vars(manifest.batching).items() if name != "prefix"],
        "versions": list((last.versions if last else versions()).items()),
    }
    return render("job_page.html", values)


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
    names = ["shard", "rows", "errors", "generated_tokens", "generate_seconds", "tokens_per_second", "node"]
    rows = slowest_shards(shards, SHOWN_SHARDS).select(names).to_pylist()
    return [{**row, "part": part_name(row["shard"]), "input": manifest.shards[row["shard"]]} for row in rows]


def _answers(folder: Folder, shards: pa.Table) -> list[dict[str, Any]]:
    """Return the first answers of the first committed part, cut to `ANSWER_CHARS`; none if it cannot be read."""
    try:
        rows = first_rows(folder, SHOWN_ANSWERS, min(shards["shard"].to_pylist()))
    except (OSError, ValueError):
        return []
    names = ["id", "generated_text", "finish_reason", "error"]
    return [{name: None if row[name] is None else str(row[name])[:ANSWER_CHARS] for name in names} for row in rows]


def first_rows(folder: Folder, count: int, shard: int = 0) -> list[dict[str, Any]]:
    """Return the first rows of a shard's part. Raises OSError or ValueError for a part that cannot be read."""
    rows: list[dict[str, Any]] = read_parquet(folder.read(part_name(shard))).slice(0, count).to_pylist()
    return rows
