"""Training on a GPU against the same on the CPU: the path that CI has no device for."""

from __future__ import annotations

import pytest
import torch
from tiny_models import LAYERS, tiny_model
from training_cases import SPECS, pairs

from actors.engine.decoder import Decoder
from actors.engine.library import packed_attention
from actors.engine.library.forcing import predicting_states
from actors.engine.schedule.schedule import ScheduleSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("family", ["llama", "opt", "gemma2", "gpt-neox"])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_logits_and_gradients_are_those_of_the_cpu(family: str, spec: ScheduleSpec) -> None:
    schedule, found = spec.build(LAYERS), []
    for device in ("cpu", "cuda"):
        model = tiny_model(family).requires_grad_(True).to(device)
        decoder = Decoder(model)
        with packed_attention.packed(model):
            logits = decoder.logits(predicting_states(decoder, pairs(seed=7), [schedule])[0])
            logits.logsumexp(-1).sum().backward()
        gradients = [one.grad.flatten().cpu() for one in model.parameters() if one.grad is not None]
        found.append((logits.detach().cpu(), torch.cat(gradients)))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
