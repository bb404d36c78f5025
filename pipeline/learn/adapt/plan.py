"""The plan of an adaptation, validated before any model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from actors.engine.errors import UserError
from actors.engine.model.file_digests import file_digest
from actors.engine.model.speed_adapter import WEIGHTS
from actors.engine.schedule.schedule import MEASURED
from pipeline.checkpoints.resolve import ResolvedCheckpoint, resolve_checkpoint
from pipeline.config.adapt import OF_TEXTS
from pipeline.config.job import JobConfig
from pipeline.input.files import InputFile, list_input
from pipeline.learn.adapt import configs
from pipeline.learn.adapt.sample import layout
from pipeline.learn.adapt.state import StageRecord
from pipeline.learn.tune.adapters import started
from pipeline.learn.tune.workers import check_machine
from pipeline.plan.columns import check_columns
from pipeline.plan.inputs import check_output_disjoint
from pipeline.plan.manifest import ANSWERS_VERSION, pinned_snapshot, with_snapshot
from pipeline.prepare.prompt_spec import check_spec, prompt_spec
from pipeline.run.ray_session import on_cluster
from pipeline.storage.folder import filesystem
from pipeline.storage.owned_folder import check_apart

START = "adapt.adapter.start"  # key of a speed adapter to go on from


@dataclass(frozen=True)
class Task:
    """An adaptation to run. inputs: digest of the input's listing. settings: those that a stage's result depends on."""

    config: JobConfig
    source: str
    folder: Path
    resolved: ResolvedCheckpoint
    files: list[InputFile]
    schema: pa.Schema
    shape: dict[str, Any]
    inputs: str
    settings: dict[str, dict[str, Any]]

    @property
    def rows(self) -> int:
        """Rows of the job's input."""
        return sum(file.rows for file in self.files)


def plan_adaptation(config: JobConfig, source: str, folder: Path, record: StageRecord) -> Task:
    """The task of a job file. Raises UserError of one line for a mistake."""
    options = configs.options(config)
    if config.input.is_batch:
        raise UserError("input.format: openai_batch: adapt evaluates rows of one kind; give it a table of messages")
    if config.input.choices is not None:
        raise UserError("input.choices: adapt cannot evaluate rows with labels of their own; give the job's choices")
    if config.output_format is not None or config.input.output_format is not None:
        raise UserError("output_format: adapt evaluates free answers; leave it out, and add it to the job.yaml written")
    if config.input.tools is not None:
        raise UserError("input.tools: adapt evaluates free answers; give it a job of such chats without tools")
    if config.choices is not None and options.metric in (*OF_TEXTS, "fidelity"):
        raise UserError(f"adapt.metric: {options.metric} is not for labels; with choices take exact_match")
    if options.output is None and on_cluster():
        raise UserError(
            f"adapt.output: the cluster's nodes must all read and write the sample and its answers, and {folder} may "
            "be of this node alone: name a folder on a file system that they share, or unset RAY_ADDRESS"
        )
    if config.model.speed_adapter is not None:
        raise UserError("model.speed_adapter: adapt trains one for model.path; leave it out")
    configs.check_installed(config)
    check_columns(config)
    pinned = with_snapshot(config, pinned_snapshot(config, None))
    listed = list_input(pinned.input, config.storage)
    check_output_disjoint(config, listed, "adapt.output", str(folder))
    files, schema = layout(pinned, listed)
    rows = sum(file.rows for file in files)
    if rows <= options.held_out:
        raise UserError(
            f"{config.input.path[0]}: {rows} rows leave none to train on: lower adapt.held_out = {options.held_out}"
        )
    stored = record.settings("sample")
    resolved = resolve_checkpoint(config.model, config.storage, stored["model"] if stored else None)
    _check_folder(config, resolved, files, record)
    check_spec(prompt_spec(config, resolved, 0.0))
    start = options.adapter.get("start")
    stored_spec = (resolved.checkpoint if start is None else started(resolved.checkpoint, start)).spec
    shape = configs.schedule_shape(config, stored_spec)
    prompts = configs.prompt_policies(config, shape, 1.0)
    recipe = configs.tune_config(config, shape, ".", 4, folder, source, prompts)  # checks tune's options
    if record.settings("tune") is None:  # it is not done yet
        check_machine(recipe.workers)
    for speedup in options.speedups:
        order = "paper" if shape["keep_order"] == MEASURED else shape["keep_order"]
        resolved.checkpoint.schedule({"horizon": 2, **shape, "keep_order": order, "speedup": speedup})
    inputs = hashlib.sha256(repr(sorted(listed.items())).encode()).hexdigest()
    settings = _settings(config, resolved, shape)
    trained = record.settings("tune")
    if start is not None and (trained is None or START in trained):  # earlier versions recorded its path alone
        settings["tune"][START] = {"weights": file_digest(Path(start) / WEIGHTS, "sha256")}
    return Task(config, source, folder, resolved, files, schema, shape, inputs, settings)


def _check_folder(
    config: JobConfig, resolved: ResolvedCheckpoint, files: Sequence[InputFile], record: StageRecord
) -> None:
    """Raise UserError if stages could replace files that are not the adaptation's own."""
    fs, path = filesystem(config.output.path, config.storage)
    others = {"output.path": [path]} if isinstance(fs, LocalFileSystem) else {}
    others["input.path"] = [file.url for file in files if "://" not in file.url]
    if isinstance(resolved.source, str):
        others["model.path"] = [resolved.source]
    start = configs.options(config).adapter.get("start")
    if start is not None:
        others[START] = [start]
    check_apart("adapt.output", record.folder.path, others)
    record.folder.check([*configs.STAGE_FILES, configs.JOB_FILE])


def _settings(config: JobConfig, resolved: ResolvedCheckpoint, shape: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each stage, without those of earlier ones. Metric and tolerance may change at any time."""
    values = configs.options(config).model_dump()

    def chosen(*names: str) -> dict[str, Any]:
        return {"adapt": {name: values[name] for name in names}}

    actors = {"actors": config.actors.model_dump(include={"max_batch", "threads", "cache_bytes"})}
    return {
        "sample": {  # without the input's files, to which more may be added
            "input": config.input.model_dump(
                exclude={"since", "changed", "unreadable", "csv_field_bytes", "duplicate_ids"}
            ),
            "model": {**config.model.model_dump(exclude={"path", "cache", "speed_adapter"}), **resolved.identity()},
            "sampling": config.sampling.model_dump(exclude={"n"}),
            "choices": config.choices,
            "answers_version": ANSWERS_VERSION,
            **chosen("rows", "held_out", "references"),
        },
        "answers": {
            "output": {"strip": config.output.strip},
            **config.model_dump(include={"shared_prefix", "shard_rows", "shard_bytes"}),
        },
        "tune": {
            "schedule": dict(shape),
            **chosen("speedups", "prompt", "max_tokens", "loss", "weights", "adapter", "training"),
        },
        "before": actors,
        "after": {**actors, **chosen("runs")},
    }
