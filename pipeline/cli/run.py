"""Defines `skipdecode run` (answer all rows of a job), `try` (a few rows) and `plan` (predict time and cost)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.command import ROW_ERRORS, Changes, JobFile, LogJson, Verbose, command, echo, stop

if TYPE_CHECKING:
    from pipeline.commit.sink import Check
    from pipeline.config.job import JobConfig

log = logging.getLogger(__name__)
LOWER = "lower actors.cache_bytes or choose model.dtype: bfloat16"


def run(
    job: JobFile,
    changes: Changes = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of rows to answer, from the input's start.")] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the output of another job; with input.since: abandon an unfinished run.")
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Read and check all output files of earlier runs. Always done on a local disk.")
    ] = False,
    repair: Annotated[
        bool, typer.Option(help="Move damaged output files to _job/damaged, and answer their rows again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
    show: Annotated[int, typer.Option(min=0, help="At the end, print this many answers and their prompts' ends.")] = 0,
    log_json: LogJson = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on 127.0.0.1 for Prometheus, if the job starts its own Ray."),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Run or resume a job. With input.since, answer the new input files."""
    again = "the same command without --overwrite" if overwrite else "the same command"
    going_on = {"failed": f"{again} resumes the job", "interrupted": f"{again} finishes the job"}
    with command(verbose, log_json, **going_on) as advice:
        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)
        advice.output = config.output.path
        check: Check = "repair" if repair else "digests" if verify else "quick"
        options = {"limit": limit, "overwrite": overwrite, "check": check, "verbose": verbose}
        _run(config, metrics_port, options, as_json=as_json, show=show)


def _run(config: JobConfig, metrics_port: int | None, options: dict[str, Any], *, as_json: bool, show: int) -> None:
    from pipeline.runtime.announce import announce, announced, goes_to_log

    with announced("loading libraries"):
        import psutil

        from pipeline import job as jobs
        from pipeline import nightly
        from pipeline.commit.finalize import summary
        from pipeline.messages import one_line
        from pipeline.report.summary import last_errors, print_result
        from pipeline.run.ray_session import warn_of_short_stop
        from pipeline.runtime.wide_console import wide_console
        from pipeline.storage.folder import open_folder

    warn_of_short_stop(config.grace_seconds)
    backend = jobs.ray_backend(verbose=options["verbose"], metrics_port=metrics_port)
    if config.input.since:
        answered = nightly.run(config, **options, backend=backend)
        done = [(run.folder, run.result) for run in answered.finished]
    else:
        answered = None
        process_began = psutil.Process().create_time()
        result = jobs.run(config, **options, backend=backend, process_began=process_began)
        done = [(open_folder(config.output.path, config.storage), result)]
    # with --log-json and --json, print no tables, because all output must be JSON
    console = wide_console(stderr=as_json, quiet=as_json and goes_to_log())
    try:
        for folder, result in done:
            print_result(console, folder, result, show, config.storage)
        if answered is not None:
            nightly.print_runs(console, answered)
    except Exception as error:  # such as a store that fails: every row is accounted for, so the job has not failed
        log.warning("the result cannot be printed: %s; see `skipdecode report %s`", one_line(error), config.output.path)
    values = [
        {
            **summary(folder, result.manifest, result.totals),
            "fresh_rows": result.fresh_rows,
            "seconds": result.seconds,
        }
        for folder, result in done
    ]
    outcome = values[0] if answered is None else nightly.runs_summary(config.output.path, answered, values)
    if goes_to_log():
        announce("the job is finished", "summary", summary=outcome)
    if as_json:
        echo(json.dumps(outcome))
    errors_and_rows = [(result.totals.errors, result.totals.rows) for _, result in done]
    if answered is not None and answered.last is not None and not done:
        # if there are no new files, the row errors of the last run decide the exit status
        last = open_folder(f"{config.output.path.rstrip('/')}/{answered.last.folder}", config.storage)
        errors_and_rows = last_errors(last)
    for errors, rows in errors_and_rows:
        if errors > config.max_error_rate * rows:
            raise stop(
                ROW_ERRORS,
                f"{errors:,} of {rows:,} rows have an error, more than max_error_rate = "
                f"{config.max_error_rate:g}; the column `error` says why",
            )


