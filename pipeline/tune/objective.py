"""The training objective of each response token. `chunked_loss` sums it with its gradients.

Shapes: M response tokens, E hidden size, V vocabulary size, K entries of the teacher's distribution that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from pipeline.config.tune import LossConfig

CHUNK_BYTES = 64 * 2**20  # of one chunk's logits in fp32


@dataclass(frozen=True)
class Targets:
    """A teacher's distributions over the next token: its K likeliest entries, and the mass of all others.

    ids: int32 [M, K]. log_probs: [M, K]. rest: [M], the logarithm of the others' mass; -inf if K is their number.
    entries: of the vocabulary; further ones of the student are padding.
    """

    ids: Tensor
    log_probs: Tensor
    rest: Tensor
    entries: int

    @classmethod
    def of(cls, logits: Tensor, loss: LossConfig, vocabulary: int) -> Targets:
        """From a teacher's logits [M, V]. vocabulary: the student's; entries beyond it are padding."""
        scaled = logits[:, :vocabulary].float() / loss.temperature
        scaled = scaled - scaled.logsumexp(-1, keepdim=True)
        log_probs, ids = scaled.topk(min(loss.teacher_top_k, scaled.shape[-1]), dim=-1)
        rest = scaled.scatter(-1, ids, -math.inf).logsumexp(-1)
        return cls(ids.int(), log_probs, rest, scaled.shape[-1])

    @classmethod
    def joined(cls, parts: Sequence[Targets]) -> Targets:
        """Several ones behind another."""
        ids, log_probs, rest = (
            torch.cat([getattr(one, name) for one in parts]) for name in ("ids", "log_probs", "rest")
        )
        return cls(ids, log_probs, rest, parts[0].entries)

    def __getitem__(self, tokens: slice) -> Targets:
        return replace(self, ids=self.ids[tokens], log_probs=self.log_probs[tokens], rest=self.rest[tokens])

    def copied(self) -> Targets:
        """A copy with its own memory: pickling a slice writes the whole tensor that it was cut from."""
        return replace(self, ids=self.ids.clone(), log_probs=self.log_probs.clone(), rest=self.rest.clone())

    def to(self, device: torch.device | str) -> Targets:
        """The same on `device`."""
        return replace(self, ids=self.ids.to(device), log_probs=self.log_probs.to(device), rest=self.rest.to(device))


def token_losses(logits: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float) -> Tensor:
    """The objective of each token [M], nats, from the student's logits [M, V].

    KL(teacher || student) is computed at `loss.temperature` and scaled by its square (Hinton et al. 2015,
    arXiv 1503.02531). Tokens outside the teacher's K likeliest ones count as one: a lower bound of the divergence over
    the vocabulary, lower by the mass of the rest times the divergence within it.
    """
    student = logits.float()
    total = student.new_zeros(len(student))
    if loss.references > 0:
        entropy = nn.functional.cross_entropy(student, labels, label_smoothing=smoothing, reduction="none")
        total = total + loss.references * entropy
    if targets is not None:
        divergence = _divergence(student / loss.temperature, targets)
        total = total + loss.distillation * loss.temperature**2 * divergence
    return total


def _divergence(scores: Tensor, targets: Targets) -> Tensor:
    """KL(teacher || student) [M] over K + 1 classes. scores: the student's, [M, V], unnormalised."""
    ids = targets.ids.long()
    scores = scores[:, : targets.entries]
    kept = scores.gather(-1, ids)
    whole = kept.logsumexp(-1)
    others = None
    if ids.shape[-1] < scores.shape[-1]:
        others = scores.scatter(-1, ids, -math.inf).logsumexp(-1)
        whole = torch.logaddexp(whole, others)
    learned = kept - whole[:, None]
    divergence = (targets.log_probs.exp() * (targets.log_probs - learned)).sum(-1)
    if others is not None:
        divergence = divergence + targets.rest.exp() * (targets.rest - (others - whole))
    return divergence


def losses_without_gradient(
    decoder: Decoder,
    hidden: Tensor,
    labels: Tensor,
    targets: Targets | None,
    loss: LossConfig,
    smoothing: float = 0.0,
) -> Tensor:
    """`token_losses` [M] from hidden states [M, E] before the final norm, in chunks."""
    with torch.no_grad():
        return torch.cat(
            [
                token_losses(
                    decoder.logits(hidden[chunk]),
                    labels[chunk],
                    None if targets is None else targets[chunk],
                    loss,
                    smoothing,
                )
                for chunk in chunks(len(hidden), decoder.vocab_size)
            ]
        )


def chunks(tokens: int, vocabulary: int, most: int | None = None) -> list[slice]:
    """Equal slices of `tokens` tokens whose logits fit `most` bytes in fp32, default `CHUNK_BYTES`."""
    count = -(-tokens // max(1, (most or CHUNK_BYTES) // (4 * vocabulary)))
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
