"""The training loop. Each step draws one or more schedules, and runs each prompt only once for all of them."""

from __future__ import annotations

import math
import random
import statistics
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.torch.forcing import Pair, micro_batches, predicting_states, response_labels
from pipeline.config.adapt import LossConfig
from pipeline.learn.train.objective import Targets, chunks, dev_loss, summed_loss
from pipeline.learn.train.recipe import Recipe
from pipeline.messages import duration
from pipeline.runtime.announce import Timer, announce
from pipeline.storage.local_output import replacing

KEY = "key"  # column that identifies a pair; the teacher's distributions for the pair are cached under this key
LOSS = "eval_loss"  # name of the dev-set loss, mean over schedules; `eval_loss_2x` is the loss of schedule 2x
MAX_NORM = 1.0  # gradients with a larger norm are scaled down to this norm
BEST, STATE_FILE = "best.pt", "state.pt"


@dataclass
class Teacher:
    """A full-depth model whose next-token distributions the student learns.

    Args:
        decoder: A frozen decoder, or the student's decoder.
        loss: Section `adapt.loss`, with the temperature and the number of stored entries per distribution.
        vocabulary: Size of the student's vocabulary.
        alone: Returns a context manager. If `decoder` is the student's, the context restores the start weights, for
            example by disabling the adapters.
    """

    decoder: Decoder
    loss: LossConfig
    vocabulary: int
    alone: Callable[[], AbstractContextManager[Any]] = nullcontext
    _kept: dict[Any, Targets] = field(default_factory=dict)

    def targets(self, pairs: Sequence[Pair]) -> Targets:
        """Return the teacher's distributions for the response tokens of `pairs`. Cache them for pairs with a key."""
        known = {id(pair): self._kept[pair[KEY]] for pair in pairs if pair.get(KEY) in self._kept}
        missing = [pair for pair in pairs if id(pair) not in known]
        if missing:
            found = self._computed(missing)
            known |= {id(pair): targets for pair, targets in zip(missing, found, strict=True)}
            self._kept |= {pair[KEY]: targets for pair, targets in zip(missing, found, strict=True) if KEY in pair}
        return Targets.joined([known[id(pair)] for pair in pairs]).each(lambda values: values.to(self.decoder.device))

    def _computed(self, pairs: Sequence[Pair]) -> list[Targets]:
        model = self.decoder.model
        was_training = model.training
        model.eval()  # switches dropout off: the model may be the student, in training mode
        try:
            with torch.no_grad(), self.alone():
                (states,) = predicting_states(self.decoder, pairs, [ScheduleSpec().build(self.decoder.num_layers)])
                parts = [
                    Targets.of(self.decoder.logits(states[chunk]), self.loss, self.vocabulary).each(Tensor.cpu)
                    for chunk in chunks(len(states), self.decoder.vocab_size)
                ]
        finally:
            model.train(was_training)
        whole, lengths = Targets.joined(parts), (len(pair["input_ids"]) - pair["prompt_tokens"] for pair in pairs)
        return [whole[first:last] for first, last in pairwise(accumulate(lengths, initial=0))]


