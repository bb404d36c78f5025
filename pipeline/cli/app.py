"""Defines the `skipdecode` command with its subcommands, most of which other modules define.

Each subcommand imports heavy libraries inside its function, after it has validated its configuration file.
"""

from __future__ import annotations

import gc
import locale
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import command, echo
from pipeline.cli.init import init
from pipeline.cli.learn import adapt, evaluate
from pipeline.cli.report import report
from pipeline.cli.run import plan, run, try_rows
from pipeline.cli.serve import serve
from pipeline.runtime.output import guard_output


def demo(
    folder: Annotated[Path, typer.Argument(help="Folder for the demo's prompts, job file and answers.")] = Path("demo"),
    rows: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 2000,
) -> None:
    """Answer prompts about restaurants with the included toy model, on Ray on this machine."""
    from pipeline.advise.demo_data import write_demo

    echo("the demo's model is a toy with 9 million parameters; it can answer only the demo's prompts")
    with command(verbose=False):
        job = write_demo(folder, rows)
    run(job, show=5)
    with command(verbose=False):
        _print_speedup(job)
    echo("to answer your own rows, write a job file with `skipdecode init FILE`")


def _print_speedup(path: Path) -> None:
    """Answer the demo's first prompts at full depth too, and print both times. Do nothing if the job was too short."""
    from pipeline import job as jobs
    from pipeline.answer.stats import Totals
    from pipeline.commit.sink import SUCCESS
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_config
    from pipeline.messages import LEAST_TIMED
    from pipeline.runtime.announce import announce
    from pipeline.storage.folder import open_folder, read_json

    config = load_config(JobConfig, path)
    fast = read_json(open_folder(config.output.path, config.storage), SUCCESS, Totals)
    if fast is None or fast.generate_seconds < LEAST_TIMED:
        return
    rows = max(1, round(fast.rows * LEAST_TIMED / fast.generate_seconds))
    announce(f"answering the first {rows:,} prompts at full depth, to compare the times")
    changes = ["schedule.speedup=1", f"output.path={config.output.path}-1x"]
    slow = jobs.run(load_config(JobConfig, path, changes), limit=rows, backend=jobs.ray_backend(verbose=False)).totals
    if slow.generate_seconds >= LEAST_TIMED:
        each, full = (1000 * one.generate_seconds / one.rows for one in (fast, slow))
        echo(
            f"an actor needs {each:.2f} ms for a prompt, and {full:.2f} ms at full depth: {full / each:.2f}x as fast, "
            f"timed for {fast.generate_seconds:.0f} s and {slow.generate_seconds:.0f} s"
        )


def keys(
    section: Annotated[str | None, typer.Argument(help="Section (such as input) or key to show; default: all.")] = None,
) -> None:
    """Print the type, default and meaning of configuration keys: all keys, the keys of one section, or one key."""
    with command(verbose=False):
        from pipeline.config.reference import described

        echo(described(section))


app = typer.Typer(
    name="skipdecode",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        echo(f"skipdecode {version('skipdecode')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Answer tables of prompts on Ray, with fewer layers for the later tokens of an answer (SkipDecode)."""


for function in (demo, init, run, plan, adapt, evaluate, report, serve, keys):
    app.command()(function)
app.command("try")(try_rows)


def main() -> None:
    """Run the `skipdecode` command, in Python's UTF-8 mode: job files, prompts and file names are UTF-8."""
    is_set = os.environ.get("PYTHONUTF8") == "1" or sys.flags.ignore_environment
    if locale.getpreferredencoding(False).lower() != "utf-8" and not is_set:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    guard_output()
    gc.set_threshold(100_000)  # new objects before a collection; with the default, 700, imports take a second longer
    app(prog_name="skipdecode")
