"""`skipdecode adapt`: tune a job's checkpoint on some of its rows and choose a speed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.errors import BAD_CONFIG, FAILED, cause, job_errors, stop
from pipeline.cli.options import Changes, Verbose, setup


def adapt(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file; its section adapt says how.")],
    changes: Changes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Tune a job's checkpoint on some of its own rows, and write the job file of the fastest speed within tolerance.

    The same command again goes on where it stopped.
    """
    setup(verbose)
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_values, validated

    try:
        values = load_values(job, changes or [])
        config = validated(JobConfig, values, str(job))
    except ValueError as error:
        raise stop(BAD_CONFIG, str(error)) from None
    import torch
    from rich.console import Console

    from pipeline.adapt import run as adaptation
    from pipeline.adapt.report import print_adapted, to_dict, too_tight

    try:
        with job_errors(job, "the adaptation", "the same command", "goes on from the last stage", verbose):
            adapted = adaptation.adapt(config, values, str(job), verbose=verbose)
    except typer.Exit:  # a RuntimeError too
        raise
    except ImportError as error:  # of tune's or evaluate's, which are imported when their stage begins
        missing = f"{error.name or error} is not installed: pip install -c constraints.txt -e '.[tune,eval]'"
        raise stop(BAD_CONFIG, missing) from None
    except torch.OutOfMemoryError as error:
        advice = "lower adapt.training.batch_size or actors.max_batch; the same command goes on from the last stage"
        raise stop(FAILED, f"failed: {str(error).partition('. ')[0]}; {advice}") from None
    except RuntimeError as error:
        if verbose:
            logging.exception("adaptation failed")
        raise stop(FAILED, f"failed: {cause(error)}; the same command goes on from the last stage") from None
    print_adapted(Console(soft_wrap=True, stderr=as_json), adapted)
    if as_json:
        typer.echo(json.dumps(to_dict(adapted)))
    if adapted.chosen is None:
        raise stop(FAILED, too_tight(adapted))
