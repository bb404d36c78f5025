"""The sum of the objective and its gradients, without the logits of all tokens at once.

The gradient of the logits is computed from its formula, in a few passes over the vocabulary; `objective.token_losses`
is the definition that it is tested against.
Shapes: M response tokens, E hidden size, V vocabulary size, K entries of the teacher's distribution that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from pipeline.config.tune import LossConfig
from pipeline.tune.objective import Targets, chunks

BLOCK_BYTES = 4 * 2**20  # of the logits that are differentiated at once, in fp32: they stay in the processor's caches

LogitsLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def summed_loss(
    decoder: Decoder, hidden: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float
) -> Tensor:
    """Sum of `token_losses` for hidden states [M, E] before the final norm.

    Gradients are computed with each chunk's logits, which are freed at once: neither all logits nor their gradients
    exist, and no head is computed twice.
    """

    def logits_loss(logits: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        total, of_logits = logits.new_zeros((), dtype=torch.float32), torch.empty_like(logits)
        for block in chunks(len(logits), decoder.vocab_size, BLOCK_BYTES):
            tokens = slice(chunk.start + block.start, chunk.start + block.stop)
            taught = None if targets is None else targets[tokens]
            part, of_logits[block] = loss_and_gradient(logits[block], labels[tokens], taught, loss, smoothing)
            total += part
        return total, of_logits

    layers = {id(weight) for block in decoder.blocks for weight in block.parameters()}
    others = [weight for weight in decoder.model.parameters() if weight.requires_grad and id(weight) not in layers]
    pieces = chunks(len(hidden), decoder.vocab_size)
    total: Tensor = _Chunked.apply(decoder.logits, logits_loss, pieces, hidden, *others)
    return total


def loss_and_gradient(
    logits: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Sum of `token_losses` of the student's logits [M, V], and its gradient by them, [M, V] in their dtype."""
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
    """Sum of the cross-entropy with label smoothing, and its gradient by the logits [M, V]."""
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
    """Sum of KL(teacher || student) over K + 1 classes, and its gradient by the scores [M, V] over the temperature.

    With the student's probabilities q, the teacher's p of the K kept tokens and P of all others, of which the student
    has Q: the gradient is q - p for a kept token, and q - q P / Q for another.
    """
    ids = targets.ids.long()
    if temperature != 1:
        scores = scores.float() / temperature
    probabilities = scores.softmax(-1, dtype=torch.float32)
    least = torch.finfo(probabilities.dtype).tiny
    kept, kept_scores = probabilities.gather(1, ids), scores.gather(1, ids).float()
    highest = kept.argmax(1, keepdim=True)  # its probability is the last to vanish
    whole = kept_scores.gather(1, highest) - kept.gather(1, highest).clamp_min(least).log()  # log of the sum of exp
    taught = targets.log_probs.exp()
    total = (taught * (targets.log_probs - (kept_scores - whole))).sum()
    if ids.shape[1] < scores.shape[1]:
        others = probabilities.scatter_(1, ids, 0.0).sum(1).clamp_min(least)
        rest = targets.rest.exp()
        total = total + (rest * (targets.rest - others.log())).sum()
        probabilities.mul_((1 - rest / others)[:, None])
    return total, probabilities.scatter_(1, ids, kept - taught)


class _Chunked(torch.autograd.Function):
    """A sum over chunks of hidden states, differentiated chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[Tensor], Tensor],
        logits_loss: LogitsLoss,
        pieces: Sequence[slice],
        hidden: Tensor,
        *weights: Any,
    ) -> Tensor:
        of_hidden = torch.empty_like(hidden)
        of_weights: list[Tensor | None] = [None] * len(weights)
        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in pieces:
            states = hidden[chunk].detach().requires_grad_()
            with torch.enable_grad():
                logits = head(states)
            part, of_logits = logits_loss(logits.detach(), chunk)
            found, *rest = torch.autograd.grad(logits, [states, *weights], of_logits, allow_unused=True)
            of_hidden[chunk] = found
            for number, gradient in enumerate(rest):
                if gradient is not None:
                    before = of_weights[number]
                    of_weights[number] = gradient if before is None else before.add_(gradient)
            total += part
        ctx.save_for_backward(of_hidden)
        ctx.of_weights = of_weights
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (of_hidden,) = ctx.saved_tensors
        (scale,) = gradients
        of_weights = [None if one is None else one.mul_(scale) for one in ctx.of_weights]
        return (None, None, None, of_hidden * scale, *of_weights)
