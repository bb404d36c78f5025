"""The `skipdecode` command: registers the subcommands, one module each.

A subcommand imports heavy libraries inside its function, after its configuration file has been validated.
"""

from __future__ import annotations

import typer

from pipeline.cli.adapt import adapt
from pipeline.cli.convert import convert
from pipeline.cli.evaluate import evaluate
from pipeline.cli.report import report
from pipeline.cli.run import run
from pipeline.cli.try_rows import try_rows
from pipeline.cli.tune import tune

app = typer.Typer(
    name="skipdecode",
    help="Answer Parquet files of prompts with fewer layers per token: SkipDecode bulk generation on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (run, adapt, tune, evaluate, report, convert):
    app.command()(command)
app.command("try")(try_rows)


def main() -> None:
    """Entry point of the `skipdecode` command."""
    app(prog_name="skipdecode")
