"""The `skipdecode` command: registers the subcommands, one module each.

A subcommand imports heavy libraries inside its function, after its configuration file has been validated.
"""

from __future__ import annotations

import gc
from importlib.metadata import version
from typing import Annotated

import typer

from pipeline.cli.adapt import adapt
from pipeline.cli.convert import convert
from pipeline.cli.evaluate import evaluate
from pipeline.cli.init import init
from pipeline.cli.plan import plan
from pipeline.cli.report import report
from pipeline.cli.run import run
from pipeline.cli.serve import serve
from pipeline.cli.try_rows import try_rows
from pipeline.cli.tune import tune

app = typer.Typer(
    name="skipdecode",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"skipdecode {version('skipdecode')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Answer tables of prompts with fewer layers per token: SkipDecode bulk generation on Ray."""


for command in (init, run, plan, adapt, tune, evaluate, report, convert, serve):
    app.command()(command)
app.command("try")(try_rows)


def main() -> None:
    """Entry point of the `skipdecode` command."""
    gc.set_threshold(100_000)  # objects; at 700, imports take a second longer
    app(prog_name="skipdecode")
