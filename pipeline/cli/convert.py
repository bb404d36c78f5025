"""`skipdecode convert`: a GGUF file to a checkpoint that jobs can run."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Verbose, command


class Dtype(StrEnum):
    """Types in which a checkpoint's weights are written."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def convert(
    model: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="The model in one GGUF file.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the checkpoint.")],
    dtype: Annotated[Dtype, typer.Option(help="Type of the written weights.")] = Dtype.BFLOAT16,
    verbose: Verbose = False,
) -> None:
    """Write a GGUF file as a checkpoint: safetensors, tokenizer, chat template, generation config."""
    again = "the same command begins again"
    with command(verbose, failed=again, interrupted=again):
        typer.echo("loading transformers")
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # the bar of transformers' GGUF reader

        import torch
        from transformers.utils.logging import disable_progress_bar

        from pipeline.checkpoints.convert import convert as write_checkpoint

        disable_progress_bar()
        write_checkpoint(model, output, getattr(torch, dtype.value), typer.echo)
    typer.echo(f"checkpoint: {output}")
