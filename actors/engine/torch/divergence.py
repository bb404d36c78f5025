"""Measures how much a schedule's predictions and answers differ from those of the model at full depth.

KL divergence and top-1 agreement compare predictions of the tokens of given responses. Regret measures how likely the
schedule's own answers are for the model at full depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.schedule.schedule import Schedule
from actors.engine.torch.forcing import Pair as Row
from actors.engine.torch.forcing import micro_batches, predicting_states, response_labels
from actors.engine.torch.packed_attention import packed

TOKENS = 4096  # maximum number of tokens in a forward pass
LOGITS_AT_ONCE = 2**24  # maximum number of a model's logits that exist at the same time (64 MiB in float32)

Array = npt.NDArray[np.float64]
Pair = tuple[Sequence[int], Sequence[int]]
Report = Callable[[int], None]


@dataclass(frozen=True)
class Model:
    """A decoder together with the schedule that it runs."""

    decoder: Decoder
    schedule: Schedule


@dataclass(frozen=True)
class ForcedScores:
    """Scores of a model that is compared with full depth, [N] each: for each row, sums over its response tokens.

    kl: KL(full depth || model) in nats. nll: the model's -log p of the response tokens, in nats. agreed: number of
    positions where both have the same likeliest token. tokens: number of response tokens that count.
    """

    kl: Array
    nll: Array
    agreed: Array
    tokens: Array


@torch.inference_mode()
def teacher_forced(
    full: Model,
    others: Sequence[Model],
    pairs: Sequence[Pair],
    report: Report = lambda rows: None,  # called before each pass and at the end, with the number of rows done
) -> list[ForcedScores]:
    """Compare each of `others` with `full` on `pairs` of (prompt ids, response ids); return the scores of each.

    Prompts and responses must not be empty. For each response token, the distribution [V] that a model has at
    inference is compared with that of `full`. All models must have the same vocabulary; different padding at the end of
    the vocabulary is ignored. Models with the same weights and prompt layers share the pass over the prompts.
    """
    sums = np.zeros((len(others), 3, len(pairs)))
    tokens = np.array([len(response) for _, response in pairs], dtype=np.float64)
    models = [full, *others]
    for batch in _batches(pairs, len(models), report):
        states = _states(models, batch.rows)
        for chunk in batch.chunks(full.decoder.vocab_size):
            expected, labels = full.decoder.logits(states[0][chunk]), batch.labels[chunk]
            for number, other in enumerate(others):
                logits = other.decoder.logits(states[number + 1][chunk])
                batch.add(sums[number], chunk, _divergence(expected, logits, labels.to(logits.device)))
    return [ForcedScores(kl, nll, agreed, tokens) for kl, nll, agreed in sums]


@torch.inference_mode()
def answer_regret(full: Model, pairs: Sequence[Pair], report: Report = lambda rows: None) -> Array:
    """Return each answer's regret [N] in nats: how much less likely it is than the full-depth model's own choices.

    Regret is log p(likeliest token) - log p(answer's token) at full depth, summed over the answer's tokens and its end
    token. It is 0 for greedy answers at full depth. pairs: (prompt ids, answer ids); neither may be empty. report:
    called before each pass and at the end, with the number of rows done.
    """
    regret: Array = np.zeros((1, len(pairs)))
    for batch in _batches(pairs, 1, report):
        [states] = _states([full], batch.rows)
        for chunk in batch.chunks(full.decoder.vocab_size):
            logits = full.decoder.logits(states[chunk]).float()
            chosen = logits.gather(-1, batch.labels[chunk, None].to(logits.device))[:, 0]
            batch.add(regret, chunk, (logits.amax(dim=-1) - chosen)[None])
    sums: Array = regret[0]
    return sums


@dataclass(frozen=True)
class _Batch:
    """Rows of one forward pass, and their M response tokens, row by row.

    labels: [M], the response tokens. owners: [M], index of each token's row among the pairs of all passes.
    """

    rows: Sequence[Row]
    labels: Tensor
    owners: npt.NDArray[np.int64]

    def chunks(self, vocabulary: int) -> Iterator[Any]:
        """Yield indices of response tokens in chunks that need at most `LOGITS_AT_ONCE` logits each.

        vocabulary: number of logits of a token.
        """
        yield from torch.split(torch.arange(len(self.owners)), max(1, LOGITS_AT_ONCE // vocabulary))

    def add(self, sums: Array, chunk: Tensor, values: Tensor) -> None:
        """Add each token's K `values` [K, tokens of the chunk] to the K `sums` [K, N] of the token's row."""
        for total, each in zip(sums, values.double().cpu().numpy(), strict=True):
            np.add.at(total, self.owners[chunk.numpy()], each)


def _batches(pairs: Sequence[Pair], models: int, report: Report) -> Iterator[_Batch]:
    """Yield batches of rows with similar response lengths. report: called with the number of rows done."""
    order = sorted(range(len(pairs)), key=lambda row: (len(pairs[row][1]), len(pairs[row][0])))
    rows = [
        {"input_ids": [*pairs[number][0], *pairs[number][1]], "prompt_tokens": len(pairs[number][0]), "row": number}
        for number in order
    ]
    done = 0
    for batch in micro_batches(rows, models, TOKENS) if rows else ():
        report(done)
        lengths = [len(row["input_ids"]) - row["prompt_tokens"] for row in batch]
        owners = np.repeat([row["row"] for row in batch], lengths)
        yield _Batch(batch, response_labels(batch), owners)
        done += len(batch)
    report(done)


def _states(models: Sequence[Model], rows: Sequence[Row]) -> list[Tensor]:
    """Return, for each model, hidden states [M, E] that predict response tokens. Models share passes if possible."""
    together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    same = [models.index(model) for model in models]  # for each model, the index of the first equal model
    for number in dict.fromkeys(same):
        model = models[number]
        together.setdefault((id(model.decoder), model.schedule.prompt_layers), []).append(number)
    found: dict[int, Tensor] = {}
    for numbers in together.values():
        decoder = models[numbers[0]].decoder
        with packed(decoder.model):
            states = predicting_states(decoder, rows, [models[number].schedule for number in numbers])
        found |= dict(zip(numbers, states, strict=True))
    return [found[number] for number in same]


def _divergence(expected: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Compare logits [M, V] of two models. Return [3, M]: KL divergence, -log p of `labels`, and top-1 agreement."""
    shared = min(expected.shape[-1], logits.shape[-1])
    log_p = expected[..., :shared].float().log_softmax(dim=-1)
    log_q = logits[..., :shared].float().log_softmax(dim=-1)
    nll = -log_q.gather(-1, labels[:, None])[:, 0]
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)  # rounding can make it negative
    agreed = log_p.argmax(dim=-1) == log_q.argmax(dim=-1)
    return torch.stack([kl, nll, agreed.to(kl.dtype)])
