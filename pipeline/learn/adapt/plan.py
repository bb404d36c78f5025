"""Plans and checks an adaptation before a model is loaded."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError
from actors.engine.model.file_digests import file_digest
from actors.engine.model.speed_adapter import WEIGHTS
from actors.engine.schedule.schedule import MEASURED
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.adapt import AdaptConfig
from pipeline.config.job import JobConfig
from pipeline.input.files import InputFile, list_files
from pipeline.learn.adapt.record import StageRecord
from pipeline.learn.adapt.references import first_rows, true_answers
from pipeline.learn.adapt.task import Task, spec_to_train
from pipeline.learn.rows import check_scorable, layout
from pipeline.learn.train.adapters import started
from pipeline.learn.train.recipe import context_of
from pipeline.messages import install_command
from pipeline.plan.columns import check_columns, needed_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import ANSWERS_VERSION
from pipeline.prepare.prompt_spec import check_spec, prompt_spec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.run.ray_session import on_cluster
from pipeline.runtime.announce import announce
from pipeline.storage.folder import filesystem
from pipeline.storage.local_output import check_apart, local_path

START = "adapt.adapter.start"  # config key: a speed adapter to train further


def plan_adaptation(config: JobConfig, source: str) -> tuple[Task, StageRecord]:
    """Return the adaptation to run and the record of its finished stages. Raise UserError for a mistake in the job.

    source: name of the job file.
    """
    options = config.adapt or AdaptConfig()
    config = config.model_copy(update={"adapt": options})
    above, slash, name = config.output.path.rstrip("/").rpartition("/")
    # the name has no "=", because a folder named key=value would be read as a column of the sample
    output = options.output or f"{above}{slash}{name.replace('=', '-')}-adapt"
    folder = local_path("adapt.output", output)
    record = StageRecord(folder)
    _check_job(config, options)
    if options.output is None and on_cluster():
        raise UserError(
            "adapt.output: all nodes of the cluster must read and write the adaptation's files, but "
            f"{folder} may be on this node only: name a folder on a shared file system, or unset RAY_ADDRESS"
        )
    if options.weights == "adapter" and find_spec("peft") is None:
        raise UserError(f"peft is not installed: {install_command('tune,eval')}")
    check_columns(config)
    listed = list_files(config.input.path, config.storage, config.input.format)
    check_output_disjoint(config, listed, "adapt.output", str(folder))
    files, schema = layout(config, listed)
    if (total := sum(file.rows for file in files)) <= options.held_out:
        raise UserError(
            f"{config.input.path[0]}: no row of {total} is left to train on: lower adapt.held_out = {options.held_out}"
        )
    stored, start = record.done.get("sample"), options.adapter.start
    resolved = resolve_checkpoint(config.model, config.storage, stored["settings"].get("model") if stored else None)
    fs, path = filesystem(config.output.path, config.storage)
    others = {"output.path": [path]} if isinstance(fs, LocalFileSystem) else {}
    if isinstance(resolved.source, str):
        others["model.path"] = [resolved.source]
    if start is not None:
        others[START] = [start]
    check_apart("adapt.output", folder, others)
    record.check_owner()
    spec = prompt_spec(config, resolved, 0.0)
    check_spec(spec)
    if options.responses is not None and tokenizer_of(spec.checkpoint).eos_token_id is None:
        raise UserError(f"adapt.responses: {config.model.path} has no end-of-sequence token, so it cannot learn to end")
    try:
        stored_spec = (resolved.checkpoint if start is None else started(resolved.checkpoint, start)).spec
        if "tune" not in record.done:
            context_of(resolved.checkpoint, options.adapter, options.loss.teacher)
    except UserError as error:
        raise UserError(f"adapt.{error}") from None
    inputs = hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()
    task = Task(config, source, folder, resolved, files, schema, spec_to_train(config, stored_spec), inputs)
    for variant in task.variants(task.planned_spec, 1.0):
        try:
            variant.spec.overridden({"horizon": variant.spec.horizon or 2}).build(resolved.checkpoint.num_layers)
        except UserError as error:
            raise UserError(f"schedule: {error}") from None
    if options.references is None:
        _announce_references(config, next(file for file in files if file.rows))
    return task, record


def _announce_references(config: JobConfig, file: InputFile) -> None:
    """Print a line if a column of `file` that the job does not read seems to hold true answers."""
    try:
        rows = first_rows(file, config.storage)
    except UserError:
        # no row of `file` is readable in all columns; ignore this, because the job needs only some of the columns
        return
    further = {name: values for name, values in rows.items() if name not in needed_columns(config)}
    if (right := true_answers(further, config.choices)) is not None:
        announce(
            f"column {right!r} looks like true answers: set adapt.references: {right} to choose the speed by how "
            "well the model's answers match this column; without this key, agreement with full depth decides"
        )


def _check_job(config: JobConfig, options: AdaptConfig) -> None:
    """Raise UserError for a job to which no checkpoint can be adapted."""
    check_scorable(config)
    if config.choices is not None and options.responses is not None:
        raise UserError("adapt.responses: works only for free text; leave it out, or leave choices out")
    if config.model.speed_adapter is not None:
        raise UserError("model.speed_adapter: adapt needs model.path without a speed adapter; leave this key out")


def stage_settings(task: Task) -> dict[str, dict[str, Any]]:
    """Return stage -> the settings that decide its result, except those listed for an earlier stage."""
    config, values = task.config, task.options.model_dump()

    def chosen(*names: str) -> dict[str, Any]:
        return {"adapt": {name: values[name] for name in names}}

    # the list of input files and the keys about files are not recorded, because files may be added later
    of_files = {"since", "changed", "unreadable", "csv_field_bytes"}
    model = config.model.model_dump(exclude={"path", "cache", "speed_adapter"})
    actors = {"actors": config.actors.model_dump(include={"max_batch", "threads", "cache_bytes"})}
    names = ("speedups", "prompt", "max_tokens", "loss", "weights", "adapter", "training")
    schedule = {key: value for key, value in task.spec.to_dict().items() if key not in ("power", "steps")}
    if task.spec.keep_order == MEASURED and config.schedule.warmup is None:
        del schedule["warmup"]  # it is measured too
    tune = {"schedule": schedule, **chosen(*names)}
    if (start := task.options.adapter.start) is not None:
        tune[START] = {"weights": file_digest(Path(start) / WEIGHTS, "sha256")}
    settings = {
        "sample": {
            "input": config.input.model_dump(exclude=of_files),
            "model": {**model, **task.resolved.identity()},
            "sampling": config.sampling.model_dump(exclude={"n"}),
            "choices": config.choices,
            "answers_version": ANSWERS_VERSION,
            **chosen("rows", "held_out", "references", "responses"),
        },
        "answers": {
            "output": {"strip": config.output.strip},
            **config.model_dump(include={"shared_prefix", "shard_rows", "shard_bytes"}),
        },
        "tune": tune,
        "before": actors,
        "after": {**actors, **chosen("runs")},
    }
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(settings))
    return plain
