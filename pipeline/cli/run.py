"""`skipdecode run`: answer every row of the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.errors import BAD_CONFIG, ROW_ERRORS, job_errors, stop
from pipeline.cli.options import Changes, Verbose, setup


def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    changes: Changes = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the input.")] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace another job's output; input.since: give up an unfinished run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Rows to print with their answers at the end.")] = 0,
    verbose: Verbose = False,
) -> None:
    """Run a bulk job; the same command again finishes it, or with input.since takes what is new."""
    setup(verbose)
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_config

    try:
        config = load_config(JobConfig, job, changes or [])
    except ValueError as error:
        raise stop(BAD_CONFIG, str(error)) from None
    from rich.console import Console

    from pipeline import job as jobs
    from pipeline.commit.finalize import summary
    from pipeline.incremental.runs import print_scheduled, scheduled_summary
    from pipeline.report.summary import last_errors, print_result
    from pipeline.storage.folder import open_folder

    again = "the same command without --overwrite" if overwrite else "the same command"
    with job_errors(job, config.output.path, again, "goes on from the committed shards", verbose):
        if config.input.since:
            scheduled = jobs.run_since(config, limit=limit, overwrite=overwrite, verbose=verbose)
            done = [(run.folder, run.result) for run in scheduled.finished]
        else:
            scheduled = None
            result = jobs.run(config, limit=limit, overwrite=overwrite, verbose=verbose)
            done = [(open_folder(config.output.path, config.storage), result)]
    console = Console(soft_wrap=True, stderr=as_json)
    for folder, result in done:
        print_result(console, folder, result, show)
    if scheduled is not None:
        print_scheduled(console, scheduled)
    if as_json:
        values = [
            {
                **summary(folder, result.manifest, result.totals),
                "fresh_rows": result.fresh_rows,
                "seconds": result.seconds,
            }
            for folder, result in done
        ]
        typer.echo(
            json.dumps(values[0] if scheduled is None else scheduled_summary(config.output.path, scheduled, values))
        )
    judged = [(result.totals.errors, result.totals.rows) for _, result in done]
    if scheduled is not None and scheduled.last is not None and not done:  # a retry must not turn errors into success
        last = open_folder(f"{config.output.path.rstrip('/')}/{scheduled.last.folder}", config.storage)
        judged = last_errors(last)
    for errors, rows in judged:
        if errors > config.max_row_errors * rows:
            raise stop(
                ROW_ERRORS,
                f"{errors:,} of {rows:,} rows have an error, more than max_row_errors = "
                f"{config.max_row_errors:g}; their `error` column says why",
            )
