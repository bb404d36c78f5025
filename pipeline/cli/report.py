"""Defines `skipdecode report`, which prints a job's statistics, or verifies its output files (parts)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.engine.errors import UserError
from pipeline.cli.command import FAILED, Changes, command, echo, stop

if TYPE_CHECKING:
    from pipeline.config.job import StorageConfig


def report(
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT", help="A job's output folder, the root of incremental runs, or a job file (.yaml)."
        ),
    ],
    changes: Changes = None,
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint; default: as in the job file.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Instead of statistics, print a line for each output file whose digest, row count or job differs from "
            "its commit record. Reads all files. Exit status 1 if one differs.",
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Also write _job/stats.pq and _job/summary.json; not for running jobs.")
    ] = False,
    html: Annotated[bool, typer.Option("--html", help="Instead of statistics, write _job/report.html.")] = False,
    to: Annotated[Path | None, typer.Option("--to", help="With --html: write the page to this local file.")] = None,
) -> None:
    """Print the statistics of a finished or unfinished job. Only --write and --html write files.

    For the root folder of incremental runs, print the list of runs (ledger).
    """
    with command(False) as advice:
        if to is not None and not html:
            raise UserError("--to needs --html; add it")
        if to is not None and (to.is_dir() or not to.parent.is_dir()):
            raise UserError(f"--to {to}: give the name of a file in an existing folder")
        url, storage = _location(output, changes, endpoint_url)
        if url.startswith("s3://") and storage.endpoint_url is None:
            advice.failed = "if the bucket is not on AWS, give --endpoint-url or the job file"
        if html and (check or write):
            raise UserError("--html cannot be combined with --verify or --write")
        _report(url, storage, check=check, write=write, html=html, to=to)


def _location(output: str, changes: list[str] | None, endpoint_url: str | None) -> tuple[str, StorageConfig]:
    """Return URL and storage settings of the output folder. output: the folder or a job file."""
    from pipeline.config.job import JobConfig, StorageConfig
    from pipeline.config.load import load_config, validated

    given = {} if endpoint_url is None else {"endpoint_url": endpoint_url}
    if output.endswith((".yaml", ".yml")) and "://" not in output and not Path(output).is_dir():
        config = load_config(JobConfig, output, changes or [])
        return config.output.path, validated(StorageConfig, config.storage.model_dump() | given, "--endpoint-url")
    if changes:
        raise UserError("--set needs a job file; name it instead of the output folder")
    return output, validated(StorageConfig, given, "--endpoint-url")


def _report(url: str, storage: StorageConfig, *, check: bool, write: bool, html: bool, to: Path | None) -> None:
    from pipeline.commit.claim import LEDGER
    from pipeline.commit.finalize import totals_of, write_statistics
    from pipeline.commit.records import read_records
    from pipeline.commit.runs import read_runs
    from pipeline.commit.verify import verify
    from pipeline.messages import counted
    from pipeline.nightly import print_ledger
    from pipeline.plan import plan_files
    from pipeline.report.job_page import REPORT, job_page
    from pipeline.report.summary import print_report
    from pipeline.runtime.wide_console import wide_console
    from pipeline.storage.folder import open_folder
    from pipeline.storage.working_dir import check_outlives_job

    if to is not None:
        check_outlives_job("--to", to)
    elif html or write:
        check_outlives_job("--html" if html else "--write", url)
    folder = open_folder(url, storage)
    if folder.names(LEDGER):
        if html:
            raise UserError(f"{url}: --html shows one run: name a dated folder in this folder")
        if check or write:
            raise UserError(f"{url}: --verify and --write work on one run: name a dated folder in this folder")
        print_ledger(wide_console(), folder, storage)
        return
    manifest = plan_files.load(folder)
    if manifest is None:
        raise UserError(f"{url}: no job here (no _job/job.json); name an output folder")
    if html:
        page = job_page(folder, manifest, read_records(folder, manifest.fingerprint))
        if to is None:
            folder.replace(REPORT, page)
        elif to.is_file() and b"<title>SkipDecode" not in to.read_bytes():
            raise UserError(f"--to {to}: this file exists and is not a SkipDecode report; choose another name")
        else:
            try:
                to.write_bytes(page)
            except OSError as error:
                raise UserError(f"--to {to}: cannot be written: {error.strerror}; choose another file") from None
        echo(to or f"{folder.url}/{REPORT}")
        return
    if check:
        bad = 0
        for line in verify(folder, manifest, storage):
            echo(line)
            bad += 1
        if bad:
            raise stop(FAILED, f"{url}: not as committed: {counted(bad, 'file')}")
        echo(f"{url}: every part is as it was committed")
        return
    records = read_records(folder, manifest.fingerprint)
    if write:
        write_statistics(folder, manifest, records)
    print_report(wide_console(), manifest, records, totals_of(records), read_runs(folder))
