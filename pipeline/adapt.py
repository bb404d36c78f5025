"""`skipdecode adapt`: a job's own rows make its checkpoint fast for that job.

    input ──> sample ──> answers at full depth ──> tune ──> evaluate before and after ──> job file
              k rows     by the job's pipeline     on all    on the held-out rows         fastest within tolerance
                                                   but the held-out

Each stage leaves what it made in one folder; the same command again skips those that are done.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from actors.engine.schedule_file import load_spec
from pipeline import adapt_configs as configs
from pipeline import job as jobs
from pipeline.adapt_choice import BreakEven, Measured, Quality, choose, nearest
from pipeline.adapt_pairs import to_dict, write_pairs
from pipeline.adapt_record import Record
from pipeline.adapt_sample import draw, layout, write_sample
from pipeline.checkpoints import Located, fetch, locate
from pipeline.columns import check_columns
from pipeline.config import JobConfig
from pipeline.config_adapt import TOLERANCES
from pipeline.lease import interruptible, leased
from pipeline.manifest import check_apart
from pipeline.prepare import check_spec, prompt_spec
from pipeline.source import Files, InputFile, list_files
from pipeline.storage import LocalFolder

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


@dataclass(frozen=True)
class _Task:
    """One adaptation, looked through and ready to begin. settings: what each stage hangs on."""

    config: JobConfig
    source: str
    folder: Path
    located: Located
    files: list[InputFile]
    schema: Any
    shape: dict[str, Any]
    settings: dict[str, dict[str, Any]]

    @property
    def rows(self) -> int:
        """Of the job's input."""
        return sum(file.rows for file in self.files)


def adapt(config: JobConfig, values: Mapping[str, Any], source: str, *, verbose: bool = False) -> Adapted:
    """Adapt the job's checkpoint to its own rows and choose a speed; see the head of this file.

    values: what `config` was made of, for the job file that is written. source: its name. Raises ValueError of one
    line for what is wrong, before Ray starts and a model is loaded if it can be known then, and what `job.run`
    raises.
    """
    config = config.model_copy(update={"adapt": configs.options(config)})
    folder = configs.output_folder(config)
    stored = Record(folder, STAGES)
    task = _look_through(config, source, folder, stored)
    stored.check(task.settings)
    with interruptible(), leased(LocalFolder(str(folder), folder)):
        record = Record(folder, STAGES)  # anew: until now another run may have held the folder
        record.check(task.settings)
        return _adapt(task, values, record, verbose)


def _look_through(config: JobConfig, source: str, folder: Path, record: Record) -> _Task:
    """All that can be wrong without a model."""
    given = configs.options(config)
    if config.input.choices is not None:
        raise ValueError("input.choices: adapt cannot evaluate rows with labels of their own; give the job's choices")
    configs.check_installed(config)
    check_columns(config)
    listed = list_files(config.input.path, config.storage)
    check_apart(config, listed, "adapt.output", str(folder))
    files, schema = layout(config, listed)
    rows = sum(file.rows for file in files)
    if rows <= given.held_out:
        raise ValueError(
            f"{config.input.path[0]}: {rows} rows leave none to train on beside adapt.held_out = {given.held_out}"
        )
    stored = record.settings("sample")
    located = locate(config.model, config.storage, stored["model"] if stored else None)
    check_spec(prompt_spec(config, located, 0.0))
    shape = configs.schedule_shape(config, located.checkpoint.spec)
    configs.tune_config(config, shape, ".", 4, folder, source)  # options of tune's are looked at now
    for speedup in given.speedups:
        located.checkpoint.schedule({"horizon": 2, **shape, "speedup": speedup})
    return _Task(config, source, folder, located, files, schema, shape, _settings(config, located, shape, listed))


def _settings(
    config: JobConfig, located: Located, shape: Mapping[str, Any], listed: Files
) -> dict[str, dict[str, Any]]:
    """What each stage hangs on, beside those before it. The metric and the tolerance can be changed at any time."""
    inputs = hashlib.sha256(repr(sorted(listed.items())).encode())
    options = configs.options(config).model_dump()

    def chosen(*names: str) -> dict[str, Any]:
        return {"adapt": {name: options[name] for name in names}}

    return {
        "sample": {
            "input": {**config.input.model_dump(exclude={"since", "changed"}), "files": inputs.hexdigest()},
            "model": {**config.model.model_dump(exclude={"path", "cache"}), **located.identity()},
            "sampling": config.sampling.model_dump(exclude={"n"}),
            "choices": config.choices,
            "version": version("skipdecode"),
            **chosen("rows", "held_out", "references", "seed"),
        },
        "answers": {},
        "tune": {"schedule": dict(shape), **chosen("speedups", "max_tokens", "loss", "lora", "training")},
        "before": chosen("runs"),
        "after": chosen("runs"),
    }


