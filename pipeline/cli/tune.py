"""`skipdecode tune`: train a checkpoint for a schedule."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.errors import Advice, errors_as_exit_status
from pipeline.cli.options import Changes, Verbose, setup
from pipeline.runtime.announce import announce_checks


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="TUNE.yaml", help="The recipe.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Train a checkpoint for a schedule or for any speed; the same command continues an interrupted training."""
    setup(verbose)
    again = "the same command goes on from the last saved step"
    advice = Advice(failed=again, interrupted=again, out_of_memory="lower training.micro_batch_tokens", verbose=verbose)
    with errors_as_exit_status(advice):
        from pipeline.config.load import load_config
        from pipeline.config.tune import TuneConfig

        config = load_config(TuneConfig, recipe, changes or [])
        advice.file = str(recipe)
        announce_checks(f"reading {recipe} and its data")

        from transformers.utils.logging import disable_progress_bar

        from pipeline.tune.run import tune as train

        disable_progress_bar()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = train(config)
    typer.echo(f"checkpoint: {folder}")
