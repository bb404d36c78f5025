"""`skipdecode adapt`: makes a job's checkpoint faster by training it on rows of the job.

    input ──> sample ──> answers at full depth ──> tune ──> evaluate before and after ──> job file
              k rows     by the job's pipeline     on all    on the held-out rows         fastest within tolerance
                                                   but the held-out

All stages write into one folder. If the command is repeated, it skips the stages that are done.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from actors.engine.schedule.file import load_spec
from pipeline import job as jobs
from pipeline.checkpoints.resolve import fetch
from pipeline.commit.lease import leased
from pipeline.config.adapt import TOLERANCES
from pipeline.config.evaluate import EvalConfig
from pipeline.config.job import JobConfig
from pipeline.config.load import validated
from pipeline.learn.adapt import configs
from pipeline.learn.adapt.choice import (
    BreakEven,
    RowCost,
    announcement,
    choose,
    full_depth,
    nearest,
    working_actors,
)
from pipeline.learn.adapt.configs import Task
from pipeline.learn.adapt.plan import STAGES, StageRecord, plan_adaptation, stage_settings
from pipeline.learn.adapt.rows import draw, metric_of, read_sample, write_pairs
from pipeline.learn.evaluate.results import Line, Scores, scores_of
from pipeline.prepare.prompt_spec import prompt_spec
from pipeline.runtime.announce import announce
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import LocalFolder
from pipeline.storage.owned_folder import replacing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapted:
    """Result of an adaptation.

    trained: name of the subfolder of `folder` with the adapter or the checkpoint. before, after: table lines of the
    job's and of the tuned checkpoint. chance: scores of answers that do not depend on their row. harmed: a warning for
    each speed that the training made worse. chosen, break_even, job_file: None if no speed-up is within the tolerance.
    nearest: see `choice.nearest`. counts: kind of rows -> number. seconds: stage -> seconds.
    """

    folder: Path
    trained: str
    metric: str
    tolerance: float
    before: list[Line]
    after: list[Line]
    chance: Scores
    harmed: list[str]
    chosen: Line | None
    nearest: Line
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    break_even: BreakEven | None
    job_file: Path | None


def adapt(config: JobConfig, values: Mapping[str, Any], source: str, *, verbose: bool = False) -> Adapted:
    """Adapt the job's checkpoint to the job's rows and choose a speed, stage by stage.

    values, source: content and name of the user's job file; the new job file is a changed copy. verbose: see
    `job.run`. Raises UserError for a mistake, if possible before Ray starts, and the errors of `job.run`.
    """
    task, stored = plan_adaptation(config, source)
    settings = stage_settings(task)
    stored.check(settings)
    stored.folder.claim(configs.STAGE_FILES)
    with interruptible(), leased(LocalFolder(str(task.folder), task.folder)):
        record = StageRecord(task.folder)  # read again: another run may have changed it before this one got the lease
        record.check(settings)
        return _adapt(task, values, record, verbose)


def _adapt(task: Task, values: Mapping[str, Any], record: StageRecord, verbose: bool) -> Adapted:
    config, folder, options, run = task.config, task.folder, task.options, record.run
    sampled = run("sample", f"draw {options.rows:,} of {task.rows:,} rows", [configs.SAMPLE], lambda: _sample(task))
    if sampled["inputs"] != task.inputs:
        log.warning("%s: changed since the sample was drawn; new rows are not sampled", ", ".join(config.input.path))
    pairs = [configs.TRAIN, configs.HELD_OUT]
    asked = sampled["drawn"] - sampled["unreadable"] if options.responses is None else sampled["held_out"]
    purpose = f"answer {asked:,} rows at full depth with {config.model.path}"
    answered = run("answers", purpose, pairs, lambda: _answer(task, sampled["held_out"], verbose))
    if "row" in answered and not record.done.keys() >= set(STAGES):
        announce(announcement(task, RowCost(**answered["row"]), record.done))
    counts = answered["counts"]
    given = {"choices": config.choices is not None, "references": options.references is not None}
    metric = metric_of(folder, options.metric, **given)
    purpose = f"train {config.model.path} on {counts['train']:,} answers"
    prompts = task.prompt_policies(answered["prompt_share"])
    tuned = run("tune", purpose, [f"{task.trained.name}/tune.json"], lambda: _tune(task, counts["longest"], prompts))
    actors = {name: getattr(config.actors, name) or answered["actors"][name] for name in ("threads", "cache_bytes")}
    actors["max_batch"] = config.rows_in_flight
    purpose = f"measure the {{}} checkpoint on {counts['held_out']:,} held-out rows"
    before = run("before", purpose.format("job's"), [], lambda: _evaluate(task, prompts, tuned=False, actors=actors))
    after = run("after", purpose.format("tuned"), [], lambda: _evaluate(task, prompts, tuned=True, actors=actors))
    lines, chance = [Line.of(line) for line in after["lines"]], scores_of(after.get("chance", {}))
    tolerance = options.tolerance or TOLERANCES[metric]
    chosen = choose(metric, tolerance, lines, chance)
    seconds = {stage: record.seconds[stage] for stage in STAGES}
    break_even, job_file = None, folder / configs.JOB_FILE
    if edited := record.is_edited(job_file):
        log.warning(
            "%s: kept, because it was changed since adapt wrote it; remove it to get the new job file", job_file
        )
    else:
        record.folder.discard([configs.JOB_FILE])  # written by an earlier run, perhaps with another tolerance

    def row_seconds(line: Line) -> float:  # the evaluation gave one answer to each row; the job gives n
        return line.seconds + (config.sampling.n - 1) * line.decode_seconds / float(counts["held_out"])

    if chosen is not None:
        break_even = BreakEven(
            cost=sum(seconds[stage] for stage in STAGES if stage != "before"),  # "before" only fills the table
            full=row_seconds(full_depth(lines)),
            fast=row_seconds(chosen),
            rows=task.rows,
            actors=working_actors(config, actors["threads"]),
        )
        if not edited:
            record.write_job(job_file, configs.job_text(task, values, chosen, metric, tolerance, job_file))
    return Adapted(
        folder=folder,
        trained=task.trained.name,
        metric=metric,
        tolerance=tolerance,
        before=[Line.of(line) for line in before["lines"]],
        after=lines,
        chance=chance,
        harmed=tuned.get("harmed", []),
        chosen=chosen,
        nearest=nearest(metric, lines, chance),
        counts={"job": task.rows, "drawn": sampled["drawn"], "unreadable": sampled["unreadable"], **counts},
        seconds=seconds,
        break_even=break_even,
        job_file=None if chosen is None else job_file,
    )


def _sample(task: Task) -> dict[str, Any]:
    drawn = draw(task.rows, task.options.rows)
    table, readable = read_sample(task.config, task.files, task.schema, drawn)
    with replacing(task.folder / configs.SAMPLE) as temporary:
        pq.write_table(table, temporary)
    return {
        "inputs": task.inputs,
        "drawn": len(drawn),
        "unreadable": readable.count(False),
        "held_out": readable[: task.options.held_out].count(True),
    }


def _answer(task: Task, held_out: int, verbose: bool) -> dict[str, Any]:
    """Answer the sample in a separate job at full depth, and write the files that tune and evaluate read."""
    asked = configs.SAMPLE
    if task.options.responses is not None:  # answer only the held-out rows: `responses` answers the others
        asked = configs.ASKED
        with replacing(task.folder / asked) as temporary:
            pq.write_table(pq.read_table(task.folder / configs.SAMPLE).slice(0, held_out), temporary)
    job = configs.full_depth_job(task.config, task.resolved, task.folder, asked)
    result = jobs.run(job, verbose=verbose)
    batching, totals = result.manifest.batching, result.totals
    for line in totals.warnings:  # signs of bad answers, which the model would learn
        log.warning("in the sample, at full depth, %s", line)
    spec = prompt_spec(job, task.resolved, batching.planned)
    counts = write_pairs(task.folder, spec, held_out, task.options, task.config.choices)
    seconds = totals.prefill_seconds + totals.decode_seconds
    sums = {
        "prompt": totals.prompt_tokens,
        "answer": totals.generated_tokens,
        "prefill_seconds": totals.prefill_seconds,
        "decode_seconds": totals.decode_seconds,
    }
    return {
        "counts": counts,
        "actors": {"threads": batching.threads, "cache_bytes": batching.cache_bytes},
        "prompt_share": totals.prefill_seconds / seconds if seconds else 0.0,
        "row": {name: total / (totals.stopped + totals.cut_off) for name, total in sums.items()},
    }


def _tune(task: Task, longest: int, prompts: Sequence[str]) -> dict[str, Any]:
    from pipeline.learn.tune.run import tune  # imported late: the training starts only after Ray has been shut down

    recipe = configs.tune_config(task, str(fetch(task.resolved.source)), longest, prompts)
    with redirect_stdout(sys.stderr):  # losses are progress, and stdout is only for the result
        folder = tune(recipe)
    return {"harmed": json.loads((folder / "tune.json").read_text()).get("harmed", [])}


def _evaluate(task: Task, prompts: Sequence[str], *, tuned: bool, actors: Mapping[str, int | None]) -> dict[str, Any]:
    """Evaluate a checkpoint at every speed. Return the lines and chance.

    tuned: whether to evaluate the trained checkpoint; if not, the job's checkpoint is evaluated.
    actors: `threads`, `cache_bytes` and `max_batch` of the job's actors, which the evaluation uses too.
    """
    from pipeline.learn.evaluate import run as evaluate_run

    spec = load_spec(task.trained, task.resolved.checkpoint.num_layers)
    assert spec is not None, "tune writes one"
    shape = {key: value for key, value in spec.to_dict().items() if key in configs.KEPT}
    model = str(fetch(task.resolved.source))  # the resolved commit, even if a branch has moved since
    values = configs.eval_values(task, model, shape, prompts, tuned=tuned) | dict(actors)
    evaluation = evaluate_run.evaluate(validated(EvalConfig, values, "adapt"))
    return {
        "lines": [asdict(replace(line, seconds=line.seconds / evaluation.rows)) for line in evaluation.lines],
        "chance": {name: asdict(score) for name, score in evaluation.chance.items()},
    }
