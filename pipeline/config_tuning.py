"""Tune files as pydantic models: every key, its unit and its default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config import Decay, KeepOrder, Paths, Section


class TuneModelConfig(Section):
    path: str | None = Field(None, description="checkpoint folder to start from")
    new: dict[str, Any] | None = Field(
        None, description="from scratch: model_type and the keys of its Hugging Face config, but vocab_size"
    )
    vocab_size: int = Field(2048, ge=300, description="entries of the byte-level BPE trained for a new model")

    @model_validator(mode="after")
    def _start(self) -> TuneModelConfig:
        if (self.path is None) == (self.new is None):
            raise ValueError("give path (a checkpoint) or new (sizes), one of them")
        if self.new is not None and "model_type" not in self.new:
            raise ValueError("new needs model_type, for example llama")
        return self


class TuneDataConfig(Section):
    train: Paths = Field(description="Parquet files with prompts and references")
    dev: Paths = Field(description="Parquet files for the dev-set loss")
    prompt: str = Field("prompt", description="prompt column")
    train_reference: str = Field("reference", description="column: a string, or a list of strings")
    dev_reference: str = Field("references", description="column: a string, or a list of strings")
    dev_rows: int = Field(256, ge=1, description="pairs of the dev set, evenly spread")
    max_tokens: int = Field(256, ge=4, description="tokens of prompt and response; longer pairs are left out")


class TuneScheduleConfig(Section):
    speedups: list[float] = Field([1.0], min_length=1, description="nominal; one is drawn for each batch")
    default: float | None = Field(None, description="nominal speed-up that jobs use unless they say; default the last")
    horizon: int | None = Field(None, ge=2, description="tokens; default the median response of the training data")
    decay: Decay = Field("linear", description="shape of the fall")
    warmup: int = Field(1, ge=1, description="lowest layers that always run")
    keep_order: KeepOrder | list[int] = Field("paper", description="layers, most needed first")
    prompt: Literal["full", "first"] = Field("full", description="layers run over the prompt")


class TrainingConfig(Section):
    epochs: float = Field(1.0, gt=0, description="passes over the training pairs")
    max_steps: int = Field(-1, description="optimizer steps; -1: by epochs")
    batch_size: int = Field(64, ge=1, description="pairs a step")
    learning_rate: float = Field(1e-3, gt=0, description="peak; cosine to zero after the warm-up")
    warmup_steps: int = Field(50, ge=0, description="optimizer steps over which the rate rises")
    weight_decay: float = Field(0.01, ge=0, description="AdamW")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="probability mass spread over the vocabulary")
    bf16: bool = Field(True, description="autocast to bfloat16")
    seed: int = Field(0, ge=0, description="initial weights, order of pairs, drawn speeds")
    eval_steps: int = Field(200, ge=1, description="optimizer steps between dev-set losses")
    save_steps: int = Field(200, ge=1, description="optimizer steps between checkpoints to resume from")
    threads: int | None = Field(None, ge=1, description="torch threads; default all cores")


class TuneConfig(Section):
    model: TuneModelConfig
    data: TuneDataConfig
    output: str = Field(description="folder for the tuned checkpoint; resumable state in its _training folder")
    schedule: TuneScheduleConfig = Field(default_factory=TuneScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
