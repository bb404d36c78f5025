"""`skipdecode run`: answer every row of the input."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.command import ROW_ERRORS, Changes, JobFile, LogJson, Verbose, command, stop

if TYPE_CHECKING:
    from pipeline.commit.sink import Check
    from pipeline.config.job import JobConfig


def run(
    job: JobFile,
    changes: Changes = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first rows of the input.")] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace another job's output; input.since: abandon an unfinished run.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Read all parts of earlier runs in a store; on a local disk this is always done.")
    ] = False,
    repair: Annotated[
        bool, typer.Option(help="Keep damaged parts of earlier runs in _job/damaged, and answer their rows again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Number of rows to print with their answers at the end.")] = 0,
    log_json: LogJson = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of 127.0.0.1 for Prometheus, where the job starts its own Ray."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run or resume a bulk job; with input.since, answer the new files."""
    again = "the same command without --overwrite" if overwrite else "the same command"
    going_on = {"failed": f"{again} goes on from the committed shards", "interrupted": f"{again} finishes the job"}
    with command(verbose, log_json, **going_on) as advice:
        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)
        advice.output = config.output.path
        check: Check = "repair" if repair else "digests" if verify else "quick"
        options = {"limit": limit, "overwrite": overwrite, "check": check, "verbose": verbose}
        _run(config, metrics_port, options, as_json=as_json, show=show)


def _run(config: JobConfig, metrics_port: int | None, options: dict[str, Any], *, as_json: bool, show: int) -> None:
    from pipeline.runtime.announce import announce, announced, goes_to_log

    with announced("loading libraries"):
        import psutil
        from rich.console import Console

        from pipeline import job as jobs
        from pipeline.commit.finalize import summary
        from pipeline.commit.table import recorded
        from pipeline.incremental import runs as incremental
        from pipeline.incremental.runs import print_runs, runs_summary
        from pipeline.report.summary import last_errors, print_result
        from pipeline.storage.folder import open_folder

    backend = jobs.ray_backend(verbose=options["verbose"], metrics_port=metrics_port)
    if config.input.since:
        answered = incremental.run(config, **options, backend=backend)
        done = [(run.folder, run.result) for run in answered.finished]
    else:
        answered = None
        process_began = psutil.Process().create_time()
        result = jobs.run(config, **options, backend=backend, process_began=process_began)
        done = [(open_folder(config.output.path, config.storage), result)]
    # standard error holds the log's JSON lines, standard output the object of --json: no place for tables
    console = Console(soft_wrap=True, stderr=as_json, quiet=as_json and goes_to_log())
    for folder, result in done:
        print_result(console, folder, result, show)
    if answered is not None:
        print_runs(console, answered)
    values = [
        {
            **summary(folder, result.manifest, result.totals),
            "fresh_rows": result.fresh_rows,
            "seconds": result.seconds,
            "tables": [{"table": one.table, "snapshot": one.snapshot} for one in recorded(folder).values()],
        }
        for folder, result in done
    ]
    outcome = values[0] if answered is None else runs_summary(config.output.path, answered, values)
    if goes_to_log():
        announce("the job is finished", "summary", summary=outcome)
    if as_json:
        typer.echo(json.dumps(outcome))
    errors_and_rows = [
        (result.totals.errors, result.totals.rows) for _, result in done if not result.manifest.batching.retries
    ]
    if answered is not None and answered.last is not None and not done:
        # without new files the last run's row errors decide the exit status
        last = open_folder(f"{config.output.path.rstrip('/')}/{answered.last.folder}", config.storage)
        errors_and_rows = last_errors(last)
    for errors, rows in errors_and_rows:
        if errors > config.max_error_rate * rows:
            raise stop(
                ROW_ERRORS,
                f"{errors:,} of {rows:,} rows have an error, more than max_error_rate = "
                f"{config.max_error_rate:g}; their `error` column says why",
            )