class Training:
    """State of a training: the model, the current step, and the losses so far.

    Args:
        model: Model to train; only weights that require gradients change.
        decoder: Decoder of `model`, with the attention of `packed_attention`.
        recipe: Schedules and settings. All micro-batches of a step use the same schedules.
        rows, dev: Pairs to train on, and pairs on which the loss is measured.
        teacher: Teacher for the distillation; None: no distillation.
        folder: Folder of the best weights, and of the state to resume from.
        tokens: Maximum number of tokens of a micro-batch.
        bf16: Whether to compute in bfloat16, with autocast.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: Decoder,
        recipe: Recipe,
        rows: Sequence[Pair],
        dev: Sequence[Pair],
        teacher: Teacher | None,
        folder: Path,
        *,
        tokens: int,
        bf16: bool,
    ) -> None:
        self.model, self.decoder, self.schedules = model, decoder, dict(recipe.schedules)
        self.settings, self.loss, self.teacher, self.tokens = recipe.training, recipe.loss, teacher, tokens
        self.bf16, self.folder = bf16, folder
        self.steps = recipe.steps(len(rows))
        once = self.steps * self.settings.batch_size <= len(rows)  # no pair is trained on twice: nothing to cache
        self.train = rows if once else _with_keys(rows, "train")
        self.dev = _with_keys(dev, "dev")
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        matrices = [one for one in self.weights.values() if one.ndim > 1]
        vectors = [one for one in self.weights.values() if one.ndim <= 1]
        decays = ((matrices, self.settings.weight_decay), (vectors, 0.0))
        groups: list[dict[str, Any]] = [{"params": some, "weight_decay": decay} for some, decay in decays if some]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
        self._order: tuple[int, list[int]] = (-1, [])  # number of the current epoch, and the row numbers in its order
        self.step, self.began_at = 0, 0
        self.dev_losses: list[dict[str, float]] = []

    def run(self) -> None:
        """Train from the last saved step to the end, or until the dev-set loss is NaN or infinite."""
        every, patience = min(self.settings.eval_steps, math.ceil(self.steps / 10)), self.settings.early_stopping
        self._resume()
        if not self.dev_losses:
            self.evaluate()
        announce(f"training: {self.step:,} of {self.steps:,} steps")
        began, timer = time.monotonic(), Timer()
        while (
            self.step < self.steps
            and (patience is None or self._since_best() < patience)
            and math.isfinite(self.dev_losses[-1][LOSS])
        ):
            loss = self._step()
            self.step += 1
            if timer.is_due() or self.step == self.began_at + 1:
                each = (time.monotonic() - began) / (self.step - self.began_at)
                announce(
                    f"training: {self.step:,} of {self.steps:,} steps, {duration(each)} a step, about "
                    f"{duration(each * (self.steps - self.step))} left; loss {float(loss):.3f}"
                )
            if self.step % every == 0 or self.step == self.steps:
                self.evaluate()
            if self.step % self.settings.save_steps == 0 or self.step == self.steps:
                self._save(STATE_FILE)

    def load_best(self) -> dict[str, float]:
        """Load the weights with the lowest dev-set loss into the model. Return their step and dev-set losses."""
        found = self._load(BEST)
        self._set_weights(found["weights"])
        losses: dict[str, float] = found["dev_losses"][-1]
        return losses

    def _step(self) -> Tensor:
        """Train on the batch of one step. Return the mean objective over response tokens and schedules."""
        pairs, names = self._pairs(), self.drawn(self.step)
        torch.manual_seed(self.settings.seed + self.step)  # dropout does not depend on whether the training was resumed
        self.model.train()
        count = len(response_labels(pairs)) * len(names)
        total = torch.zeros((), device=self.decoder.device)
        for batch in micro_batches(pairs, len(names), self.tokens):
            loss = self._objective(batch, names) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.weights.values(), MAX_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate(self.step, self.settings.warmup_steps, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _pairs(self) -> list[Pair]:
        """Return the next step's pairs."""
        size = self.settings.batch_size
        epoch, place = divmod(self.step, math.ceil(len(self.train) / size))
        if self._order[0] != epoch:
            lengths = [len(row["input_ids"]) for row in self.train]
            self._order = epoch, by_length(lengths, size, f"{self.settings.seed}/{epoch}")
        return [self.train[row] for row in self._order[1][place * size : (place + 1) * size]]

    def _objective(self, pairs: Sequence[Pair], names: Sequence[str]) -> Tensor:
        """Return the differentiable objective of `pairs`, summed over response tokens and the schedules `names`."""
        drawn = [self.schedules[name] for name in names]
        keep = {"prompt_gradient": self.settings.prompt_gradient, "recompute": self.settings.checkpointing}
        with self._autocast():
            states = predicting_states(self.decoder, pairs, drawn, **keep).flatten(0, 1)
            labels, targets = self._expected(pairs, len(drawn))
            return summed_loss(self.decoder, states, labels, targets, self.loss, self.loss.label_smoothing)

    def drawn(self, step: int) -> list[str]:
        """Draw the schedules to train at `step`; return their names. All of them run the same layers over prompts."""
        draw = random.Random(f"{self.settings.seed}/{step}")
        first = draw.choice(list(self.schedules))
        layers = self.schedules[first].prompt_layers
        others = [name for name, one in self.schedules.items() if name != first and one.prompt_layers == layers]
        wanted = (self.settings.speeds_per_step or len(self.schedules)) - 1
        return [first, *draw.sample(others, min(wanted, len(others)))]

    def _expected(self, pairs: Sequence[Pair], schedules: int) -> tuple[Tensor, Targets | None]:
        """Return labels and teacher's distributions of `pairs`' response tokens, both repeated `schedules` times."""
        labels = response_labels(pairs).to(self.decoder.device).repeat(schedules)
        if self.teacher is None:
            return labels, None
        return labels, Targets.joined([self.teacher.targets(pairs)] * schedules)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure each schedule's dev-set loss in nats per token. Save the weights if the mean is a new minimum."""
        self.model.eval()
        names, size, timer = list(self.schedules), self.settings.batch_size, Timer()
        rows, sums = self.dev, torch.zeros(len(names) + 1, dtype=torch.double)
        for start in range(0, len(rows), size):
            if timer.is_due():
                announce(f"dev set with {len(names)} schedules: {start:,} of {len(rows):,} rows done")
            for pairs in micro_batches(rows[start : start + size], len(names), 2 * self.tokens):
                sums += torch.tensor(self._dev_losses(pairs), dtype=torch.double)
        *totals, count = sums.tolist()
        means = {f"{LOSS}_{name}": total / count for name, total in zip(names, totals, strict=True)}
        self.dev_losses.append({"step": self.step, **means, LOSS: statistics.mean(means.values())})
        announce("dev set: " + ", ".join(f"{name} {value:.4g}" for name, value in self.dev_losses[-1].items()))
        if not self._since_best() or not (self.folder / BEST).exists():
            self._save(BEST)

    def _dev_losses(self, pairs: Sequence[Pair]) -> list[float]:
        """Return the losses of all schedules, summed over the response tokens of `pairs`, and the number of tokens."""
        found, schedules = dict[str, float](), self.schedules
        with self._autocast():
            labels, targets = self._expected(pairs, 1)
            for layers in {one.prompt_layers for one in schedules.values()}:  # one pass over the prompts for each set
                names = [name for name, one in schedules.items() if one.prompt_layers == layers]
                states = predicting_states(self.decoder, pairs, [schedules[name] for name in names])
                for name, hidden in zip(names, states, strict=True):
                    found[name] = float(dev_loss(self.decoder, hidden, labels, targets, self.loss))
        return [*(found[name] for name in schedules), len(labels)]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.decoder.device.type, torch.bfloat16, enabled=self.bf16)

    def _since_best(self) -> int:
        """Return how many times the dev-set loss was measured after its lowest value."""
        losses = [entry[LOSS] for entry in self.dev_losses]
        return len(losses) - 1 - losses.index(min(losses))

    def _save(self, name: str) -> None:
        """Write weights and losses to the file `name`. The file to resume from gets the optimizer's state too."""
        state = {
            "step": self.step,
            "weights": self.weights,
            "dev_losses": self.dev_losses,
            "optimizer": self.optimizer.state_dict() if name == STATE_FILE else None,
        }
        with replacing(self.folder / name) as temporary:
            torch.save(state, temporary)

    def _load(self, name: str) -> dict[str, Any]:
        """Load what `_save` has written. Raises UserError if the file is cut off, as after a machine's death."""
        path = self.folder / name
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path}: damaged; to train from the beginning, remove {self.folder}")
        found: dict[str, Any] = torch.load(path, map_location=self.decoder.device, weights_only=True)
        return found

    def _resume(self) -> None:
        if (self.folder / STATE_FILE).exists():
            found = self._load(STATE_FILE)
            self.step = self.began_at = found["step"]
            self.dev_losses = found["dev_losses"]
            self.optimizer.load_state_dict(found["optimizer"])
            self._set_weights(found["weights"])

    @torch.no_grad()
    def _set_weights(self, found: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(found[name])


def _with_keys(rows: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{**row, KEY: (name, number)} for number, row in enumerate(rows)]


def rate(step: int, warmup: int, steps: int) -> float:
    """Return the factor of the learning rate at `step`: it rises to 1 in warm-up, then falls to 0 along a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def by_length(lengths: Sequence[int], together: int, seed: str) -> list[int]:
    """Return row numbers in random order, but group rows of similar length. together: number of rows in a step."""
    order = random.Random(seed).sample(range(len(lengths)), len(lengths))
    window = max(1, min(50, len(lengths) // (4 * together))) * together
    cuts = [order[start : start + window] for start in range(0, len(order), window)]
    return [row for cut in cuts for row in sorted(cut, key=lambda row: -lengths[row])]