def _adapt(task: _Task, values: Mapping[str, Any], record: Record, verbose: bool) -> Adapted:
    config, folder = task.config, task.folder

    def run(stage: str, files: list[str], work: Any) -> dict[str, Any]:
        return record.run(stage, task.settings[stage], files, work)

    sampled = run("sample", [configs.SAMPLE], lambda: _sample(task))
    pairs = run("answers", [configs.TRAIN, configs.HELD_OUT], lambda: _answer(task, sampled["held_out"], verbose))
    run("tune", [f"{configs.CHECKPOINT}/tune.json"], lambda: _tune(task, pairs["longest"]))
    before = _measured(run("before", [], lambda: _evaluate(task, None)))
    after = _measured(run("after", [], lambda: _evaluate(task, config.model.path)))

    metric = configs.metric(config)
    for lines in (before, after):
        if metric not in lines[0].scores:
            raise ValueError(f"adapt.metric: {metric} is not measured on these rows; {', '.join(lines[0].scores)} are")
    tolerance = configs.options(config).tolerance or TOLERANCES[metric]
    chosen = choose(metric, tolerance, after)
    counts = {"job": task.rows, "drawn": sampled["drawn"], "unreadable": sampled["unreadable"], **pairs}
    seconds = {stage: record.seconds[stage] for stage in STAGES}
    break_even, job_file = None, folder / configs.JOB_FILE
    job_file.unlink(missing_ok=True)  # of another tolerance
    if chosen is not None:
        original = next(line for line in after if line.nominal is None)
        break_even = BreakEven(sum(seconds.values()), original.seconds, chosen.seconds, task.rows)
        _write_job(task, values, chosen, metric, tolerance, job_file)
    return Adapted(
        folder=folder,
        metric=metric,
        tolerance=tolerance,
        before=before,
        after=after,
        chosen=chosen,
        nearest=nearest(metric, after),
        counts=counts,
        seconds=seconds,
        break_even=break_even,
        job_file=None if chosen is None else job_file,
    )


def _sample(task: _Task) -> dict[str, Any]:
    given = configs.options(task.config)
    drawn = draw(task.rows, given.rows, given.seed)
    readable = write_sample(task.config, task.files, task.schema, drawn, task.folder / configs.SAMPLE)
    return {
        "drawn": len(drawn),
        "unreadable": readable.count(False),
        "held_out": readable[: given.held_out].count(True),
    }


def _answer(task: _Task, held_out: int, verbose: bool) -> dict[str, Any]:
    """Answer the sample by the job's own pipeline, and write what tune and evaluate read."""
    job = configs.full_depth_job(task.config, task.folder)
    outcome = jobs.run(job, verbose=verbose)
    spec = prompt_spec(job, task.located, outcome.manifest.batching.planned)
    return to_dict(write_pairs(task.folder, spec, held_out, configs.options(task.config).references))


def _tune(task: _Task, longest: int) -> dict[str, Any]:
    from pipeline.tune import tune  # torch, only after Ray has been shut down

    model = str(fetch(task.located.source))
    recipe = configs.tune_config(task.config, task.shape, model, longest, task.folder, task.source)
    with redirect_stdout(sys.stderr):  # losses are progress; what we print ourselves is the result
        return {"checkpoint": str(tune(recipe, task.source))}


def _evaluate(task: _Task, reference: str | None) -> dict[str, Any]:
    """Evaluate the job's checkpoint, or with a reference the tuned one against it, at every speed."""
    from pipeline import evaluate as evaluation
    from pipeline.config_evaluate import EvalConfig
    from pipeline.config_file import validated

    tuned = task.folder / configs.CHECKPOINT
    spec = load_spec(tuned, task.located.checkpoint.num_layers)
    assert spec is not None, "tune writes one"
    shape = {key: value for key, value in spec.to_dict().items() if key in configs.KEPT}
    model = task.config.model.path if reference is None else str(tuned)
    output = task.folder / (configs.BEFORE if reference is None else configs.AFTER)
    values = configs.eval_values(task.config, shape, model, reference, output, task.folder)
    evaluate: Any = evaluation.evaluate
    found = evaluate(validated(EvalConfig, values, f"{task.source}: adapt"), task.source)
    lines = [line for line in found.lines if line.group == "speed" or line.name == found.full_depth]
    return {
        "lines": [
            {
                "nominal": line.nominal,
                "layer_ratio": line.layer_ratio,
                "seconds": line.seconds / found.rows,
                "scores": {
                    name: asdict(Quality(score.value, score.loss, score.loss_high))
                    for name, score in line.scores.items()
                },
            }
            for line in lines
        ]
    }


def _measured(stage: Mapping[str, Any]) -> list[Measured]:
    return [
        Measured(
            line["nominal"],
            line["layer_ratio"],
            line["seconds"],
            {name: Quality(**score) for name, score in line["scores"].items()},
        )
        for line in stage["lines"]
    ]


def _write_job(
    task: _Task, values: Mapping[str, Any], chosen: Measured, metric: str, tolerance: float, path: Path
) -> None:
    assert chosen.nominal is not None
    comment = [
        f"Written by `skipdecode adapt {task.source}`: its job at the fastest speed within the tolerance.",
        f"At {chosen.nominal:g}x {metric} loses {chosen.scores[metric].loss:.3g}, at worst "
        f"{chosen.scores[metric].loss_high:.3g} of {tolerance:g}, over held-out rows of its own input.",
        f"It answers every row, those of {task.folder / configs.SAMPLE} too. skipdecode run {path}",
    ]
    model = configs.tuned_path(task.config, task.folder)
    path.write_text(configs.job_text(values, model, chosen.nominal, comment))
