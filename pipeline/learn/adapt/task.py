"""Describes an adaptation: the job, the schedules to train and score, and the files of its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import MEASURED, Schedule, ScheduleSpec
from pipeline.checkpoints.resolve import ResolvedCheckpoint
from pipeline.config.adapt import AdaptConfig, AdapterConfig
from pipeline.config.job import DEPTH_KEYS, JobConfig
from pipeline.input.files import InputFile
from pipeline.learn.speeds import UNIFORM, Variant, variants
from pipeline.learn.train.recipe import Recipe

NOT_TRAINED_FOR = {"power": "power", "steps": "step"}  # schedule key that adapt cannot change -> the decay that uses it
SAMPLE, ASKED, ANSWERS, TRAIN = "sample.parquet", "asked.parquet", "full-depth", "train.parquet"
DEV, HELD_OUT = "dev.parquet", "held-out.parquet"  # DEV chooses the best training step, HELD_OUT the speed
CHECKPOINT, ADAPTER, JOB_FILE = "checkpoint", "speed-adapter", "job.yaml"
BEFORE, AFTER = "before.parquet", "after.parquet"  # answers to the held-out rows before and after the training
PROMPT_SHARE = 1 / 3  # prompts that take more of a job's time limit speed-ups to 3x, so `prompt: first` is tried too


@dataclass(frozen=True)
class Task:
    """An adaptation to run.

    source: name of the job file. files, schema: files and columns of the input. spec: schedule to train for, without
    depths; see `spec_to_train`. inputs: digest of the list of input files.
    """

    config: JobConfig
    source: str
    folder: Path
    resolved: ResolvedCheckpoint
    files: list[InputFile]
    schema: pa.Schema
    spec: ScheduleSpec
    inputs: str

    @property
    def options(self) -> AdaptConfig:
        """The job's `adapt` section, or its defaults."""
        return self.config.adapt or AdaptConfig()

    @property
    def adapter(self) -> AdapterConfig | None:
        """Settings of the speed adapter to train; None if all weights are trained."""
        return self.options.adapter if self.options.weights == "adapter" else None

    @property
    def trained(self) -> Path:
        """The folder that training writes."""
        return self.folder / (CHECKPOINT if self.adapter is None else ADAPTER)

    @property
    def rows(self) -> int:
        """Number of rows of the job's input."""
        return sum(file.rows for file in self.files)

    @property
    def planned_spec(self) -> ScheduleSpec:
        """The schedule to train for, in any order of layers if the order is still to be measured."""
        return replace(self.spec, keep_order="paper") if self.spec.keep_order == MEASURED else self.spec

    def variants(self, spec: ScheduleSpec, prompt_share: float) -> list[Variant]:
        """Return the schedules to score: `spec` at 1x and at each speed-up, with each prompt policy to try.

        If prompts run only some layers, a uniform schedule is tried too: it is slower for late tokens, but faster for
        prompts, and any engine runs it at full speed. prompt_share: share of the job's time at full depth that is spent
        on prompts.
        """
        asked = self.options.prompt
        policies: list[str] = [spec.prompt if asked == "auto" else asked]
        prompts_count = asked == "auto" and prompt_share >= PROMPT_SHARE and self.config.schedule.prompt is None
        policies += ["first"] if prompts_count and spec.prompt != "first" else []
        further: list[dict[str, Any]] = [{"prompt": policy} for policy in policies[1:]]
        further += [UNIFORM] if "first" in policies else []
        return variants(spec.overridden({"prompt": policies[0]}), sorted({1.0, *self.options.speedups}), further)

    def schedules(self, found: Sequence[Variant]) -> dict[str, Schedule]:
        """Return name -> schedule to train for, of the variants `found`. An adapter is not trained at full depth."""
        layers = self.resolved.checkpoint.num_layers
        built = {one.name: one.spec.build(layers) for one in found if one.nominal in self.options.speedups}
        unique = {str(schedule.to_dict()): name for name, schedule in reversed(built.items())}
        return {
            name: schedule
            for name, schedule in built.items()
            if name in unique.values() and not (self.adapter is not None and schedule.is_full_depth)
        }

    def recipe(self, spec: ScheduleSpec, schedules: Mapping[str, Schedule]) -> Recipe:
        """Return what to train, and how. spec, schedules: see `Recipe`."""
        options, bf16 = self.options, self.config.model.dtype != "float32"
        return Recipe(spec, schedules, options.loss, options.training, self.adapter, bf16)


def spec_to_train(config: JobConfig, stored: ScheduleSpec | None) -> ScheduleSpec:
    """Return the schedule to train for, without depths. Keys that the job leaves out come from `stored`.

    stored: the checkpoint's schedule. If neither the job nor `stored` sets a layer order (keep order), the order is
    measured. Raises UserError if the job changes a key that adapt cannot train for.
    """
    start = stored or ScheduleSpec(keep_order=MEASURED)
    spec = start.overridden(config.schedule.without_depths())
    for key, decay in NOT_TRAINED_FOR.items():
        if spec.decay == decay and getattr(spec, key) != getattr(start, key):
            raise UserError(f"schedule.{key}: adapt can only train for {getattr(start, key)}; leave this key out")
    none = dict.fromkeys(DEPTH_KEYS)
    return replace(spec, **none, power=start.power, steps=start.steps)  # type: ignore[arg-type]
