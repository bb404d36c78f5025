"""Computes the training objective and its gradients in chunks, so that memory never holds the logits of all tokens.

The objective of a response token is the cross-entropy of its label plus KL(teacher || student). KL is computed at
`loss.temperature` T and multiplied by T squared (Hinton et al. 2015, arXiv 1503.02531). All tokens but the teacher's K
likeliest count as one class. The KL is thus a lower bound of the KL over the whole vocabulary. The gradient of the
logits is computed with a formula, which is faster than autograd (SmolLM2-135M, 400 tokens, one thread: head and
objective take 1.1 s; with autograd they take 1.6 s, and the whole step 6.9 s).
Shapes: M response tokens, E hidden size, V vocabulary size, K kept entries of the teacher's distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from pipeline.config.adapt import LossConfig

CHUNK_BYTES = 64 * 2**20  # limit for the fp32 logits of one chunk
BLOCK_BYTES = 4 * 2**20  # limit for the fp32 logits of one gradient computation, which stay in the CPU's caches


@dataclass(frozen=True)
class Targets:
    """A teacher's next-token distributions: for each of M tokens, the K likeliest entries and the mass of all others.

    ids: int32 [M, K]. log_probs: [M, K]. rest: [M], logarithm of the mass of all other entries; -inf if there are none.
    entries: number of tokens in the teacher's vocabulary; further entries of the student's logits are padding.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    entries: int

    @classmethod
    def of(cls, logits: Tensor, loss: LossConfig, vocabulary: int) -> Targets:
        """Make targets from a teacher's logits. Drop entries beyond `vocabulary`, the student's vocabulary size."""
        scaled = logits[:, :vocabulary].float() / loss.temperature
        scaled = scaled - scaled.logsumexp(-1, keepdim=True)
        log_probs, ids = scaled.topk(min(loss.teacher_top_k, scaled.shape[-1]), dim=-1)
        rest = scaled.scatter(-1, ids, -math.inf).logsumexp(-1)
        return cls(ids.int(), log_probs, rest, scaled.shape[-1])

    @classmethod
    def joined(cls, parts: Sequence[Targets]) -> Targets:
        """Concatenate `parts` along the tokens."""
        tensors = zip(*((one.ids, one.log_probs, one.rest) for one in parts), strict=True)
        ids, log_probs, rest = map(torch.cat, tensors)
        return cls(ids, log_probs, rest, parts[0].entries)

    def each(self, change: Callable[[Tensor], Tensor]) -> Targets:
        """Apply `change` to each tensor, and return the results as new targets."""
        return replace(self, ids=change(self.ids), log_probs=change(self.log_probs), rest=change(self.rest))

    def __getitem__(self, tokens: slice) -> Targets:
        return self.each(lambda values: values[tokens])


def summed_loss(
    decoder: Decoder, hidden: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float
) -> Tensor:
    """Return the objective, summed over tokens. hidden: hidden states before the final norm.

    Each chunk's gradients are computed right after its logits, which are then freed. The backward pass thus need not
    compute the head again, and memory holds at most the logits of one chunk.
    """
    layers = {id(weight) for block in decoder.blocks for weight in block.parameters()}
    others = [weight for weight in decoder.model.parameters() if weight.requires_grad and id(weight) not in layers]
    of_hidden, of_others = torch.empty_like(hidden), list[Tensor | None]([None] * len(others))
    total = hidden.new_zeros((), dtype=torch.float32)
    for chunk in chunks(len(hidden), decoder.vocab_size):
        states = hidden[chunk].detach().requires_grad_()
        logits = decoder.logits(states)
        of_logits = torch.empty_like(logits)
        for block in chunks(len(logits), decoder.vocab_size, BLOCK_BYTES):
            tokens = slice(chunk.start + block.start, chunk.start + block.stop)
            taught = None if targets is None else targets[tokens]
            part, of_logits[block] = loss_and_gradient(logits.detach()[block], labels[tokens], taught, loss, smoothing)
            total += part
        of_hidden[chunk], *found = torch.autograd.grad(logits, [states, *others], of_logits, allow_unused=True)
        for number, (before, gradient) in enumerate(zip(of_others, found, strict=True)):
            of_others[number] = gradient if before is None else before.add_(gradient)
    summed: Tensor = _WithGradients.apply(total, (of_hidden, *of_others), hidden, *others)
    return summed


