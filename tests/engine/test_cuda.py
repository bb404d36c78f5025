"""The same laws on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from engine_cases import STOP, answer, requests
from oracle import oracle
from tiny_models import LAYERS, MODELS, tiny_model

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import ScheduleSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("family", MODELS)
def test_a_gpu_answers_what_the_oracle_on_the_cpu_answers(family: str) -> None:
    """fp32, greedy: token for token."""
    schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
    rows = requests(9, seed=3)
    on_gpu = Engine(Decoder(tiny_model(family).cuda()), schedule, STOP)
    on_cpu = Decoder(tiny_model(family))
    for row, got in zip(rows, answer(on_gpu, rows, max_rows=5), strict=True):
        assert list(got.token_ids) == oracle(on_cpu, schedule, row, STOP, got.token_ids)
