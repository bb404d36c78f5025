"""The objective against its definition, and every way to compute a step against the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS, tiny_model
from torch.distributions import Categorical, kl_divergence
from training_cases import SPECS, pairs

from actors.engine.decoder import Decoder
from actors.engine.schedule import ScheduleSpec
from actors.engine.teacher_forcing import IGNORED, ResponseBatch, collate, response_logits
from pipeline.config.tune import LossConfig
from pipeline.tune.trainer import LengthGroups, Teacher, summed_loss


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**31 - 1),
    st.floats(0.0, 2.0),
    st.floats(0.1, 2.0),
    st.floats(0.3, 4.0),
)
def test_the_objective_is_the_weighted_sum_of_cross_entropy_and_divergence(
    seed: int, references: float, distillation: float, temperature: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 11, generator=random) * 3
    taught = torch.randn(3, 5, 13, generator=random) * 3  # padded, as vocabularies may be
    labels = torch.randint(0, 11, (3, 5), generator=random)
    labels[torch.rand(3, 5, generator=random) < 0.3] = IGNORED
    loss = LossConfig(references=references, distillation=distillation, temperature=temperature)
    total, count = summed_loss(logits, labels, loss, 0.0, taught)
    expected = 0.0
    for row in range(3):
        for place in range(5):
            if (label := int(labels[row, place])) == IGNORED:
                continue
            expected -= references * float(logits[row, place].log_softmax(-1)[label])
            teacher = Categorical(logits=taught[row, place, :11] / temperature)
            student = Categorical(logits=logits[row, place] / temperature)
            expected += distillation * temperature**2 * float(kl_divergence(teacher, student))
    assert float(total) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert count == int((labels != IGNORED).sum())


def test_a_teacher_that_is_the_student_has_nothing_to_say() -> None:
    decoder, batch = Decoder(tiny_model("llama")), ResponseBatch(**collate(pairs(seed=4)))
    logits = response_logits(decoder, batch, ScheduleSpec().build(LAYERS))
    taught = Teacher(decoder).logits(batch)
    assert not taught.requires_grad
    only = LossConfig(references=0.0, distillation=1.0)
    assert float(summed_loss(logits, batch.labels, only, 0.0, taught)[0]) == pytest.approx(0, abs=1e-4)
    skipped = response_logits(decoder, batch, ScheduleSpec(speedup=3, horizon=4).build(LAYERS))
    assert float(summed_loss(skipped, batch.labels, only, 0.0, taught)[0]) > 0.1


def test_a_teacher_answers_alone() -> None:
    decoder, batch = Decoder(tiny_model("llama")), ResponseBatch(**collate(pairs(seed=4)))
    entered = []

    @contextmanager
    def alone() -> Iterator[None]:
        entered.append(True)
        yield

    Teacher(decoder, alone).logits(batch)
    assert entered == [True]


def test_a_teacher_that_is_the_student_in_training_does_not_drop_out() -> None:
    model = tiny_model("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    decoder, batch = Decoder(model.train()), ResponseBatch(**collate(pairs(seed=4)))
    first, second = (Teacher(decoder).logits(batch) for _ in range(2))
    torch.testing.assert_close(first, second)
    assert model.training


def test_groups_of_like_lengths_are_the_same_after_a_resume() -> None:
    lengths = [(7 * row) % 50 for row in range(200)]
    orders = [list(LengthGroups(lengths, 10, lambda seed=seed: seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(200))
    spread = [max(group) - min(group) for group in zip(*[iter([lengths[row] for row in orders[0]])] * 10, strict=True)]
    assert sum(spread) / len(spread) < 10


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_recomputed_activations_give_the_same_gradients(family: str, spec: ScheduleSpec) -> None:
    model = tiny_model(family).requires_grad_(True)
    decoder, schedule, batch = Decoder(model), spec.build(LAYERS), ResponseBatch(**collate(pairs(seed=5)))
    found = []
    for recompute in (False, True):
        model.zero_grad()
        logits = response_logits(decoder, batch, schedule, recompute=recompute)
        summed_loss(logits, batch.labels, LossConfig(), 0.0, None)[0].backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_the_gradient_of_a_batch_is_that_of_its_rows(spec: ScheduleSpec) -> None:
    model = tiny_model("llama").requires_grad_(True)
    decoder, schedule, rows = Decoder(model), spec.build(LAYERS), pairs(seed=6)
    found = []
    for batches in ([rows], [[row] for row in rows]):
        model.zero_grad()
        for one in batches:
            batch = ResponseBatch(**collate(one))
            summed_loss(response_logits(decoder, batch, schedule), batch.labels, LossConfig(), 0.0, None)[0].backward()
        found.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
