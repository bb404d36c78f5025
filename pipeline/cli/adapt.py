"""`skipdecode adapt`: tune a job's checkpoint on some of its rows and choose a speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.command import FAILED, Changes, Verbose, command, stop
from pipeline.runtime.announce import announce_checks


def adapt(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.yaml", help="The job file; its section adapt holds the settings.")
    ],
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Tune a job's checkpoint on some of its rows, and write a job file with the fastest speed within tolerance.

    The same command continues an interrupted adaptation.
    """
    with command(
        verbose,
        output="the adaptation",
        failed="the same command goes on from the last stage",
        interrupted="the same command finishes the job",
        out_of_memory="lower adapt.training.batch_size or actors.max_batch",
    ) as advice:
        from pipeline.config.job import JobConfig
        from pipeline.config.load import load_values, validated

        values = load_values(job, changes or [])
        config = validated(JobConfig, values, str(job))
        advice.file = str(job)
        announce_checks(f"reading {job} and its data")

        from rich.console import Console

        from pipeline.learn.adapt import run as adaptation
        from pipeline.learn.adapt.report import print_adapted, to_dict, too_tight

        adapted = adaptation.adapt(config, values, str(job), verbose=verbose)
        print_adapted(Console(soft_wrap=True, stderr=as_json), adapted)
        if as_json:
            typer.echo(json.dumps(to_dict(adapted)))
        if adapted.chosen is None:
            raise stop(FAILED, too_tight(adapted))
