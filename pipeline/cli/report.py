"""`skipdecode report`: print the statistics of an output, or verify its parts."""

from __future__ import annotations

from typing import Annotated

import typer

from actors.engine.errors import UserError
from pipeline.cli.errors import BAD_CONFIG, FAILED, stop
from pipeline.cli.options import setup


def report(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT_URI", help="A job's output folder, or the root of scheduled runs.")
    ],
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Instead: read every part, and print a line for each that is not what was committed "
            "(digest, rows, job); exit 1 if any.",
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Also write _job/stats.parquet and _job/summary.json; not while a job runs.")
    ] = False,
) -> None:
    """Print a job's statistics from its commit records, finished or not. Only reads, unless --write is given.

    For a root of scheduled runs: print the ledger of its runs.
    """
    setup(False)
    from rich.console import Console

    from pipeline.commit.finalize import totals_of, write_statistics
    from pipeline.commit.records import read_records
    from pipeline.commit.verify import verify
    from pipeline.config.job import StorageConfig
    from pipeline.config.load import validated
    from pipeline.incremental.ledger import holds_ledger, print_ledger
    from pipeline.incremental.ledger import read as read_ledger
    from pipeline.plan import manifest as manifests
    from pipeline.report.summary import print_report
    from pipeline.storage.folder import STORE_ERRORS, open_folder

    try:
        folder = open_folder(output, validated(StorageConfig, {"endpoint_url": endpoint_url}, "--endpoint-url"))
        if holds_ledger(folder) and not check:
            print_ledger(Console(soft_wrap=True), read_ledger(folder))
            return
        manifest = manifests.load(folder)
        if manifest is None:
            raise UserError(f"{output}: no job here (no _job/job.json)")
        if check:
            bad = 0
            for line in verify(folder, manifest):
                typer.echo(line)
                bad += 1
            if bad:
                raise stop(FAILED, f"{output}: {bad:,} files are not as they were committed")
            typer.echo(f"{output}: every part is as it was committed")
            return
        records = read_records(folder, manifest.fingerprint)
        if write:
            write_statistics(folder, manifest, records)
        print_report(Console(soft_wrap=True), manifest, records, totals_of(records))
    except ValueError as error:
        raise stop(BAD_CONFIG, str(error)) from None
    except STORE_ERRORS as error:
        raise stop(FAILED, f"failed: {error}") from None
