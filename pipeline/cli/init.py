"""Defines `skipdecode init`, which writes a job file for an input, and `convert`, which converts a GGUF file."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Verbose, command


def init(
    path: Annotated[str, typer.Argument(metavar="INPUT", help="File, folder or glob of prompts; local or s3://.")],
    output: Annotated[Path, typer.Option(help="The job file to write; it must not exist.")] = Path("job.yaml"),
    model: Annotated[str | None, typer.Option(help="Checkpoint; default: the demo's, if it exists.")] = None,
    verbose: Verbose = False,
) -> None:
    """Write a commented job file that fits the columns of an input. Does not replace an existing file."""
    with command(verbose):
        from pipeline.checkpoints.resolve import PLACEHOLDER
        from pipeline.messages import counted, listed
        from pipeline.propose import DEMO, write_job_file

        sample, proposal = write_job_file(path, output, model)
        typer.echo(f"{counted(sample.files, 'file')}; columns: {listed(sample.columns)}")
        for note in proposal.notes:
            typer.echo(note)
        if PLACEHOLDER in output.read_text():
            typer.echo(f"{output}: set model.path to a checkpoint")
        elif model is None:
            typer.echo(f"model: {DEMO}, a toy that knows only restaurants; choose another with --model")
        typer.echo(f"next: skipdecode try {shlex.quote(str(output))}")


class Dtype(StrEnum):
    """Types of weights that `convert` can write."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="The model in one GGUF file.")],
    output: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for the checkpoint.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the written weights.")] = Dtype.BFLOAT16,
    verbose: Verbose = False,
) -> None:
    """Convert a GGUF file to a checkpoint folder: safetensors, tokenizer, chat template, generation config."""
    again = "the same command begins again"
    with command(verbose, failed=again, interrupted=again):
        typer.echo("loading transformers")
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # hides the progress bar of the GGUF reader in transformers

        import torch
        from transformers.utils.logging import disable_progress_bar

        from pipeline.checkpoints.convert import convert as write_checkpoint
        from pipeline.storage.owned_folder import local_path

        disable_progress_bar()
        write_checkpoint(model, local_path("OUT", output), getattr(torch, dtype.value), typer.echo)
    typer.echo(f"checkpoint: {output}")
