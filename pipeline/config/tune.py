"""Tune files as pydantic models: every key, its unit and its default."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from actors.engine.errors import UserError
from pipeline.config.base import Place, Section
from pipeline.config.forms import Labels
from pipeline.config.input import Paths
from pipeline.config.job import Decay, KeepOrder, ScheduleConfig

RANK = 32  # default rank of a speed adapter


class TuneModelConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "new": (None, "make a checkpoint with random weights, for example by configs/demo/new_model.py; give path"),
        "vocab_size": (2048, "leave it out"),
    }

    path: Place = Field(description="checkpoint folder to start from")


class TuneDataConfig(Section):
    train: Paths = Field(description="files, folders or globs as of input.path, with prompts and references")
    dev: Paths = Field(description="the same for the dev-set loss")
    prompt: str = Field("prompt", description="prompt column")
    train_reference: str = Field("reference", description="column: a string, or a list of strings")
    dev_reference: str = Field("references", description="column: a string, or a list of strings")
    ended: str | None = Field(
        None, description="column of booleans: false for a response that was cut off: no end is learned from it"
    )
    collapse_whitespace: bool = Field(False, description="replace each run of white space in a response by one space")
    choices: Labels | None = Field(None, description="labels, or a .json file of them; every response is one")
    dev_rows: int = Field(256, ge=2, description="pairs of the dev set, evenly spaced over its files")
    max_tokens: int = Field(256, ge=4, description="tokens of prompt and response; longer pairs are left out")


class TuneScheduleConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "compare": (None, "list the schedules in schedule.also"),
        "learned_order": (None, "set schedule.keep_order, or list the order in schedule.also"),
    }

    speedups: list[float] = Field([1.0], min_length=1, description="nominal; one is drawn for each batch")
    also: list[ScheduleConfig] = Field(
        default_factory=list, description="further schedules: keys on top of this section's"
    )
    default: float | None = Field(None, description="nominal speed-up of jobs without one; default the last")
    horizon: int | None = Field(None, ge=2, description="tokens; default the median response of the training data")
    decay: Decay = Field("linear", description="shape of the depth curve; default, as below: the start checkpoint's")
    warmup: int = Field(1, ge=0, description="lowest layers that always run; default with measured: by the order")
    keep_order: KeepOrder | list[int] = Field(
        "paper", description="layers, most needed first; measured: on the start weights and training pairs"
    )
    prompt: Literal["full", "first"] = Field("full", description="layers that run over the prompt")


class LossConfig(Section):
    """Weights of the terms of the objective, which is summed over response tokens."""

    references: float = Field(1.0, ge=0, description="cross-entropy on the data's responses")
    distillation: float = Field(0.0, ge=0, description="KL divergence from the teacher at full depth")
    temperature: float = Field(1.0, gt=0, description="of both distributions in the divergence")
    teacher: Place | None = Field(None, description="checkpoint with the same tokenizer; default the start weights")
    teacher_top_k: int = Field(64, ge=1, description="likeliest tokens of the teacher; all others count as one")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="probability spread over the vocabulary")

    @model_validator(mode="after")
    def _some(self) -> LossConfig:
        if self.references == self.distillation == 0:
            raise UserError("references and distillation are both 0: there is nothing to learn from; raise one")
        if self.references == 0 and self.label_smoothing > 0:
            raise UserError("label_smoothing needs cross-entropy, and references is 0: leave it out")
        if self.teacher is not None and self.distillation == 0:
            raise UserError("teacher has no effect while distillation is 0: raise distillation")
        return self


class AdapterConfig(Section):
    """A speed adapter: low-rank weights beside the frozen model, for speeds above 1x, which are all trained at once."""

    start: Place | None = Field(None, description="speed adapter to go on from, with its rank, alpha and targets")
    rank: int | None = Field(None, ge=1, description=f"columns of each low-rank matrix; default {RANK}")
    alpha: int | None = Field(None, ge=1, description="its product is scaled by alpha / rank; default twice the rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="on an adapter's input, while training")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="linear layers by their last name, such as q_proj; default all of the decoder layers",
    )

    @model_validator(mode="after")
    def _of_start(self) -> AdapterConfig:
        given = [name for name in ("rank", "alpha", "targets") if getattr(self, name) is not None]
        if self.start is not None and given:
            raise UserError(f"adapter.{given[0]} is that of adapter.start: leave it out")
        return self


class TrainingConfig(Section):
    removed: ClassVar[dict[str, tuple[Any, str]]] = {"compile": (False, "leave it out")}

    epochs: float = Field(1.0, gt=0, description="passes over the training pairs")
    max_steps: int = Field(-1, description="optimizer steps; -1: by epochs")
    batch_size: int = Field(64, ge=1, description="pairs a step, over all workers and micro-batches")
    speeds_per_step: int = Field(1, ge=1, description="schedules drawn for a step that share their passes over prompts")
    prompt_gradient: bool = Field(
        True,
        description="learn from the prompts' part in each loss; false: from prompts' last tokens and responses alone",
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="most tokens computed at once, by each worker; default as many as 3 GiB of activations allow, "
        "shared by the workers, on a GPU a quarter of its memory",
    )
    checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory, more time")
    learning_rate: float = Field(1e-3, gt=0, description="peak; cosine to zero after the warm-up")
    warmup_steps: int = Field(50, ge=0, description="optimizer steps over which the rate rises")
    weight_decay: float = Field(0.01, ge=0, description="AdamW")
    bf16: bool = Field(
        True,
        description="save bfloat16 weights, and compute in bfloat16 (autocast) where the device has instructions for "
        "it; false: float32 for both",
    )
    seed: int = Field(0, ge=0, description="initial weights, order of pairs, drawn speeds")
    eval_steps: int = Field(200, ge=1, description="optimizer steps between dev-set losses; at most a tenth of all")
    save_steps: int = Field(200, ge=1, description="optimizer steps between checkpoints to resume from")
    early_stopping: int | None = Field(
        None, ge=1, description="dev-set losses without improvement before training stops"
    )
    threads: int | None = Field(None, ge=1, description="torch threads; default all cores, or workers.cpus")


class WorkersConfig(Section):
    """Data parallel training in processes of this machine; each worker holds the model."""

    removed: ClassVar[dict[str, tuple[Any, str]]] = {
        "address": (None, "workers are processes of one machine: run the command on the machine that has the GPUs")
    }

    count: int = Field(ge=1, description="processes")
    gpus: Literal[0, 1] = Field(0, description="GPUs a worker")
    cpus: float = Field(1, gt=0, description="CPUs a worker")


class TuneConfig(Section):
    renamed: ClassVar[dict[str, str]] = {"lora": "adapter, which writes a speed adapter; nothing is merged when saved"}

    model: TuneModelConfig
    data: TuneDataConfig
    output: Place = Field(description="folder for the checkpoint or speed adapter; resumable state in its _training")
    schedule: TuneScheduleConfig = Field(default_factory=TuneScheduleConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    adapter: AdapterConfig | None = Field(None, description="train a speed adapter instead of all weights")
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    workers: WorkersConfig | None = Field(None, description="train in several processes")

    @model_validator(mode="after")
    def _fits(self) -> TuneConfig:
        workers = self.workers.count if self.workers else 1
        if self.training.batch_size % workers:
            raise UserError(
                f"training.batch_size = {self.training.batch_size} cannot be cut into {workers} equal parts, "
                "one for each of the workers"
            )
        return self
