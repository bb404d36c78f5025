"""`skipdecode tune`: train a checkpoint for a schedule."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Changes, Verbose, command
from pipeline.runtime.announce import announce_checks


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="TUNE.yaml", help="The recipe.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Train a checkpoint for a schedule or for any speed; the same command continues an interrupted training."""
    again = "the same command goes on from the last saved step"
    with command(verbose, failed=again, interrupted=again, out_of_memory="lower training.micro_batch_tokens") as advice:
        from pipeline.config.tune import TuneConfig

        config = advice.load(TuneConfig, recipe, changes)
        announce_checks(f"reading {recipe} and its data")

        from transformers.utils.logging import disable_progress_bar

        from pipeline.learn.tune.run import tune as train

        disable_progress_bar()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = train(config)
    typer.echo(f"checkpoint: {folder}")
