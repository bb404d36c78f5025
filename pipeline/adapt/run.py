"""`skipdecode adapt`: a job's own rows make its checkpoint fast for that job.

    input ──> sample ──> answers at full depth ──> tune ──> evaluate before and after ──> job file
              k rows     by the job's pipeline     on all    on the held-out rows         fastest within tolerance
                                                   but the held-out

Each stage leaves what it made in one folder; the same command again skips those that are done.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from actors.engine.schedule_file import load_spec
from pipeline import job as jobs
from pipeline.adapt import configs
from pipeline.adapt.choice import BreakEven, Measured, Quality, choose, nearest, side_by_side
from pipeline.adapt.pairs import check_metric, write_pairs
from pipeline.adapt.sample import draw, write_sample
from pipeline.adapt.setup import Task, on_cluster, plan_adaptation
from pipeline.adapt.state import StageRecord
from pipeline.checkpoints.resolve import fetch
from pipeline.commit.lease import leased
from pipeline.config.adapt import TOLERANCES
from pipeline.config.job import ActorsConfig, JobConfig
from pipeline.prepare.spec import prompt_spec
from pipeline.runtime.signals import interruptible
from pipeline.storage.folder import LocalFolder

log = logging.getLogger(__name__)
STAGES = ("sample", "answers", "tune", "before", "after")


@dataclass(frozen=True)
class Adapted:
    """What an adaptation came to.

    before, after: the job's checkpoint and the tuned one. chosen: None if no speed-up is within the tolerance;
    nearest: the one that comes closest. counts: of rows. seconds: by stage. job_file: None without a choice.
    """

    folder: Path
    metric: str
    tolerance: float
    before: list[Measured]
    after: list[Measured]
    chosen: Measured | None
    nearest: Measured
    counts: Mapping[str, int]
    seconds: Mapping[str, float]
    break_even: BreakEven | None
    job_file: Path | None


def adapt(config: JobConfig, values: Mapping[str, Any], source: str, *, verbose: bool = False) -> Adapted:
    """Adapt the job's checkpoint to its own rows and choose a speed; see the head of this file.

    values: what `config` was made of, for the job file that is written. source: its name. Raises ValueError of one
    line for what is wrong, before Ray starts and a model is loaded if it can be known then, and what `job.run`
    raises.
    """
    config = config.model_copy(update={"adapt": configs.options(config)})
    folder = configs.output_folder(config)
    stored = StageRecord(folder, STAGES)
    task = plan_adaptation(config, source, folder, stored)
    stored.check(task.settings)
    stored.folder.claim(configs.STAGE_FILES)
    with interruptible(), leased(LocalFolder(str(folder), folder)):
        record = StageRecord(folder, STAGES)  # read again: another run may have held the folder until now
        record.check(task.settings)
        return _adapt(task, values, record, verbose)


def _adapt(task: Task, values: Mapping[str, Any], record: StageRecord, verbose: bool) -> Adapted:
    config, folder = task.config, task.folder

    def run(stage: str, files: list[str], work: Any) -> dict[str, Any]:
        return record.run(stage, task.settings[stage], files, work)

    sampled = run("sample", [configs.SAMPLE], lambda: _sample(task))
    if sampled["inputs"] != task.inputs:
        log.warning("%s: not as when the sample was drawn; what is new is not sampled", ", ".join(config.input.path))
    answered = run("answers", [configs.TRAIN, configs.HELD_OUT], lambda: _answer(task, sampled["held_out"], verbose))
    counts, metric = answered["counts"], configs.metric(config)
    if config.choices is None:
        check_metric(folder, metric)
    run("tune", [f"{configs.CHECKPOINT}/tune.json"], lambda: _tune(task, counts["longest"]))
    actors = {name: getattr(config.actors, name) or answered["actors"][name] for name in ("threads", "cache_bytes")}
    actors["max_batch"] = config.rows_in_flight(task.located.checkpoint.has_pages)
    if config.paged:  # what was free for one model's cache is not free beside two
        actors["cache_bytes"] = config.actors.cache_bytes
    before = _measured(run("before", [], lambda: _evaluate(task, tuned=False, actors=actors)))
    after = _measured(run("after", [], lambda: _evaluate(task, tuned=True, actors=actors)))

    tolerance = configs.options(config).tolerance or TOLERANCES[metric]
    chosen = choose(metric, tolerance, after)
    seconds = {stage: record.seconds[stage] for stage in STAGES}
    break_even, job_file = None, folder / configs.JOB_FILE
    record.folder.discard([configs.JOB_FILE])  # of another tolerance
    if chosen is not None:
        break_even = BreakEven(
            cost=sum(seconds[stage] for stage in STAGES if stage != "before"),  # which is for the table alone
            full=next(line.seconds for line in after if line.nominal is None),
            fast=chosen.seconds,
            rows=task.rows,
            actors=_side_by_side(config.actors, actors["threads"]),
        )
        record.folder.claim([configs.JOB_FILE])
        _write_job(task, values, chosen, metric, tolerance, job_file)
    return Adapted(
        folder=folder,
        metric=metric,
        tolerance=tolerance,
        before=before,
        after=after,
        chosen=chosen,
        nearest=nearest(metric, after),
        counts={"job": task.rows, "drawn": sampled["drawn"], "unreadable": sampled["unreadable"], **counts},
        seconds=seconds,
        break_even=break_even,
        job_file=None if chosen is None else job_file,
    )


def _sample(task: Task) -> dict[str, Any]:
    given = configs.options(task.config)
    drawn = draw(task.rows, given.rows, given.seed)
    readable = write_sample(task.config, task.files, task.schema, drawn, task.folder / configs.SAMPLE)
    return {
        "inputs": task.inputs,
        "drawn": len(drawn),
        "unreadable": readable.count(False),
        "held_out": readable[: given.held_out].count(True),
    }


def _answer(task: Task, held_out: int, verbose: bool) -> dict[str, Any]:
    """Answer the sample by the job's own pipeline, and write what tune and evaluate read."""
    job = configs.full_depth_job(task.config, task.located, task.folder)
    batching = jobs.run(job, verbose=verbose).manifest.batching
    spec = prompt_spec(job, task.located, batching.planned)
    references = configs.options(task.config).references
    pairs = write_pairs(task.folder, spec, held_out, references, task.config.choices)
    return {"counts": asdict(pairs), "actors": {"threads": batching.threads, "cache_bytes": batching.cache_bytes}}


