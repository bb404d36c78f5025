"""The training objective, and transformers' Trainer with a schedule drawn for each step."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import get_length_grouped_indices

from actors.engine.decoder import Decoder
from actors.engine.schedule import Schedule, ScheduleSpec
from actors.engine.teacher_forcing import IGNORED, ResponseBatch, collate, response_logits
from pipeline.config.tune import LossConfig
from pipeline.runtime.announce import Timer, announce


class Teacher:
    """A full-depth model whose next-token distributions the student learns.

    decoder: frozen, or the student's own. alone: a context in which the decoder has its weights from before training,
    such as LoRA's adapters disabled.
    """

    def __init__(self, decoder: Decoder, alone: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.decoder = decoder
        self.alone = alone
        self.schedule = ScheduleSpec().build(decoder.num_layers)

    def logits(self, batch: ResponseBatch) -> Tensor:
        """[B, R + 1, V] at full depth, without gradients."""
        model = self.decoder.model
        was_training = model.training
        model.eval()  # the student's own decoder may be in training, with dropout
        try:
            with torch.no_grad(), self.alone():
                return response_logits(self.decoder, batch, self.schedule)
        finally:
            model.train(was_training)


def summed_loss(
    logits: Tensor, labels: Tensor, loss: LossConfig, smoothing: float, taught: Tensor | None
) -> tuple[Tensor, int]:
    """The objective summed over response tokens, in nats, and their number.

    logits: [B, R + 1, V], labels: [B, R + 1]. taught: the teacher's logits; KL(teacher || student) is computed at
    `loss.temperature` and scaled by its square (Hinton et al. 2015, arXiv 1503.02531).
    """
    counted = labels != IGNORED
    student = logits[counted].float()  # [N, V]
    total = student.new_zeros(())
    if loss.references > 0:
        entropy = nn.functional.cross_entropy(student, labels[counted], label_smoothing=smoothing, reduction="sum")
        total = total + loss.references * entropy
    if taught is not None:
        shared = min(student.shape[-1], taught.shape[-1])  # one of them may be padded
        teacher = (taught[counted][:, :shared].float() / loss.temperature).log_softmax(-1)
        learner = (student[:, :shared] / loss.temperature).log_softmax(-1)
        divergence = nn.functional.kl_div(learner, teacher, log_target=True, reduction="sum")
        total = total + loss.distillation * loss.temperature**2 * divergence
    return total, int(counted.sum())


class SkipTrainer(Trainer):
    """transformers' Trainer with the inference path of a schedule drawn for each step.

    schedules: by name. Every worker and micro-batch of a step has the same one.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        schedules: Mapping[str, Schedule],
        loss: LossConfig,
        teacher: Teacher | None,
        recompute: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.decoder = decoder
        self.schedules = dict(schedules)
        self.loss = loss
        self.teacher = teacher
        self.recompute = recompute
        self.model_accepts_loss_kwargs = True  # the loss is divided by the tokens of the whole step
        self._loss_shifts_labels = False

        def forward(schedule: str, **inputs: Any) -> Tensor:
            with self.accelerator.autocast():
                return response_logits(decoder, ResponseBatch(**inputs), self.schedules[schedule], recompute=recompute)

        # calls go through the model and so through its wrapper (DistributedDataParallel)
        cast(Any, self.model).forward = forward

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean objective per response token at this step's schedule: a function of seed and step alone."""
        drawn = random.Random(f"{self.args.seed}/{self.state.global_step}").choice(list(self.schedules))
        total, count = self._summed(model(schedule=drawn, **inputs), inputs, self.loss.label_smoothing)
        if num_items_in_batch is None:
            return total / count
        return total / num_items_in_batch * self.accelerator.num_processes  # workers' gradients are averaged

    def _summed(self, logits: Tensor, inputs: dict[str, Any], smoothing: float) -> tuple[Tensor, int]:
        return summed_loss(logits, inputs["labels"], self.loss, smoothing, self._taught(inputs))

    def _taught(self, inputs: dict[str, Any]) -> Tensor | None:
        if self.teacher is None:
            return None
        with self.accelerator.autocast():
            return self.teacher.logits(ResponseBatch(**inputs))

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """transformers' groups of similar lengths, but the same after a resume and in every worker."""
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(row["input_ids"]) for row in dataset]
        together = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGroups(lengths, together, lambda: 1_000_003 * self.args.seed + int(self.state.epoch or 0))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The objective on the dev set, nats per response token: at every schedule of the training, and the mean."""
        model = cast(nn.Module, self.model)
        model.eval()
        rows = cast(Any, self.eval_dataset)[self.args.process_index :: self.args.world_size]
        names = list(self.schedules)
        sums = torch.zeros(len(names), 2, dtype=torch.double, device=self.args.device)
        with torch.no_grad():
            for start in range(0, len(rows), self.args.per_device_eval_batch_size):
                batch = collate(rows[start : start + self.args.per_device_eval_batch_size])
                inputs = cast(dict[str, Any], self._prepare_inputs(batch))
                taught = self._taught(inputs)
                for index, name in enumerate(names):
                    with self.accelerator.autocast():
                        logits = response_logits(self.decoder, ResponseBatch(**inputs), self.schedules[name])
                    total, count = summed_loss(logits, inputs["labels"], self.loss, 0.0, taught)
                    sums[index] += torch.tensor([float(total), count], dtype=torch.double, device=sums.device)
        totals = self.accelerator.reduce(sums, "sum").tolist()
        losses = {f"eval_loss_{name}": total / count for name, (total, count) in zip(names, totals, strict=True)}
        losses["eval_loss"] = statistics.mean(losses.values())
        model.train()
        self.log(dict(losses))  # adds entries to its argument
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, losses)
        return losses


class StepProgress(TrainerCallback):
    """Announces the first optimizer step, and then how many are done."""

    def __init__(self) -> None:
        self._timer = Timer()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps to do."""
        self._announce(state)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps done, from time to time."""
        if self._timer.is_due():
            self._announce(state)

    def _announce(self, state: TrainerState) -> None:
        if state.is_world_process_zero:
            announce(f"training: {state.global_step:,} of {state.max_steps:,} steps")


class LengthGroups(Sampler[int]):
    """Rows in random order, those of a step of similar lengths. seed: called at the start of each epoch."""

    def __init__(self, lengths: Sequence[int], together: int, seed: Callable[[], int]) -> None:
        self.lengths = list(lengths)
        self.together = together
        self.seed = seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        random = torch.Generator().manual_seed(self.seed())
        return iter(get_length_grouped_indices(self.lengths, self.together, generator=random))
