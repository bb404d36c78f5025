"""Defines `skipdecode adapt`, `tune` and `evaluate`, which train a checkpoint for schedules and measure speeds."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Annotated

import typer

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


def tune(
    recipe: Annotated[Path, typer.Argument(metavar="TUNE.yaml", help="The training file.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Train a checkpoint for one or more schedules. To resume interrupted training, run the same command again."""
    again = "the same command resumes from the last saved step"
    with command(verbose, failed=again, interrupted=again, out_of_memory="lower training.micro_batch_tokens") as advice:
        from pipeline.config.tune import TuneConfig

        config = advice.load(TuneConfig, recipe, changes)
        announce_checks(f"reading {recipe} and its data")

        from transformers.utils.logging import disable_progress_bar

        from pipeline.learn.tune.run import tune as train

        disable_progress_bar()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = train(config)
    echo(f"checkpoint: {folder}")


def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="EVAL.yaml", help="The evaluation file.")],
    changes: Changes = None,
    verbose: Verbose = False,
) -> None:
    """Measure time and quality at several speeds. Compare answers with references and with full depth's answers."""
    again = "no result is kept; the same command starts again from the beginning"
    with command(verbose, interrupted=again, out_of_memory="lower max_batch") as advice:
        from pipeline.config.evaluate import EvalConfig

        config = advice.load(EvalConfig, recipe, changes)
        announce_checks(f"reading {recipe} and its data")

        from transformers.utils.logging import disable_progress_bar

        from pipeline.learn.evaluate.results import print_tables
        from pipeline.learn.evaluate.run import evaluate as measure
        from pipeline.runtime.wide_console import wide_console

        disable_progress_bar()
        print_tables(wide_console(), measure(config))
        echo(f"tables and answers: {config.output}")
