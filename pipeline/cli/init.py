"""Defines `skipdecode init`, which writes a job file for an input."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Verbose, command, echo


def init(
    path: Annotated[str, typer.Argument(metavar="INPUT", help="File, folder or glob of prompts; local or s3://.")],
    output: Annotated[Path, typer.Option(help="The job file to write; it must not exist.")] = Path("job.yaml"),
    model: Annotated[str | None, typer.Option(help="Checkpoint; default: the demo's, if it exists.")] = None,
    verbose: Verbose = False,
) -> None:
    """Write a commented job file that fits the columns of an input. Does not replace an existing file."""
    with command(verbose):
        from pipeline.advise.propose import write_job_file

        for line in write_job_file(path, output, model):
            echo(line)
        echo(f"wrote {output}; next: skipdecode try {shlex.quote(str(output))}")
