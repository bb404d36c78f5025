"""The benchmark's count of FLOPs and bytes against sums by hand."""

from __future__ import annotations

import math

import pytest
import torch
from roofline import Ceilings, Counter, least
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

ROWS, PROMPT, NEW = 3, 7, 9


@pytest.mark.parametrize("speedup", [1.0, 2.0])
@pytest.mark.parametrize(("dtype", "logprob"), [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_what_is_counted_is_what_the_schedule_says(speedup: float, dtype: torch.dtype, logprob: bool) -> None:
    """Of the library's layers, of those that CPUs have in bfloat16, and of greedy steps in one native call."""
    decoder = Decoder(tiny_model("llama").to(dtype))
    counter = Counter(Ceilings(flops=100.0, bandwidth=7.0))
    counter.watch(decoder)
    if dtype == torch.bfloat16:
        decoder = fastest_decoder(decoder.model)
    schedule = ScheduleSpec(speedup=speedup, horizon=6).build(LAYERS)
    rows = [Request([5 + row] * PROMPT, SamplingParams(max_new_tokens=NEW), row) for row in range(ROWS)]
    engine = Engine(decoder, schedule, (), cumulative_logprob=logprob)
    generate(engine, rows, budget_bytes=2**40, max_rows=ROWS)
    parts = counter.take()
    config = decoder.model.config
    hidden, inner, size = config.hidden_size, config.intermediate_size, decoder.head_dim
    queries, heads = config.num_attention_heads, decoder.kv_heads
    layer = hidden * size * (2 * queries + 2 * heads) + 3 * hidden * inner
    depths = [schedule.depth(position) for position in range(NEW - 1)]
    assert parts["prefill linear"].flops == 2 * ROWS * PROMPT * layer * LAYERS
    assert parts["decode linear"].flops == 2 * ROWS * layer * sum(depths)
    assert parts["decode linear"].bytes == dtype.itemsize * layer * sum(depths)
    assert parts["decode head"].flops == 2 * ROWS * VOCAB * hidden * len(depths)
    keys = sum(depth * (PROMPT + position + 1) for position, depth in enumerate(depths))
    assert parts["decode attention"].flops == 4 * ROWS * keys * queries * size
    assert parts["decode attention"].bytes == ROWS * keys * 2 * heads * size * dtype.itemsize
    assert parts["prefill attention"].flops == 4 * ROWS * LAYERS * math.comb(PROMPT + 1, 2) * queries * size
    for part in parts.values():  # no call takes less than its arithmetic, or its bytes
        assert part.least >= max(part.flops / 100, part.bytes / 7) * (1 - 1e-9)
    assert least(parts) == pytest.approx(least(parts, "prefill") + least(parts, "decode"))
    assert counter.take() == {}
