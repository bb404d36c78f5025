"""Writes a job's report page, `_job/report.html`. An error in this module does not fail the job."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pyarrow as pa
from jinja2 import DictLoader, Environment, StrictUndefined

from actors.engine.errors import UserError
from pipeline.answer.stats import STATS_SCHEMA, Totals, add_up, slowest_shards
from pipeline.commit.finalize import STATS
from pipeline.commit.results import rows_of
from pipeline.commit.runs import read_runs, versions
from pipeline.commit.sink import part_name
from pipeline.config.job import StorageConfig
from pipeline.input.rows import read_shards
from pipeline.input.shards import Shard
from pipeline.messages import counted, duration, one_line, without_secrets, write_log
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import error_kinds, run_spans, total_lines
from pipeline.storage.folder import STORE_ERRORS, Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
REPORT = "_job/report.html"
HERE = files("pipeline.report")
MOST_CHARS = 400  # maximum number of characters shown of a configuration value
SHOWN_SHARDS, SHOWN_RUNS, SHOWN_LABELS, SHOWN_ANSWERS = 10, 20, 100, 10
LABEL_CHARS, ANSWER_CHARS = 200, 1000
HEAD_CHARS, TAIL_CHARS = 120, 280  # characters shown from the start and from the end of a long prompt


def write_report(folder: Folder, manifest: Manifest, storage: StorageConfig) -> None:
    """Write the report page of a job. The job's statistics file must exist.

    An error is logged as a warning, which names a file with the traceback, and does not fail the job.
    """
    try:
        folder.replace(REPORT, job_page(folder, manifest, read_parquet(folder.read(STATS)), storage))
    except Exception as error:
        traceback = write_log(error)
        shown, again = f" (traceback: {traceback})" if traceback else "", f"skipdecode report {folder.url} --html"
        log.warning("%s/%s was not written: %s%s; `%s` writes it", folder.url, REPORT, one_line(error), shown, again)


def job_page(folder: Folder, manifest: Manifest, shards: pa.Table, storage: StorageConfig) -> bytes:
    """Return the HTML report page of a finished or unfinished job. shards: statistics of the committed shards."""
    shards = shards.select(STATS_SCHEMA.names).combine_chunks()
    totals, runs = add_up(shards), read_runs(folder)
    spans = run_spans(runs, shards)
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
        "lines": list(total_lines(manifest, totals, runs, shards)),
        "slowest": [
            {**row, "part": part_name(row["shard"]), "input": manifest.shards[row["shard"]]}
            for row in slowest_shards(shards, SHOWN_SHARDS).to_pylist()
        ],
        "runs": [(number, begin, end - begin) for number, (begin, end) in enumerate(spans, 1)][-SHOWN_RUNS:],
        "configuration": flat(runs[-1].config) if runs else [],
        "identity": flat({key: value for key, value in manifest.identity.items() if key != "answers_version"}),
        "batching": [(name, str(value)) for name, value in vars(manifest.batching).items()],
        "versions": list((runs[-1].versions if runs else versions()).items()),
    }
    return _render(values)


def _labels(totals: Totals, choices: Iterable[str]) -> list[tuple[str, int]]:
    """Return (label, number of answers): the most common labels, unused `choices`, then the sum of all others."""
    counts = dict(totals.labels)
    if counts:
        counts |= {label: 0 for label in choices if label not in counts}
    listed = list(counts.items())
    rest = sum(count for _, count in listed[SHOWN_LABELS:]) + totals.unnamed_labels
    shown = [(label[:LABEL_CHARS], count) for label, count in listed[:SHOWN_LABELS]]
    return [*shown, ("all others", rest)] if rest or len(listed) > SHOWN_LABELS else shown


def _answers(folder: Folder, manifest: Manifest, shards: pa.Table, storage: StorageConfig) -> list[dict[str, Any]]:
    """Return the first answers with their prompts, up to an output file that cannot be read."""
    names, found = ("id", "generated_text", "finish_reason", "error"), list[dict[str, Any]]()
    with suppress(OSError, ValueError):
        for index in sorted(shards["shard"].to_pylist()):
            if len(found) >= SHOWN_ANSWERS:
                break
            shard = replace(manifest.shards[index], rows=min(manifest.shards[index].rows, SHOWN_ANSWERS))
            rows = [row for row in rows_of(folder.read(part_name(index))) if not row["sample_index"]]
            for row, prompt in zip(rows, prompt_texts(manifest, shard, storage), strict=False):
                texts = {name: None if row[name] is None else str(row[name])[:ANSWER_CHARS] for name in names}
                found.append({"prompt": prompt, **texts})
    return found[:SHOWN_ANSWERS]


def prompt_texts(manifest: Manifest, shard: Shard, storage: StorageConfig) -> list[str]:
    """Return the prompt columns of each row of a shard as one text; empty texts if the input is unreadable."""
    section = manifest.identity.get("input", {})
    try:
        ((_, table),) = read_shards(manifest.files, [shard], manifest.schema, storage)
    except (*STORE_ERRORS, UserError, pa.ArrowException):
        return [""] * shard.rows
    template, column = section.get("template") or "", section.get("prompt") or section.get("messages") or "prompt"
    names = manifest.schema.names
    used = [name for name in names if name == column or re.search(rf"\b{re.escape(name)}\b", template)]
    used = used or [name for name in names if name != section.get("id")]
    return [
        "\n".join(_text(value) if len(used) == 1 else f"{name}: {_text(value)}" for name, value in row.items())
        for row in table.select(used).to_pylist()
    ]


def _text(value: Any) -> str:
    """Return the value of a prompt column as text: of a chat the last message, of a long text both ends."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "content" in value[0]:
        before = f"… {counted(len(value) - 1, 'message')} before\n" if len(value) > 1 else ""
        return f"{before}{value[-1].get('role')}: {_text(value[-1]['content'])}"
    value = "" if value is None else value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]} … {text[-TAIL_CHARS:]}"


def _render(values: Mapping[str, Any]) -> bytes:
    """Render the HTML template. All text is escaped. The page has no scripts and loads no other files."""
    texts = {name: (HERE / name).read_text() for name in ("job_page.html", "page.css")}
    environment = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(count=count, duration=duration, when=when)
    text = environment.get_template("job_page.html").render(values)
    return text.encode(errors="replace")  # a name may hold a lone surrogate


def count(value: float | None) -> str:
    """Return a number as text with thousands separators; "" for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.3g}"


def when(value: float) -> str:
    """Return a time as text in UTC. value: s since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return (dotted key, text) of each value in a configuration, without secrets. Texts are cut to `MOST_CHARS`."""
    if isinstance(value, Mapping) and value:
        return [pair for key, item in value.items() for pair in flat(item, f"{name}.{key}" if name else str(key))]
    text = without_secrets(value if isinstance(value, str) else "" if value is None else str(value))
    return [(name, text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}… ({len(text):,} characters)")]
