"""Defines `skipdecode adapt` and `evaluate`, which train a checkpoint for schedules and measure speeds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from actors.engine.errors import UserError
from pipeline.cli.command import FAILED, Changes, JobFile, Verbose, command, echo, stop
from pipeline.runtime.announce import announce_checks


def adapt(
    job: JobFile,
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train a job's checkpoint on some of its rows, and write a job file with the fastest speed within tolerance.

    To resume an interrupted adaptation, run the same command again.
    """
    with command(
        verbose,
        output="the adaptation",
        failed="the same command resumes from the last stage",
        interrupted="the same command finishes the job",
        out_of_memory="lower adapt.training.batch_size or actors.max_batch",
    ) as advice:
        from pipeline.config.job import JobConfig
        from pipeline.config.load import load_values, validated

        values = load_values(job, changes or [])
        config = validated(JobConfig, values, str(job))
        advice.file = str(job)
        announce_checks(f"reading {job} and its data")

        from pipeline.learn.adapt import run as adaptation
        from pipeline.learn.adapt.report import print_adapted, to_dict, too_tight
        from pipeline.runtime.wide_console import wide_console

        console = wide_console(stderr=as_json)
        adapted = adaptation.adapt(config, values, str(job), verbose=verbose)
        print_adapted(console, adapted)
        if as_json:
            echo(json.dumps(to_dict(adapted)))
        if adapted.chosen is None:
            raise stop(FAILED, too_tight(adapted))


def evaluate(
    job: JobFile,
    speedups: Annotated[
        str, typer.Option(metavar="1,2,3", help="Nominal speed-ups; default: adapt.speedups, else the job's speed.")
    ] = "",
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure time and quality of a job's rows at several speeds, against adapt.references or full depth's answers."""
    again = "no result is kept; the same command starts again from the beginning"
    with command(verbose, interrupted=again, out_of_memory="lower actors.max_batch") as advice:
        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)
        try:
            asked = [float(speedup) for speedup in speedups.split(",") if speedup.strip()]
        except ValueError:
            raise UserError(f"--speedups {speedups}: must be numbers with commas between them, such as 1,2,3") from None
        announce_checks(f"reading {job} and its data")

        from transformers.utils.logging import disable_progress_bar

        from pipeline.learn.evaluate import evaluate as measure
        from pipeline.learn.score.lines import print_tables
        from pipeline.runtime.wide_console import wide_console

        disable_progress_bar()
        evaluation = measure(config, asked)
        print_tables(wide_console(stderr=as_json), evaluation)
        if as_json:
            echo(json.dumps(evaluation.to_dict()))
