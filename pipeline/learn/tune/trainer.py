"""transformers' Trainer with schedules drawn for each step, and each prompt computed once for all of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_pt_utils import get_length_grouped_indices

from actors.engine.decoder import Decoder
from actors.engine.library.forcing import Pair, micro_batches, predicting_states, response_labels
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from pipeline.config.tune import LossConfig
from pipeline.learn.tune.objective import Targets, chunks, dev_loss, summed_loss
from pipeline.messages import duration
from pipeline.runtime.announce import Timer, announce

KEY = "key"  # of a pair: its distributions of the teacher are kept under it


class Teacher:
    """A full-depth model whose next-token distributions the student learns.

    Args:
        decoder: frozen, or the student's own.
        loss: what is kept of a distribution.
        vocabulary: entries of the student's.
        alone: a context in which the decoder has its weights from before training, such as LoRA's adapters disabled.
    """

    def __init__(
        self,
        decoder: Decoder,
        loss: LossConfig,
        vocabulary: int,
        alone: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.decoder = decoder
        self.loss = loss
        self.vocabulary = vocabulary
        self.alone = alone
        self.schedule = ScheduleSpec().build(decoder.num_layers)
        self._kept: dict[Any, Targets] = {}
        self._new: list[tuple[Any, Targets]] = []  # kept since the last exchange

    def targets(self, pairs: Sequence[Pair]) -> Targets:
        """Distributions of the pairs' response tokens; those of a pair with a key are computed once."""
        known = {id(pair): self._kept[pair[KEY]] for pair in pairs if pair.get(KEY) in self._kept}
        missing = [pair for pair in pairs if id(pair) not in known]
        if missing:
            found = self._computed(missing)
            known |= {id(pair): targets for pair, targets in zip(missing, found, strict=True)}
            self._keep([(pair[KEY], targets) for pair, targets in zip(missing, found, strict=True) if KEY in pair])
        return Targets.joined([known[id(pair)] for pair in pairs]).to(self.decoder.device)

    def exchange(self, gather: Callable[[list[Any]], list[Any]]) -> None:
        """Keep what all workers computed since the last call: a pair comes to another worker in the next epoch.

        gather: the lists of all workers, joined; each of them calls it.
        """
        found, self._new = gather(self._new), []
        self._kept |= dict(found)

    def _keep(self, found: Sequence[tuple[Any, Targets]]) -> None:
        self._kept |= dict(found)
        self._new += found

    def _computed(self, pairs: Sequence[Pair]) -> list[Targets]:
        model = self.decoder.model
        was_training = model.training
        model.eval()  # the student's own decoder may be in training, with dropout
        try:
            with torch.no_grad(), self.alone():
                (states,) = predicting_states(self.decoder, pairs, [self.schedule])
                parts = [
                    Targets.of(self.decoder.logits(states[chunk]), self.loss, self.vocabulary).to("cpu")
                    for chunk in chunks(len(states), self.decoder.vocab_size)
                ]
        finally:
            model.train(was_training)
        whole, first, found = Targets.joined(parts), 0, []
        for pair in pairs:
            last = first + len(pair["input_ids"]) - pair["prompt_tokens"]
            found.append(whole[first:last].copied())
            first = last
        return found


def collate_pairs(pairs: Sequence[Pair]) -> dict[str, Any]:
    """A step's pairs as they are; the Trainer counts predicted tokens by `labels`."""
    return {"pairs": list(pairs), "labels": response_labels(pairs)}


