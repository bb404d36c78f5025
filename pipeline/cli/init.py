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
        from pipeline.advise.propose import DEMO, write_job_file
        from pipeline.checkpoints.resolve import PLACEHOLDER
        from pipeline.messages import counted, listed

        sample, proposal = write_job_file(path, output, model)
        echo(f"{counted(sample.files, 'file')}; columns: {listed(sample.columns)}")
        for note in proposal.notes:
            echo(note)
        if PLACEHOLDER in output.read_text():
            echo(f"{output}: set model.path to a checkpoint")
        elif model is None:
            echo(f"model: {DEMO}, a toy that knows only restaurants; choose another with --model")
        echo(f"next: skipdecode try {shlex.quote(str(output))}")
