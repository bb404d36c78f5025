"""`skipdecode plan`: what a job will take, from a sample of its rows."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from pipeline.cli.command import Changes, JobFile, Verbose, command


def plan(
    job: JobFile,
    changes: Changes = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Plan only the first rows of the input.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Time for the sample, all speeds together.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Predict time, device-hours and money of a job at each speed, from rows answered here. Writes no output."""
    lower = "lower actors.cache_bytes or choose model.dtype: bfloat16"
    with command(verbose, interrupted="nothing is kept", out_of_memory=lower) as advice:
        import psutil

        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)

        from pipeline.runtime.announce import announced

        with announced("loading libraries"):
            from rich.console import Console

            from pipeline.estimate import NothingLeft, estimate, print_estimate

        began = psutil.Process().create_time()
        try:
            found = estimate(config, limit=limit, process_began=began, seconds=seconds)
        except NothingLeft as nothing:
            typer.echo(json.dumps({"output": config.output.path, "rows_left": 0}) if as_json else str(nothing))
            return
        if as_json:
            typer.echo(json.dumps(found))
        else:
            print_estimate(Console(soft_wrap=True), config, found)
