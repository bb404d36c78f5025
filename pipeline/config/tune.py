"""Defines training files (`skipdecode tune`): every key, its unit and its default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import Decay, KeepOrder
from pipeline.config.base import Place, Section
from pipeline.config.forms import Labels
from pipeline.config.input import Paths
from pipeline.config.job import ScheduleConfig

RANK = 32  # default rank of a speed adapter


class TuneModelConfig(Section):
    path: Place = Field(description="checkpoint folder to start from")


class TuneDataConfig(Section):
    train: Paths = Field(description="files, folders or globs (see input.path) with prompts and responses to train on")
    dev: Paths = Field(description="files, folders or globs (see input.path) with the dev set's prompts and responses")
    prompt: str = Field("prompt", description="column with the prompts")
    train_reference: str = Field(
        "reference", description="column of data.train with the responses: a string, or a list of strings"
    )
    dev_reference: str = Field(
        "references", description="column of data.dev with the responses: a string, or a list of strings"
    )
    ended: str | None = Field(
        None, description="boolean column; false: the row's response was cut off, so the model does not learn its end"
    )
    collapse_whitespace: bool = Field(False, description="replace each run of white space in a response by one space")
    choices: Labels | None = Field(None, description="labels as a list or .json file; every response is one of them")
    dev_rows: int = Field(256, ge=2, description="pairs (prompt and response) to take evenly from data.dev")
    max_tokens: int = Field(256, ge=4, description="maximum tokens of prompt plus response; longer pairs are left out")


class TuneScheduleConfig(Section):
    speedups: list[float] = Field(
        [1.0], min_length=1, description="nominal speed-ups to train; each step draws one or more of them"
    )
    also: list[ScheduleConfig] = Field(
        default_factory=list, description="other schedules to train; each sets only keys that differ from this section"
    )
    default: float | None = Field(None, description="nominal speed-up of jobs that set none; default: last of speedups")
    horizon: int | None = Field(
        None, ge=2, description="generated tokens over which depth falls; default: median length of the responses"
    )
    decay: Decay = Field("linear", description="curve along which depth falls; default: as in the start checkpoint")
    warmup: int = Field(
        1, ge=0, description="number of lowest layers that always run; default: as in the start checkpoint, or measured"
    )
    keep_order: KeepOrder | list[int] = Field(
        "paper",
        description="order of layers, the most needed first. measured: the order is measured with the start weights "
        "on training pairs. Default: as in the start checkpoint",
    )
    prompt: Literal["full", "first"] = Field(
        "full",
        description="layers that process prompts. full: all layers; first: only the layers of generated token 0; "
        "default: as in the start checkpoint",
    )


class LossConfig(Section):
    """The training objective: a weighted sum of loss terms, summed over all response tokens."""

    references: float = Field(1.0, ge=0, description="weight of the cross-entropy loss on the responses in the data")
    distillation: float = Field(0.0, ge=0, description="weight of the KL divergence from the teacher at full depth")
    temperature: float = Field(1.0, gt=0, description="temperature of teacher and student in the KL divergence")
    teacher: Place | None = Field(None, description="checkpoint with the same tokenizer; default: the start weights")
    teacher_top_k: int = Field(64, ge=1, description="number of likeliest teacher tokens; all others count as one")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of probability to spread evenly over all tokens")

    @model_validator(mode="after")
    def _some(self) -> LossConfig:
        if self.references == self.distillation == 0:
            raise UserError("references and distillation are both 0: the loss has no terms; raise one")
        if self.references == 0 and self.label_smoothing > 0:
            raise UserError("label_smoothing has no effect while references is 0: leave label_smoothing out")
        if self.teacher is not None and self.distillation == 0:
            raise UserError("teacher has no effect while distillation is 0: raise distillation")
        return self


class AdapterConfig(Section):
    """A speed adapter: low-rank weights beside the frozen model. One adapter is trained for all speeds above 1x."""

    start: Place | None = Field(None, description="speed adapter to train further, with its rank, alpha and targets")
    rank: int | None = Field(None, ge=1, description=f"rank of the low-rank matrices; default {RANK}")
    alpha: int | None = Field(None, ge=1, description="adapter outputs are scaled by alpha / rank; default 2 × rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the adapter's input while training")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="ends of the names of linear layers that get an adapter, such as q_proj; default: all linear "
        "layers inside decoder layers",
    )

    @model_validator(mode="after")
    def _of_start(self) -> AdapterConfig:
        given = [name for name in ("rank", "alpha", "targets") if getattr(self, name) is not None]
        if self.start is not None and given:
            raise UserError(f"adapter.{given[0]} is set by adapter.start: leave it out")
        return self


class TrainingConfig(Section):
    epochs: float = Field(1.0, gt=0, description="passes over the training pairs")
    max_steps: int = Field(-1, description="number of optimizer steps; -1: as many as the epochs need")
    batch_size: int = Field(64, ge=1, description="training pairs per optimizer step")
    speeds_per_step: int = Field(
        1, ge=1, description="number of schedules drawn for each step; they share one forward pass over the prompts"
    )
    prompt_gradient: bool = Field(
        True,
        description="whether gradients flow through all prompt tokens; false: only through each prompt's last token",
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum tokens to compute at once. Default on a CPU: as many as fit in 3 GiB of "
        "activations; on a GPU: as many as fit in a quarter of its memory",
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate; it falls to zero along a cosine")
    warmup_steps: int = Field(50, ge=0, description="optimizer steps over which the learning rate rises to its peak")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW, applied to matrices only")
    bf16: bool = Field(
        True,
        description="save weights in bfloat16, and compute in it (autocast) if the device has instructions for it; "
        "false: save and compute in float32",
    )
    seed: int = Field(0, ge=0, description="seed for initial weights, the order of pairs, and the drawn speeds")
    eval_steps: int = Field(200, ge=1, description="steps between dev-set loss measurements, at most 1/10 of all steps")
    save_steps: int = Field(200, ge=1, description="optimizer steps between two checkpoints to resume from")
    early_stopping: int | None = Field(
        None, ge=1, description="stop if the dev-set loss has not improved in this many measurements; default: never"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; default: all cores")


class TuneConfig(Section):
    model: TuneModelConfig
    data: TuneDataConfig
    output: Place = Field(description="folder for the checkpoint or speed adapter; subfolder _training is for resuming")
    schedule: TuneScheduleConfig = Field(default_factory=TuneScheduleConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    adapter: AdapterConfig | None = Field(None, description="train a speed adapter instead of all weights")
    training: TrainingConfig = Field(default_factory=TrainingConfig)
