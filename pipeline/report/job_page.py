"""`_job/report.html`: what a job did, in one file without network. Written before `_SUCCESS`; never fails a job."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import pyarrow as pa

from pipeline.commit.duplicates import with_duplicates
from pipeline.commit.finalize import STATS
from pipeline.commit.runs import read_runs, versions
from pipeline.commit.sink import part_name
from pipeline.config.job import JobConfig
from pipeline.generate.stats import STATS_SCHEMA, Totals, add_up, slowest_shards
from pipeline.generate.value_fields import field_name, value_fields
from pipeline.messages import one_line, write_log
from pipeline.plan.manifest import Manifest
from pipeline.report import prediction as predictions
from pipeline.report.figures import Histogram, clock_speedups, compare, depths, error_kinds, held_seconds, lengths
from pipeline.report.page import flat, quiet_matplotlib, render
from pipeline.report.timeline import MEANINGS, PARTS, Timeline, least_busy, run_spans, timeline
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
REPORT = "_job/report.html"
SHOWN_SHARDS, SHOWN_LANES, SHOWN_RUNS, SHOWN_LABELS = 10, 40, 20, 100
LABEL_CHARS = 200


def write_report(folder: Folder, manifest: Manifest, config: JobConfig) -> None:
    """Write the report of a job whose statistics are written. An error is a warning, with its traceback in a log."""
    try:
        found, is_stored = predictions.find(folder, config.model.cache, manifest.fingerprint)
        if found is not None and not is_stored:
            folder.replace(predictions.PREDICTION, (json.dumps(found, indent=1) + "\n").encode())
        shards = read_parquet(folder.read(STATS))
        folder.replace(REPORT, job_page(folder, manifest, shards, found))
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


def job_page(folder: Folder, manifest: Manifest, shards: pa.Table, prediction: dict[str, Any] | None) -> bytes:
    """The page of a job, finished or not.

    Args:
        folder: its output, of which only `_job/runs.json` and `_job/duplicates.json` are read.
        shards: statistics as in `STATS_SCHEMA`, of committed shards.
        prediction: of `skipdecode plan`, if there is one.
    """
    shards = shards.select(STATS_SCHEMA.names).combine_chunks()
    totals, runs = with_duplicates(folder, add_up(shards)), read_runs(folder)
    spans = run_spans(runs, shards)
    wall = sum(end - begin for begin, end in spans)
    found = timeline(runs, shards)
    compared = None
    if prediction is not None:
        with suppress(KeyError, TypeError):  # damaged
            compared = compare(prediction, runs, shards)
    last = runs[-1] if runs else None
    held = held_seconds(runs, shards)
    hours = None if held is None else held / 3600
    whole_clock, decode_clock = clock_speedups(manifest.agreement, totals, held)
    schedule = manifest.identity["schedule"]
    prompt_layers = schedule["depths"][0] if schedule.get("prompt") == "first" else schedule["num_layers"]
    of_tokens = totals.decode_steps > 0  # else answers are single tokens
    kinds = error_kinds(shards)
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
        "of_tokens": of_tokens,
        "wall": wall,
        "device_hours": hours,
        "held": held,
        "clock": whole_clock,
        "decode_clock": decode_clock,
        "money": None if last is None or last.price_per_hour is None or hours is None else hours * last.price_per_hour,
        "schedule": schedule,
        "compared": compared,
        "runs": [
            {"number": number + 1, "began": begin, "seconds": end - begin, "ended": end}
            for number, (begin, end) in enumerate(spans)
        ][-SHOWN_RUNS:],
        "found": found,
        "parts": PARTS,
        "meanings": MEANINGS,
        "lanes": least_busy(found.lanes, SHOWN_LANES) if found else [],
        "part_sums": _part_sums(found, totals),
        "histograms": _histograms(shards, of_tokens),
        "reasons": _reasons(totals),
        "labels": _labels(totals.labels, manifest.identity.get("choices") or (), totals.unnamed_labels),
        "fields": _fields(totals, manifest),
        "kinds": kinds,
        "slowest": _slowest(shards, manifest),
        "configuration": flat(last.config) if last else [],
        "identity": flat({key: value for key, value in manifest.identity.items() if key != "answers_version"}),
        "batching": [(name, str(value)) for name, value in vars(manifest.batching).items() if name != "prefix"],
        "versions": list((last.versions if last else versions()).items()),
        "plots": _plots(found, of_tokens),
    }
    return render("job_page.html", values)


def _plots(found: Timeline | None, of_tokens: bool) -> dict[str, Any]:
    if found is None:
        return {}
    quiet_matplotlib()
    from pipeline.report import plots

    with plots.style():
        return {
            "rows": plots.rates_plot(found, found.rows, "rows"),
            "tokens": plots.rates_plot(found, found.tokens, "tokens") if of_tokens else None,
            "seconds": plots.seconds_plot(found),
        }


def _histograms(shards: pa.Table, of_tokens: bool) -> list[dict[str, Any]]:
    """Name, unit, bins and plot of each distribution."""
    quiet_matplotlib()
    from pipeline.report import plots

    wanted: list[tuple[str, str, str, Histogram | None]] = [
        ("Prompt lengths", "rows", "tokens of the prompt", lengths(shards["prompt_lengths"])),
        (
            "Answer lengths",
            "answers",
            "generated tokens",
            lengths(shards["answer_lengths"]) if of_tokens else None,
        ),
        ("Depth", "answers", "layers a decode step, mean of an answer", depths(shards["answer_depths"])),
    ]
    found = []
    with plots.style():
        for place, (name, counted, unit, bins) in enumerate(wanted):
            if bins is not None:
                labels = [f"{first:,}" for first in bins.firsts]
                plot = plots.bars_plot(name, labels, bins.counts, unit, place)
                found.append({"name": name, "counted": counted, "unit": unit, "bins": bins, "plot": plot})
    return found


def _part_sums(found: Timeline | None, totals: Totals) -> list[tuple[str, str, float]]:
    """Where, part and seconds: of actors, then of the tasks beside them."""
    lanes = found.lanes if found else []
    sums = [("actors", part, sum(lane.seconds[part] for lane in lanes)) for part in PARTS]
    return [*sums, ("tasks", "prepare", totals.prepare_seconds), ("tasks", "commit", totals.commit_seconds)]


def _reasons(totals: Totals) -> list[tuple[str, int]]:
    ended = [("stop", totals.stopped), ("length", totals.cut_off)]
    return [*ended, ("error", totals.answers - totals.stopped - totals.cut_off)]


def _labels(found: Mapping[str, int], known: Iterable[str], others: int) -> list[tuple[str, int]]:
    """Label and answers: the most frequent ones, then those that no answer is; then all others.

    Args:
        found: Answers by label, the most frequent first.
        known: Labels that an answer may be.
        others: Answers that are no label in `found`.
    """
    counts = dict(found)
    if counts:
        counts |= {label: 0 for label in known if label not in counts}
    listed = list(counts.items())
    rest = sum(count for _, count in listed[SHOWN_LABELS:]) + others
    shown = [(label[:LABEL_CHARS], count) for label, count in listed[:SHOWN_LABELS]]
    return [*shown, ("all others", rest)] if rest or len(listed) > SHOWN_LABELS else shown


def _fields(totals: Totals, manifest: Manifest) -> list[tuple[str, list[tuple[str, int]]]]:
    """Name and values, as `_labels`, of each counted field of structured answers."""
    known = {field_name(path): texts for path, texts in value_fields(manifest.identity.get("output_format")).items()}
    return [
        (name[:LABEL_CHARS], _labels(values, known.get(name, {}).values(), totals.answers_without(name)))
        for name, values in totals.fields.items()
    ]


def _slowest(shards: pa.Table, manifest: Manifest) -> list[dict[str, Any]]:
    """The shards that took longest, with their place in the input."""
    slowest = slowest_shards(shards, SHOWN_SHARDS)
    names = ["shard", "rows", "errors", "generated_tokens", "generate_seconds", "tokens_per_second", "node", "attempt"]
    return [
        {
            **row,
            "part": part_name(row["shard"]),
            "input": manifest.shards[row["shard"]],
            "rows_per_second": row["rows"] / row["generate_seconds"] if row["tokens_per_second"] else None,
        }
        for row in slowest.select(names).to_pylist()
    ]