class SkipTrainer(Trainer):
    """transformers' Trainer with the inference path of schedules drawn for each step.

    Args:
        decoder: of the model, with the attention of `packed_attention`.
        schedules: by name. Every worker and micro-batch of a step has the same ones.
        together: most schedules of a step; all of them run the same layers over prompts.
        loss: the objective.
        teacher: of the distillation.
        tokens: most tokens of a micro-batch.
        prompt_gradient, recompute: see `predicting_states`.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        schedules: Mapping[str, Schedule],
        together: int,
        loss: LossConfig,
        teacher: Teacher | None,
        tokens: int,
        prompt_gradient: bool,
        recompute: bool,
        callbacks: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        self.progress = StepProgress()
        super().__init__(callbacks=[self.progress, *callbacks], **kwargs)
        self.decoder = decoder
        self.schedules = dict(schedules)
        self.together = together
        self.loss = loss
        self.teacher = teacher
        self.tokens = tokens
        self.model_accepts_loss_kwargs = True  # the loss is divided by the tokens of the whole step
        self._loss_shifts_labels = False

        def forward(pairs: Sequence[Pair], names: Sequence[str]) -> Tensor:
            drawn = [self.schedules[name] for name in names]
            with self.accelerator.autocast():
                states = predicting_states(
                    decoder, pairs, drawn, prompt_gradient=prompt_gradient, recompute=recompute
                ).flatten(0, 1)
                labels, targets = self._expected(pairs, len(drawn))
                return summed_loss(decoder, states, labels, targets, loss, loss.label_smoothing)

        # calls go through the model and so through its wrapper (DistributedDataParallel)
        cast(Any, self.model).forward = forward

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Gradients of the mean objective per response token and schedule of this step, in micro-batches."""
        model.train()
        names = self.drawn(self.state.global_step)
        assert num_items_in_batch is not None
        # workers' gradients are averaged
        scale = self.accelerator.num_processes / (float(num_items_in_batch) * len(names))
        batches = list(micro_batches(inputs["pairs"], len(names), self.tokens))
        total = torch.zeros((), device=self.args.device)
        for number, pairs in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(model):
                loss = model(pairs=pairs, names=names) * scale
                self.accelerator.backward(loss)
            total += loss.detach()
        if self.teacher is not None and self.accelerator.num_processes > 1:
            self.teacher.exchange(gather_object)
        self.progress.loss = total
        return total

    def drawn(self, step: int) -> list[str]:
        """Names of a step's schedules: a function of seed and step alone."""
        draw = random.Random(f"{self.args.seed}/{step}")
        first = draw.choice(list(self.schedules))
        prompt_layers = self.schedules[first].prompt_layers
        others = [
            name
            for name, schedule in self.schedules.items()
            if name != first and schedule.prompt_layers == prompt_layers
        ]
        return [first, *draw.sample(others, min(self.together - 1, len(others)))]

    def _expected(self, pairs: Sequence[Pair], schedules: int) -> tuple[Tensor, Targets | None]:
        """Labels and the teacher's distributions of the pairs' response tokens, once for each schedule."""
        labels = response_labels(pairs).to(self.decoder.device).repeat(schedules)
        if self.teacher is None:
            return labels, None
        return labels, Targets.joined([self.teacher.targets(pairs)] * schedules)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        """transformers' groups of similar lengths, but the same after a resume and in every worker."""
        dataset: Any = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(row["input_ids"]) for row in dataset]
        together = self.args.train_batch_size * self.args.world_size
        return LengthGroups(lengths, together, lambda: 1_000_003 * self.args.seed + int(self.state.epoch or 0))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The objective on the dev set, nats per response token: at every schedule of the training, and the mean."""
        model = cast(nn.Module, self.model)
        model.eval()
        rows: Sequence[Pair] = cast(Any, self.eval_dataset)[self.args.process_index :: self.args.world_size]
        names = list(self.schedules)
        sums = torch.zeros(len(names), 2, dtype=torch.double, device=self.args.device)
        timer, done = Timer(), 0
        for start in range(0, len(rows), self.args.per_device_eval_batch_size):
            if timer.is_due() and self.is_world_process_zero():
                announce(f"dev set at {len(names)} schedules: {done:,} of {len(rows):,} rows")
            for pairs in micro_batches(
                rows[start : start + self.args.per_device_eval_batch_size], len(names), 2 * self.tokens
            ):
                for index, summed, tokens in self._dev_losses(pairs):
                    sums[index] += torch.tensor([summed, tokens], dtype=torch.double, device=sums.device)
                done += len(pairs)
        totals = self.accelerator.reduce(sums, "sum").tolist()
        means = {f"eval_loss_{name}": total / count for name, (total, count) in zip(names, totals, strict=True)}
        means["eval_loss"] = statistics.mean(means.values())
        model.train()
        self.log(dict(means))  # adds entries to its argument
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, means)
        return means

    @torch.no_grad()
    def _dev_losses(self, pairs: Sequence[Pair]) -> Iterable[tuple[int, float, int]]:
        """Return for each schedule its index, its summed loss of the pairs' response tokens, and their number."""
        together: dict[tuple[int, ...], list[int]] = {}
        schedules = list(self.schedules.values())
        for index, schedule in enumerate(schedules):
            together.setdefault(schedule.prompt_layers, []).append(index)
        found: list[tuple[int, float, int]] = []
        with self.accelerator.autocast():
            labels, targets = self._expected(pairs, 1)
            for indexes in together.values():
                states = predicting_states(self.decoder, pairs, [schedules[index] for index in indexes])
                for index, hidden in zip(indexes, states, strict=True):
                    summed = dev_loss(self.decoder, hidden, labels, targets, self.loss)
                    found.append((index, float(summed), len(labels)))
        return found


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


class StepProgress(TrainerCallback):
    """Announces the steps to do, the first step, and then from time to time how many are done.

    loss: of the latest step, nats per response token; set by the trainer.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self._timer = Timer()
        self._began = 0.0
        self._first = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps to do."""
        self._began, self._first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            announce(f"training: {state.global_step:,} of {state.max_steps:,} steps")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Announce the steps done."""
        done = state.global_step - self._first
        if (self._timer.is_due() or done == 1) and state.is_world_process_zero:
            each = (time.monotonic() - self._began) / done
            left = duration(each * (state.max_steps - state.global_step))
            loss = "" if self.loss is None else f"; loss {float(self.loss):.3f}"
            announce(
                f"training: {state.global_step:,} of {state.max_steps:,} steps, {each:.2g} s a step, "
                f"about {left} left{loss}"
            )
