"""`skipdecode evaluate`: measure quality and wall clock at several speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import Changes, Verbose, command
from pipeline.runtime.announce import announce_checks


def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="EVAL.yaml", help="The recipe.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Measure quality and wall clock at several speeds, against references and against full depth."""
    again = "nothing is kept, the same command starts again from the beginning"
    with command(verbose, interrupted=again, out_of_memory="lower max_batch") as advice:
        from pipeline.config.evaluate import EvalConfig

        config = advice.load(EvalConfig, recipe, changes)
        announce_checks(f"reading {recipe} and its data")

        from rich.console import Console
        from transformers.utils.logging import disable_progress_bar

        from pipeline.learn.evaluate.results import print_tables
        from pipeline.learn.evaluate.run import evaluate as measure

        disable_progress_bar()
        print_tables(Console(soft_wrap=True), measure(config))
        typer.echo(f"tables, plot and answers: {config.output}")
