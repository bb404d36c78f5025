"""`skipdecode evaluate`: measure quality and wall clock at several speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.errors import FAILED, Advice, errors_as_exit_status, stop
from pipeline.cli.options import Changes, Verbose, setup
from pipeline.runtime.announce import announce_checks


def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="EVAL.yaml", help="The recipe.")],
    changes: Changes = None,
    search: Annotated[
        str | None,
        typer.Option(
            metavar="tolerance=0.5",
            help="On dev data: find the cheapest schedule within a loss, by the metric that the data allows or "
            "metric=bleu,tolerance=0.5, and write it as skipdecode.json.",
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Measure quality and wall clock at several speeds, against references and against full depth."""
    setup(verbose)
    advice = Advice(
        interrupted="nothing is kept, the same command starts again from the beginning",
        out_of_memory="lower max_batch",
        verbose=verbose,
    )
    with errors_as_exit_status(advice):
        from pipeline.config.evaluate import EvalConfig
        from pipeline.config.load import load_config

        config = load_config(EvalConfig, recipe, changes or [])
        advice.file = str(recipe)
        announce_checks(f"reading {recipe} and its data")

        from rich.console import Console
        from transformers.utils.logging import disable_progress_bar

        from pipeline.evaluate.results import print_tables
        from pipeline.evaluate.run import evaluate as measure
        from pipeline.evaluate.search import parse_goal, print_search, search_schedule

        console = Console(soft_wrap=True)
        disable_progress_bar()
        if search is not None:
            unused = [name for name in ("compare", "baselines") if getattr(config, name)]
            if unused:
                typer.echo(f"--search tries schedules of model alone: {' and '.join(unused)} not used", err=True)
            found = search_schedule(config, parse_goal(search))
            print_search(console, found, ", ".join(config.data.path))
            if found.file is None:
                raise stop(FAILED, f"no schedule stays within {search}")
            return
        print_tables(console, measure(config))
        typer.echo(f"tables, plot and answers: {config.output}")
