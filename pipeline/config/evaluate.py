"""Defines evaluation files (`skipdecode evaluate`): every key, its unit and its default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from actors.engine.types import check_compatible
from pipeline.config.base import Place, Section
from pipeline.config.forms import Labels, check_labels
from pipeline.config.input import Paths
from pipeline.config.job import ModelConfig, SamplingConfig, ScheduleConfig, StorageConfig

DEPTH_KEYS = ("speedup", "max_depth", "min_depth", "depths")


class EvalDataConfig(Section):
    path: Paths = Field(description="files, folders or globs with prompts and, if available, right answers")
    prompt: str = Field("prompt", description="column with the prompts: text, or lists of token ids")
    references: str | None = Field(
        "references", description="column with right answers; null: compare answers only with those at full depth"
    )
    id: str = Field("id", description="column to copy to the answer files, if the data has this column")
    limit: int | None = Field(None, ge=1, description="maximum number of rows to read; default: all rows")


class EvalConfig(Section):
    data: EvalDataConfig
    model: ModelConfig
    reference_model: Place | None = Field(
        None, description="compare all answers with those of this checkpoint at full depth; null: those of model at 1x"
    )
    baselines: dict[str, Place] = Field(
        default_factory=dict, description="further checkpoints with the same tokenizer to evaluate, as {name: path}"
    )
    output: Place = Field(description="folder for the tables and the answers")
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="schedule; speedup, max_depth, min_depth and depths are not allowed"
    )
    speedups: list[float] = Field([1, 2, 3, 4, 5], min_length=1, description="nominal speed-ups; 1 is always included")
    prompts: list[Literal["full", "first"]] = Field(
        default_factory=list,
        description="further prompt policies (see schedule.prompt) to evaluate at every speed above 1x",
    )
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    choices: Labels | None = Field(None, description="labels as a list or .json file; every answer is one of them")
    max_batch: int = Field(64, ge=1, description="maximum number of rows in a batch")
    cache_bytes: int | None = Field(
        None, ge=1, description="bytes of the KV cache; default 1 GiB on a CPU, 8 GiB on a GPU"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; default all cores")
    runs: int = Field(1, ge=1, description="how often each speed is timed; the table shows the median")
    storage: StorageConfig = Field(default_factory=StorageConfig)

    @model_validator(mode="after")
    def _fits_together(self) -> EvalConfig:
        if self.sampling.n > 1:
            raise UserError("sampling.n: evaluate scores only one answer per row; leave it out")
        if self.sampling.logprobs is not None:
            raise UserError("sampling.logprobs: evaluate writes no log-probabilities; leave it out")
        for name in DEPTH_KEYS:
            if getattr(self.schedule, name) is not None:
                raise UserError(f"schedule.{name}: evaluate sets the depths for each of the speedups; leave it out")
        shown: dict[str, float] = {}
        for speedup in (1.0, *self.speedups):
            if shown.setdefault(f"{speedup:g}", speedup) != speedup:
                raise UserError(
                    f"speedups: {shown[f'{speedup:g}']} and {speedup} are both shown as {speedup:g}x; leave one out"
                )
        if self.choices is not None:
            check_labels(self.choices, 2)
            check_compatible("choices", self.sampling.params())
        return self
