"""Defines what to train and how, and checks it before weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from actors.engine.errors import UserError
from actors.engine.model.loading import Checkpoint, inspect
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from pipeline.config.adapt import AdapterConfig, LossConfig, TrainingConfig
from pipeline.learn.train.adapters import check_targets
from pipeline.prepare.tokenizer import tokenizer_of


@dataclass(frozen=True)
class Recipe:
    """What to train, and how.

    spec: schedule to store; jobs with the trained checkpoint run it by default. schedules: name -> schedule; each step
    draws some of them. adapter: None trains all weights. bf16: save in bfloat16, and compute in it (autocast) if the
    device has instructions for it; if False, save and compute in float32.
    """

    spec: ScheduleSpec
    schedules: Mapping[str, Schedule]
    loss: LossConfig
    training: TrainingConfig
    adapter: AdapterConfig | None = None
    bf16: bool = True

    def steps(self, rows: int) -> int:
        """Return the number of optimizer steps of a training on `rows` pairs."""
        by_epochs = math.ceil(math.ceil(rows / self.training.batch_size) * self.training.epochs)
        return self.training.max_steps if self.training.max_steps > 0 else by_epochs


def context_of(start: Checkpoint, adapter: AdapterConfig | None, teacher: str | None) -> int:
    """Return the largest number of tokens that the model to train and its teacher can process.

    Raises UserError if the adapter does not fit the model, or if the teacher cannot be read or has other tokens.
    """
    if adapter is not None:
        check_targets(adapter, start.config)
    if teacher is None:
        return start.context_length
    try:
        context, vocabulary = inspect(teacher).context_length, tokenizer_of(teacher).get_vocab()
    except UserError as error:
        raise UserError(f"loss.teacher: {error}") from None
    if vocabulary != tokenizer_of(str(start.path)).get_vocab():
        raise UserError(f"loss.teacher: {teacher} has another tokenizer than the model to train")
    return min(context, start.context_length)
