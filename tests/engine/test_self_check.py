"""The comparison of the paged engine with the library's layers, as an actor with `engine: auto` makes it on a GPU."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.gpu import reference, self_check
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import page_bytes
from actors.engine.schedules.schedule import ScheduleSpec


@pytest.mark.parametrize("speedup", [1, 2])
def test_the_paged_engine_passes_and_a_wrong_kernel_is_refused(
    speedup: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = Decoder(tiny_model("llama"))
    schedule = ScheduleSpec(speedup=speedup, horizon=8).build(decoder.num_layers)
    wanted = self_check.probe(Engine(decoder, schedule, ()))
    assert [len(one.token_ids) for one in wanted] == [self_check.NEW_TOKENS] * len(self_check.PROMPT_TOKENS)
    decoder.prepare_for_gpu(reference)
    budget = 1000 * page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)

    def engine() -> GpuEngine:
        return GpuEngine(decoder, schedule, (), budget_bytes=budget, max_rows=8)

    with caplog.at_level(logging.INFO):
        self_check.check(engine(), wanted)
    assert "engine: paged, " in caplog.text
    attend = reference.attend

    def wrong(queries: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        return attend(queries, *arguments, **more).roll(1, dims=1)  # heads in another order

    monkeypatch.setattr(reference, "attend", wrong)
    with pytest.raises(UserError, match=r"^engine: here .* differ from the library's by .* set engine: library, "):
        self_check.check(engine(), wanted)