def _tune(task: Task, longest: int) -> dict[str, Any]:
    from pipeline.tune.run import tune  # torch, only after Ray has been shut down

    model = str(fetch(task.located.source))
    recipe = configs.tune_config(task.config, task.shape, model, longest, task.folder, task.source)
    with memory_given_back(), redirect_stdout(sys.stderr):  # losses are progress; what we print is the result
        return {"checkpoint": str(tune(recipe))}


def _evaluate(task: Task, *, tuned: bool, actors: Mapping[str, int | None]) -> dict[str, Any]:
    """Evaluate the job's checkpoint, or the tuned one against it, at every speed, as one actor of the job would run.

    actors: threads, bytes of cache and rows in flight of one. The job's checkpoint is timed once: its times enter no
    choice.
    """
    from pipeline.config.evaluate import EvalConfig
    from pipeline.config.load import validated
    from pipeline.evaluate import run as evaluation

    checkpoint = task.folder / configs.CHECKPOINT
    spec = load_spec(checkpoint, task.located.checkpoint.num_layers)
    assert spec is not None, "tune writes one"
    shape = {key: value for key, value in spec.to_dict().items() if key in configs.KEPT}
    original = str(fetch(task.located.source))  # a name on the hub may mean another commit by now
    values = configs.eval_values(
        task.config,
        shape,
        str(checkpoint) if tuned else original,
        original if tuned else None,
        task.folder / (configs.AFTER if tuned else configs.BEFORE),
        task.folder,
    ) | {"runs": configs.options(task.config).runs if tuned else 1, **actors}
    evaluate: Any = evaluation.evaluate
    with memory_given_back():
        found = evaluate(validated(EvalConfig, values, "adapt"))
    lines = [line for line in found.lines if line.group == "speed" or line.name == found.full_depth]
    return {
        "lines": [
            Measured(
                line.nominal,
                line.layer_ratio,
                line.seconds / found.rows,
                {name: Quality(one.value, one.loss, one.loss_high) for name, one in line.scores.items()},
            ).to_dict()
            for line in lines
        ]
    }


def _measured(stage: Mapping[str, Any]) -> list[Measured]:
    return [Measured.from_dict(line) for line in stage["lines"]]


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Free at the end what a stage held: a trainer is a reference cycle, which only the collector sees."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _side_by_side(actors: ActorsConfig, threads: int) -> float:
    if on_cluster():
        return side_by_side(actors.most, actors.gpus, threads, None, None)
    return side_by_side(actors.most, actors.gpus, threads, os.cpu_count() or 1, torch.cuda.device_count())


def _write_job(
    task: Task, values: Mapping[str, Any], chosen: Measured, metric: str, tolerance: float, path: Path
) -> None:
    assert chosen.nominal is not None
    comment = [
        f"Written by `skipdecode adapt {task.source}`: its job at the fastest speed within the tolerance.",
        f"At {chosen.nominal:g}x {metric} loses {chosen.scores[metric].loss:.3g}, at worst "
        f"{chosen.scores[metric].loss_high:.3g} of {tolerance:g}, over held-out rows of its own input.",
        f"It answers every row, those of {task.folder / configs.SAMPLE} too. skipdecode run {path}",
    ]
    model = configs.tuned_path(task.config, task.located, task.folder)
    path.write_text(configs.job_text(values, model, chosen.nominal, comment))