def try_rows(
    job: JobFile,
    changes: Changes = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to answer, from the input's start.")] = 5,
    verbose: Verbose = False,
) -> None:
    """Answer a few rows in this process, also at full depth, and print prompts and answers. Writes no file."""
    with command(verbose, out_of_memory=LOWER) as advice:
        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)
        from pipeline.advise.try_rows import answer_first_rows, same_tokens
        from pipeline.answer.answer_checks import LEAST_TRIED, texts_of, warnings_of
        from pipeline.messages import counted, parsed_control_tokens, too_many_errors

        tried, same, tokens = answer_first_rows(config, rows, echo), 0, 0
        for row in tried:
            lines = [f"\n[{'no id' if row.id is None else row.id}]", f"  prompt: {row.prompt}" if row.prompt else ""]
            at_full_depth = {answer.sample_index: answer for answer in row.full_depth}
            for answer in row.answers:
                full = at_full_depth.get(answer.sample_index)
                if answer.error is not None:
                    lines.append(f"  error: {answer.error}")
                    continue
                name = f"answer {answer.sample_index}" if len(row.answers) > 1 else "answer"
                depth = "" if answer.mean_depth is None else f", {answer.mean_depth:.2f} layers on average"
                share = answer.choice_probability
                sure = "" if share is None else f", choice_probability {share:.2f}"
                lines += [
                    f"  {name}: {answer.generated_text}",
                    f"    ({answer.finish_reason}, {counted(answer.generated_tokens, 'token')}{depth}{sure})",
                ]
                if full is not None and full.error is None:
                    equal, longer = same_tokens(answer, full), max(answer.generated_tokens, full.generated_tokens)
                    same, tokens = same + equal, tokens + longer
                    ended = f"{full.finish_reason}, {counted(full.generated_tokens, 'token')}"
                    lines += [
                        f"  full depth's {name}: {full.generated_text}",
                        f"    ({ended}, {equal / longer:.0%} of the tokens are the same)",
                    ]
            echo("\n".join(filter(None, lines)))
        if tokens:
            echo(f"\nthe same tokens as at full depth: {same:,} of {tokens:,} ({same / tokens:.1%})")
        if parsed := sum(row.control_tokens for row in tried):
            echo(parsed_control_tokens(parsed))
        answers = [answer for row in tried for answer in row.answers]
        cut_off = sum(answer.finish_reason == "length" for answer in answers)
        failed = sum(any(answer.error is not None for answer in row.answers) for row in tried)
        too_many = too_many_errors(failed, len(tried), config.max_error_rate)
        for line in filter(None, [too_many, *warnings_of(texts_of(answers), LEAST_TRIED, cut_off)]):
            echo(f"warning: {line}")
        if all(answer.error is not None for answer in answers):
            raise stop(ROW_ERRORS, f"none of {counted(len(tried), 'row')} has an answer")


def plan(
    job: JobFile,
    changes: Changes = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to plan for, from the input's start.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Maximum seconds to answer a sample at all speeds.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: Verbose = False,
) -> None:
    """Answer a few rows, and predict a job's time, device-hours and money at each speed. Writes no output."""
    with command(verbose, interrupted="nothing is kept", out_of_memory=LOWER) as advice:
        import psutil

        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)

        from pipeline.runtime.announce import announced

        with announced("loading libraries"):
            from pipeline.advise.estimate import NothingLeft, estimate
            from pipeline.report.estimate_table import print_estimate
            from pipeline.runtime.wide_console import wide_console

        began = psutil.Process().create_time()
        try:
            found = estimate(config, limit=limit, process_began=began, seconds=seconds)
        except NothingLeft as nothing:
            echo(json.dumps({"output": config.output.path, "rows_left": 0}) if as_json else str(nothing))
            return
        if as_json:
            echo(json.dumps(found))
        else:
            print_estimate(wide_console(), found)
