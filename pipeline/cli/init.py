"""`skipdecode init`: a commented job file from an input's columns."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Verbose, command


def init(
    path: Annotated[str, typer.Argument(metavar="INPUT", help="File, folder or glob of prompts; local or s3://.")],
    output: Annotated[Path, typer.Option(help="The job file to write; it must not exist.")] = Path("job.yaml"),
    model: Annotated[str | None, typer.Option(help="Checkpoint; default the demo's, where it is found.")] = None,
    verbose: Verbose = False,
) -> None:
    """Look at an input's columns and write a commented job file. Replaces no file."""
    with command(verbose):
        from pipeline.messages import counted, listed
        from pipeline.propose import PLACEHOLDER, write_job_file

        sample, proposal = write_job_file(path, output, model)
        typer.echo(f"{counted(sample.files, 'file')}; columns: {listed(sample.columns)}")
        for note in proposal.notes:
            typer.echo(note)
        if PLACEHOLDER in output.read_text():
            typer.echo(f"{output}: give model.path a checkpoint")
        typer.echo(f"next: skipdecode try {shlex.quote(str(output))}")
