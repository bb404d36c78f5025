"""The command line: `skipdecode run | adapt | tune | evaluate | report`. Heavy imports wait until they are needed."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from actors.engine.errors import UserError
from pipeline.cli.errors import BAD_CONFIG, FAILED, INTERRUPTED, ROW_ERRORS, cause, job_errors, stop

app = typer.Typer(
    name="skipdecode",
    help="Answer a Parquet full of prompts with fewer layers a token: SkipDecode bulk generation on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Set = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change a key of the file. Repeatable.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show Ray's own messages and tracebacks.")]


def _setup(verbose: bool) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s" if not verbose else "%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("pipeline.plan.memory").setLevel(logging.INFO)  # one line a job, always told
    # quiet before they are imported
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not verbose:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")


@app.command()
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")],
    changes: Set = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of the input.")] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace another job's output; input.since: give up an unfinished run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Rows to print with their answers at the end.")] = 0,
    verbose: Verbose = False,
) -> None:
    """Run a bulk job; the same command again finishes it, or with input.since takes what is new."""
    _setup(verbose)
    from pipeline.config.job import JobConfig
    from pipeline.config.load import load_config

    try:
        config = load_config(JobConfig, job, changes or [])
    except ValueError as error:
        raise stop(BAD_CONFIG, str(error)) from None
    from rich.console import Console

    from pipeline import job as jobs
    from pipeline.incremental.runs import print_scheduled, scheduled_summary
    from pipeline.report.summary import last_errors, print_outcome, summary
    from pipeline.storage.folder import open_folder

    again = "the same command without --overwrite" if overwrite else "the same command"
    with job_errors(job, config.output.path, again, "goes on from the committed shards", verbose):
        if config.input.since:
            scheduled = jobs.run_since(config, limit=limit, overwrite=overwrite, verbose=verbose)
            done = [(one.folder, one.outcome) for one in scheduled.finished]
        else:
            scheduled = None
            outcome = jobs.run(config, limit=limit, overwrite=overwrite, verbose=verbose)
            done = [(open_folder(config.output.path, config.storage), outcome)]
    console = Console(soft_wrap=True, stderr=as_json)
    for folder, outcome in done:
        print_outcome(console, folder, outcome, show)
    if scheduled is not None:
        print_scheduled(console, scheduled)
    if as_json:
        values = [
            {**summary(folder, one.manifest, one.totals), "fresh_rows": one.fresh_rows, "seconds": one.seconds}
            for folder, one in done
        ]
        typer.echo(
            json.dumps(values[0] if scheduled is None else scheduled_summary(config.output.path, scheduled, values))
        )
    judged = [(outcome.totals.errors, outcome.totals.rows) for _, outcome in done]
    if scheduled is not None and scheduled.last is not None and not done:  # a retry must not turn errors into success
        last = open_folder(f"{config.output.path.rstrip('/')}/{scheduled.last.folder}", config.storage)
        judged = last_errors(last)
    for errors, rows in judged:
        if errors > config.max_row_errors * rows:
            raise stop(
                ROW_ERRORS,
                f"{errors:,} of {rows:,} rows have an error, more than max_row_errors = "
                f"{config.max_row_errors:g}; their `error` column says why",
            )


@app.command()
def adapt(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file; its section adapt says how.")],
    changes: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    verbose: Verbose = False,
) -> None:
    """Tune a job's checkpoint on some of its own rows, and write the job file of the fastest speed within tolerance.

    The same command again goes on where it stopped.
    """
    _setup(verbose)
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


@app.command()
def tune(
    recipe: Annotated[Path, typer.Argument(metavar="TUNE.yaml", help="The recipe.")],
    changes: Set = None,
    verbose: Verbose = False,
) -> None:
    """Adapt a checkpoint to a schedule or to any speed; the same command again goes on where it stopped."""
    _setup(verbose)
    from pipeline.config.load import load_config
    from pipeline.config.tune import TuneConfig

    try:
        config = load_config(TuneConfig, recipe, changes or [])
        from transformers.utils.logging import disable_progress_bar

        from pipeline.tune.run import tune as train

        disable_progress_bar()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        folder = train(config, str(recipe))
    except ImportError as error:
        raise stop(BAD_CONFIG, f"{error.name} is not installed: pip install -c constraints.txt -e '.[tune]'") from None
    except ValueError as error:
        if verbose:
            logging.exception("bad configuration or input")
        raise stop(BAD_CONFIG, f"{recipe}: {error}".replace(f"{recipe}: {recipe}: ", f"{recipe}: ")) from None
    except (OSError, RuntimeError) as error:  # such as out of memory, or a worker's end
        if verbose:
            logging.exception("training failed")
        raise stop(FAILED, f"failed: {cause(error)}; the same command goes on from the last saved step") from None
    except KeyboardInterrupt:
        raise stop(INTERRUPTED, "interrupted; the same command goes on from the last saved step") from None
    typer.echo(f"checkpoint: {folder}")


@app.command()
def evaluate(
    recipe: Annotated[Path, typer.Argument(metavar="EVAL.yaml", help="The recipe.")],
    changes: Set = None,
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
    """Quality and wall clock at several speeds, against references and against full depth."""
    _setup(verbose)
    from rich.console import Console

    from pipeline.config.evaluate import EvalConfig
    from pipeline.config.load import load_config
    from pipeline.storage.folder import STORE_ERRORS

    console = Console(soft_wrap=True)
    try:
        config = load_config(EvalConfig, recipe, changes or [])
        from transformers.utils.logging import disable_progress_bar

        from pipeline.evaluate.run import evaluate as measure
        from pipeline.evaluate.search_run import parse_goal, print_search, search_schedule
        from pipeline.evaluate.tables import print_tables

        disable_progress_bar()
        if search is not None:
            unused = [name for name in ("compare", "beside") if getattr(config, name)]
            if unused:
                typer.echo(f"--search tries schedules of model alone: {' and '.join(unused)} not used", err=True)
            outcome = search_schedule(config, str(recipe), parse_goal(search))
            print_search(console, outcome, ", ".join(config.data.path))
            if outcome.file is None:
                raise stop(FAILED, f"no schedule stays within {search}")
            return
        evaluation = measure(config, str(recipe))
    except ImportError as error:
        raise stop(BAD_CONFIG, f"{error.name} is not installed: pip install -c constraints.txt -e '.[eval]'") from None
    except ValueError as error:
        if verbose:
            logging.exception("bad configuration or input")
        raise stop(BAD_CONFIG, str(error)) from None
    except STORE_ERRORS as error:
        raise stop(FAILED, f"failed: {error}") from None
    except RuntimeError as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise stop(FAILED, "out of memory: lower max_batch") from None
    except KeyboardInterrupt:
        raise stop(INTERRUPTED, "interrupted; nothing is kept, the same command begins anew") from None
    print_tables(console, evaluation)
    typer.echo(f"tables, plot and answers: {config.output}")


@app.command()
def report(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT_URI", help="A job's output folder, or the root of scheduled runs.")
    ],
    endpoint_url: Annotated[str | None, typer.Option(help="S3 endpoint.")] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Instead: read every part, and print a line for each that is not what was committed "
            "(digest, rows, job); exit 1 if any.",
        ),
    ] = False,
) -> None:
    """Rebuild a job's statistics and summary from its commit records, finished or not, and print them.

    Of a root of scheduled runs: the ledger of its runs.
    """
    _setup(False)
    from rich.console import Console

    from pipeline.commit.records import read_records
    from pipeline.commit.verify import verify
    from pipeline.config.job import StorageConfig
    from pipeline.config.load import validated
    from pipeline.incremental.ledger import holds_ledger, print_ledger
    from pipeline.incremental.ledger import read as read_ledger
    from pipeline.plan import manifest as manifests
    from pipeline.report.summary import print_report, write_report
    from pipeline.storage.folder import STORE_ERRORS, open_folder

    try:
        folder = open_folder(output, validated(StorageConfig, {"endpoint_url": endpoint_url}, "--endpoint-url"))
        if holds_ledger(folder) and not check:
            print_ledger(Console(soft_wrap=True), read_ledger(folder))
            return
        manifest = manifests.load(folder)
        if manifest is None:
            raise UserError(f"{output}: no job here (no _job/job.json)")
        if check:
            bad = 0
            for line in verify(folder, manifest):
                typer.echo(line)
                bad += 1
            if bad:
                raise stop(FAILED, f"{output}: {bad:,} files are not as they were committed")
            typer.echo(f"{output}: every part is as it was committed")
            return
        records = read_records(folder, manifest.fingerprint)
        print_report(Console(soft_wrap=True), manifest, records, write_report(folder, manifest, records))
    except ValueError as error:
        raise stop(BAD_CONFIG, str(error)) from None
    except STORE_ERRORS as error:
        raise stop(FAILED, f"failed: {error}") from None


def main() -> None:
    """Entry point of the `skipdecode` command."""
    app(prog_name="skipdecode")
