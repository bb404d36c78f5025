"""Schedules to train with, random pairs of prompt and response as token ids, and the objective by its definition."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from tiny_models import VOCAB
from torch import Tensor, nn

from actors.engine.schedule.schedule import ScheduleSpec
from pipeline.config.tune import LossConfig
from pipeline.learn.tune.objective import Targets

SPECS = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]


def pairs(seed: int, count: int = 5) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, response = rng.randint(1, 9), rng.randint(1, 8)
        rows.append({"input_ids": rng.choices(range(3, VOCAB), k=prompt + response), "prompt_tokens": prompt})
    return rows


def token_losses(logits: Tensor, labels: Tensor, targets: Targets | None, loss: LossConfig, smoothing: float) -> Tensor:
    """Return the objective of each token [M], nats, from the student's logits [M, V]."""
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
    """Return KL(teacher || student) [M] over K + 1 classes. scores: the student's, [M, V], unnormalised."""
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