@torch.no_grad()
def dev_loss(decoder: Decoder, hidden: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig) -> Tensor:
    """Return the objective without label smoothing, summed over tokens. hidden: states before the final norm."""
    parts = [
        loss_and_gradient(
            decoder.logits(hidden[chunk]), labels[chunk], None if targets is None else targets[chunk], loss, 0.0
        )[0]
        for chunk in chunks(len(hidden), decoder.vocab_size)
    ]
    return torch.stack(parts).sum()


def loss_and_gradient(
    logits: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the objective, summed over tokens, and its gradient with respect to the student's `logits`."""
    total = logits.new_zeros((), dtype=torch.float32)
    gradient: Tensor | None = None
    if loss.references > 0:
        entropy, gradient = _cross_entropy(logits, labels, smoothing)
        total, gradient = total + loss.references * entropy, gradient.mul_(loss.references)
    if targets is not None:
        divergence, taught = _divergence(logits[:, : targets.entries], targets, loss.temperature)
        total = total + loss.distillation * loss.temperature**2 * divergence
        if (factor := loss.distillation * loss.temperature) != 1:
            taught.mul_(factor)
        if gradient is None and targets.entries == logits.shape[1]:
            gradient = taught
        else:
            gradient = torch.zeros_like(logits, dtype=taught.dtype) if gradient is None else gradient
            gradient[:, : targets.entries] += taught
    return total, torch.zeros_like(logits) if gradient is None else gradient.to(logits.dtype)


def _cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy with label smoothing, and its gradient with respect to `logits`."""
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    total = nn.functional.nll_loss(log_probs, labels, reduction="sum") * (1 - smoothing)
    if smoothing > 0:
        total = total - smoothing * log_probs.mean(-1).sum()
    gradient = log_probs.exp_()
    if smoothing > 0:
        gradient -= smoothing / logits.shape[1]
    gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), smoothing - 1))
    return total, gradient


def _divergence(scores: Tensor, targets: Targets, temperature: float) -> tuple[Tensor, Tensor]:
    """Return KL(teacher || student), summed over tokens, and its gradient. All tokens that are not kept are one class.

    The gradient with respect to `scores` / `temperature` is q - p for a kept token, and q - q P / Q for any
    other token. p and q are the token's probabilities under the teacher and the student. P and Q are the total
    probabilities of all tokens that are not kept.
    """
    ids = targets.ids.long()
    if temperature != 1:
        scores = scores.float() / temperature
    probabilities = scores.softmax(-1, dtype=torch.float32)
    least = torch.finfo(probabilities.dtype).tiny
    kept, kept_scores = probabilities.gather(1, ids), scores.gather(1, ids).float()
    highest = kept.argmax(1, keepdim=True)  # the largest probability is the last to underflow
    whole = kept_scores.gather(1, highest) - kept.gather(1, highest).clamp_min(least).log()  # logsumexp of the scores
    taught = targets.log_probs.exp()
    total = (taught * (targets.log_probs - (kept_scores - whole))).sum()
    if ids.shape[1] < scores.shape[1]:
        others = probabilities.scatter_(1, ids, 0.0).sum(1).clamp_min(least)
        rest = targets.rest.exp()
        total = total + (rest * (targets.rest - others.log())).sum()
        probabilities.mul_((1 - rest / others)[:, None])
    return total, probabilities.scatter_(1, ids, kept - taught)


class _WithGradients(torch.autograd.Function):
    """Returns `total`, and gives autograd its `gradients` with respect to `inputs`, which are known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> Any:
        return (None, None, *(None if one is None else one.mul_(scales[0]) for one in ctx.gradients))


def chunks(tokens: int, vocabulary: int, most: int | None = None) -> list[slice]:
    """Cut `tokens` tokens into equal slices. The fp32 logits of each must fit `most` bytes (default: `CHUNK_BYTES`)."""
    count = -(-tokens // max(1, (most or CHUNK_BYTES) // (4 * vocabulary)))
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
