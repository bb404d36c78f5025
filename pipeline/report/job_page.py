"""Writes a job's report page, `_job/report.html`. An error in this module does not fail the job."""

from __future__ import annotations

import logging
import time
from importlib.resources import files

import pyarrow as pa
from jinja2 import DictLoader, Environment, StrictUndefined

from pipeline.answer.stats import STATS_SCHEMA, add_up, slowest_shards
from pipeline.commit.finalize import STATS
from pipeline.commit.runs import read_runs
from pipeline.commit.sink import part_name
from pipeline.messages import escaped, one_line, write_log
from pipeline.plan.manifest import Manifest
from pipeline.report.figures import error_kinds, first_answers, label_counts, total_lines
from pipeline.storage.folder import Folder
from pipeline.storage.parquet import read_parquet

log = logging.getLogger(__name__)
REPORT = "_job/report.html"
SHOWN_SHARDS, SHOWN_LABELS, SHOWN_ANSWERS = 10, 100, 10
LABEL_CHARS, ANSWER_CHARS = 200, 1000


def write_report(folder: Folder, manifest: Manifest) -> None:
    """Write the report page of a job. The job's statistics file must exist.

    An error is logged as a warning, which names a file with the traceback, and does not fail the job.
    """
    try:
        folder.replace(REPORT, job_page(folder, manifest, read_parquet(folder.read(STATS))))
    except Exception as error:
        traceback = write_log(error)
        shown, again = f" (traceback: {traceback})" if traceback else "", f"skipdecode report {folder.url} --html"
        log.warning("%s/%s was not written: %s%s; `%s` writes it", folder.url, REPORT, one_line(error), shown, again)


def job_page(folder: Folder, manifest: Manifest, shards: pa.Table) -> bytes:
    """Return the HTML report page of a finished or unfinished job. shards: statistics of the committed shards.

    All text is escaped. The page has no scripts and loads no other files.
    """
    shards = shards.select(STATS_SCHEMA.names).combine_chunks()
    totals = add_up(shards)
    here = files("pipeline.report")
    texts = {name: (here / name).read_text() for name in ("job_page.html", "page.css")}
    environment = Environment(
        loader=DictLoader(texts),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: escaped(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = count
    text = environment.get_template("job_page.html").render(
        url=folder.url,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        manifest=manifest,
        totals=totals,
        answers=first_answers(folder, shards, SHOWN_ANSWERS),
        answer_chars=ANSWER_CHARS,
        labels=label_counts(totals, manifest, SHOWN_LABELS),
        label_chars=LABEL_CHARS,
        kinds=error_kinds(shards),
        lines=list(total_lines(manifest, totals, read_runs(folder), shards)),
        slowest=[
            {**row, "part": part_name(row["shard"]), "input": manifest.shards[row["shard"]]}
            for row in slowest_shards(shards, SHOWN_SHARDS).to_pylist()
        ],
    )
    return text.encode(errors="backslashreplace")  # a name may hold a lone surrogate


def count(value: float | None) -> str:
    """Return a number as text with thousands separators; "" for None."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.3g}"
