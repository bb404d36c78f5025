"""Plans and checks an adaptation before a model is loaded, and keeps `adapt.json`, the record of finished stages."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from actors.engine.errors import UserError
from actors.engine.model.file_digests import file_digest
from actors.engine.model.speed_adapter import WEIGHTS
from actors.engine.schedule.schedule import MEASURED
from pipeline.checkpoints.resolve import resolve_checkpoint
from pipeline.config.adapt import OF_TEXTS, AdaptConfig
from pipeline.config.job import JobConfig
from pipeline.input.files import InputFile, list_files
from pipeline.learn.adapt import configs
from pipeline.learn.adapt.configs import Task
from pipeline.learn.adapt.references import first_rows, true_answers
from pipeline.learn.adapt.rows import layout
from pipeline.learn.tune.adapters import check_targets, started
from pipeline.learn.tune.plan import teacher_context
from pipeline.messages import install_command
from pipeline.plan.columns import check_columns, needed_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import ANSWERS_VERSION, difference
from pipeline.prepare.prompt_spec import check_spec, prompt_spec
from pipeline.prepare.tokenizer import tokenizer_of
from pipeline.run.ray_session import on_cluster
from pipeline.runtime.announce import announce
from pipeline.storage.folder import filesystem
from pipeline.storage.owned_folder import FILES, OwnedFolder, check_apart, local_path, replacing

RECORD = "adapt.json"
Stage = Literal["sample", "answers", "tune", "before", "after"]
STAGES: tuple[str, ...] = get_args(Stage)
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
    stored, start = record.done.get("sample"), options.adapter.get("start")
    resolved = resolve_checkpoint(config.model, config.storage, stored["settings"].get("model") if stored else None)
    fs, path = filesystem(config.output.path, config.storage)
    others = {"output.path": [path]} if isinstance(fs, LocalFileSystem) else {}
    if isinstance(resolved.source, str):
        others["model.path"] = [resolved.source]
    if start is not None:
        others[START] = [start]
    check_apart("adapt.output", folder, others)
    record.folder.check([*configs.STAGE_FILES, configs.JOB_FILE])
    spec = prompt_spec(config, resolved, 0.0)
    check_spec(spec)
    stored_spec = (resolved.checkpoint if start is None else started(resolved.checkpoint, start)).spec
    shape = configs.schedule_shape(config, stored_spec)
    inputs = hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()
    task = Task(config, source, folder, resolved, files, schema, shape, inputs)
    recipe = configs.tune_config(task, ".", 4, task.prompt_policies(1.0))  # checks the options of the training
    if "tune" not in record.done:
        try:
            if recipe.adapter is not None:
                check_targets(recipe.adapter, resolved.checkpoint.config)
            if recipe.loss.teacher is not None:
                teacher_context(recipe.loss.teacher, tokenizer_of(spec.checkpoint))
        except UserError as error:
            raise UserError(f"adapt.{error}") from None
    for speedup in options.speedups:
        order = "paper" if shape["keep_order"] == MEASURED else shape["keep_order"]
        resolved.checkpoint.schedule({"horizon": 2, **shape, "keep_order": order, "speedup": speedup})
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
    """Raise UserError for a job that adapt cannot evaluate."""
    if config.input.is_batch:
        raise UserError("input.format: adapt cannot evaluate openai_batch files; use a table of messages")
    if config.input.choices is not None:
        raise UserError("input.choices: adapt needs the same labels for all rows; use the key choices instead")
    if config.output_format is not None or config.input.output_format is not None:
        raise UserError("output_format: adapt evaluates only free text; remove it here, and add it to the new job.yaml")
    if config.reasoning is not None:
        raise UserError("reasoning: adapt evaluates whole answers; remove it here, and add it to the new job.yaml")
    if config.input.tools is not None:
        raise UserError("input.tools: adapt evaluates only free text; use a job with the same chats but no tools")
    if config.choices is not None and options.responses is not None:
        raise UserError("adapt.responses: works only for free text; leave it out, or leave choices out")
    if config.choices is not None and options.metric in (*OF_TEXTS, "fidelity"):
        raise UserError(f"adapt.metric: {options.metric} is not a metric for labels; with choices, use exact_match")
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
    tune = {"schedule": dict(task.shape), **chosen(*names)}
    if (start := task.options.adapter.get("start")) is not None:
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


class _Done(BaseModel):
    """A finished stage in `adapt.json`."""

    settings: dict[str, Any]
    result: dict[str, Any]


class _Values(BaseModel):
    """The contents of `adapt.json`."""

    format: Literal[3]
    done: dict[Stage, _Done]
    seconds: dict[str, float]
    job_text: str = ""


class StageRecord:
    """The finished stages in an adaptation's folder: settings, results and seconds, stored in `adapt.json`.

    If a stage runs again, later stages no longer count as finished. Raises UserError if the record cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = OwnedFolder(folder, RECORD, "adapt.output")
        self.done: dict[str, dict[str, Any]] = {}  # stage -> {"settings", "result"}
        self.seconds: dict[str, float] = {}  # stage -> seconds of all attempts together
        self.job_text = ""  # the text last written to the job file
        self.settings: Mapping[str, Mapping[str, Any]] = {}  # stage -> settings, set by `check`
        values = self.folder.values()
        if not values.keys() - {FILES}:
            return  # no record, or no finished stage in it
        try:
            read = _Values.model_validate(values).model_dump()
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise UserError(f"{folder}/{RECORD}: cannot be read: {key}: {problem['msg']}; remove the folder") from None
        self.done, self.seconds, self.job_text = read["done"], read["seconds"], read["job_text"]

    def check(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise UserError if a finished stage had other settings than `settings`. The error names the keys."""
        self.settings = settings
        names = [name for stage, done in self.done.items() for name in difference(done["settings"], settings[stage])]
        if names:
            raise UserError(
                f"{self.folder.path}: holds another adaptation, which differs in {', '.join(dict.fromkeys(names))}; "
                "remove the folder, or choose another adapt.output"
            )

    def run(self, stage: str, purpose: str, files: Sequence[str], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of `stage`. Call `work` to compute it, unless the stage is done and its `files` exist.

        purpose: text that is announced before `work` is called. The stage's seconds include failed attempts.
        """
        if stage in self.done and all((self.folder.path / name).exists() for name in files):
            return dict(self.done[stage]["result"])
        number = STAGES.index(stage)
        for later in STAGES[number:]:
            self.done.pop(later, None)
        announce(f"stage {number + 1} of {len(STAGES)}: {purpose}")
        began = time.monotonic()
        try:
            self.done[stage] = json.loads(json.dumps({"settings": self.settings[stage], "result": work()}))
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - began
            self._save()
        gc.collect()  # a trainer has reference cycles; the next stage needs its memory
        torch.cuda.empty_cache()
        return dict(self.done[stage]["result"])

    def is_edited(self, job_file: Path) -> bool:
        """Return whether `job_file` has been changed since `write_job` wrote it."""
        return bool(self.job_text) and job_file.exists() and job_file.read_text() != self.job_text

    def write_job(self, job_file: Path, text: str) -> None:
        """Record the text of the job file, and write the file. A file that a killed run has not written is missing."""
        self.folder.claim([job_file.name])
        self.job_text = text
        self._save()
        with replacing(job_file) as temporary:
            temporary.write_text(text)

    def _save(self) -> None:
        values = {"format": 3, "done": self.done, "seconds": self.seconds, "job_text": self.job_text}
        self.folder.save(values)
