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
    """Answer the demo's prompts at its speed, at a constant depth and at full depth, by turns, and print the times.

    Do nothing if the prompts do not fill a batch, or if the user has changed the job's schedule.
    """
    from actors.generator import Generator
    from pipeline.advise.estimate import read_prompts
    from pipeline.advise.timing import time_in_parts
    from pipeline.answer.settings import fetched
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_config
    from pipeline.messages import LEAST_TIMED, counted
    from pipeline.plan.hardware import Hardware
    from pipeline.plan.job import plan
    from pipeline.prepare.prompt_spec import prompt_spec
    from pipeline.runtime.announce import announce

    job = plan(load_config(JobConfig, path), None, Hardware(), preview=True)
    manifest, schedule, batch = job.manifest, job.schedule, job.settings.max_batch
    at, kept = job.checkpoint.checkpoint.schedule, job.config.schedule.without_depths()
    schedules = {
        "1x, all layers": at({"speedup": 1.0}),
        f"{schedule.name}, falling depth": schedule,
        f"{schedule.name}, constant depth": at({**kept, "speedup": schedule.speedup, "decay": "constant"}),
    }
    if manifest.rows < batch or schedule.speedup is None or len(set(schedules.values())) < len(schedules):
        return
    spec = prompt_spec(job.config, job.checkpoint, manifest.batching.planned)
    given = read_prompts(manifest.shards, manifest.files, manifest.schema, job.config.storage, spec)
    announce(f"comparing {schedule.name} with 1x, until each has taken {LEAST_TIMED:g} s")
    one = Generator(fetched(job.settings))
    generators = {name: one.at(wanted) for name, wanted in schedules.items()}
    rows, spent = time_in_parts(generators, given, batch, LEAST_TIMED)
    threads = counted(job.settings.threads or 1, "thread")
    echo(f"the same {rows:,} prompts by turns on {threads}, the model's work alone (no start, Ray, files):")
    (name, full), *others = spent.items()
    echo(f"  {name}: {full:.1f} s")
    for name, seconds in others:
        echo(f"  {name}: {seconds:.1f} s, {full / seconds:.2f} times as fast")


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
