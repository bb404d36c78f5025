"""The GPU's engine on a GPU: kernels, graphs and the device that is ahead of its host; skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import LAYERS, tiny_model
from oracle import oracle, oracle_logits
from test_engine import SPECS, STOP, requests

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine.decoder import Decoder  # noqa: E402
from actors.engine.gpu import kernels  # noqa: E402
from actors.engine.gpu.engine import GpuEngine  # noqa: E402
from actors.engine.gpu.pages import page_bytes  # noqa: E402
from actors.engine.schedule import Schedule, ScheduleSpec  # noqa: E402
from actors.engine.scheduler import generate  # noqa: E402
from actors.engine.types import Request, SamplingParams  # noqa: E402

assert os.environ.get("TRITON_INTERPRET") != "1" or not torch.cuda.is_available(), "kernels would not be compiled"
FUSED = ["llama", "opt", "opt-post-norm", "qwen2"]
SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
BF16_BOUND = 0.05  # of the largest logit of float32


def engine_of(
    family: str, dtype: torch.dtype, graphs: bool, max_rows: int = 5, schedule: Schedule = SCHEDULE
) -> GpuEngine:
    decoder = Decoder(tiny_model(family).to(dtype).cuda())
    assert decoder.prepare_for_gpu(kernels)
    budget = 4000 * page_bytes(decoder.kv_heads, decoder.head_dim, dtype.itemsize)
    return GpuEngine(decoder, schedule, STOP, budget_bytes=budget, max_rows=max_rows, graphs=graphs)


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_greedy_rows_in_float32_equal_the_oracle(family: str, graphs: bool, scheduler: str) -> None:
    rows = requests(17, seed=3)
    library = Decoder(tiny_model(family))
    engine = engine_of(family, torch.float32, graphs)
    for _ in range(2):  # the second time every graph is there
        got = generate(engine, rows, budget_bytes=2**40, max_rows=5, scheduler=scheduler)
        assert [list(one.token_ids) for one in got] == [oracle(library, SCHEDULE, row, STOP) for row in rows]


def test_graphs_change_no_token_of_sampled_rows() -> None:
    rows = [
        Request(row.prompt_ids, row.sampling.merged({"temperature": 0.8, "top_p": 0.9}), row.key)
        for row in requests(30, seed=5)
    ]
    answers = [
        generate(engine_of("llama", torch.float32, graphs, rows_in), rows, budget_bytes=2**40, max_rows=rows_in)
        for graphs, rows_in in ((False, 30), (True, 30), (True, 7))
    ]
    tokens = [[one.token_ids for one in each] for each in answers]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("spec", range(len(SPECS)))
@pytest.mark.parametrize("family", FUSED)
def test_logits_in_bfloat16_are_near_the_oracle_in_float32(family: str, spec: int) -> None:
    """At every depth of every schedule, of a ragged batch: the host draws what the oracle draws."""
    schedule = SPECS[spec].build(LAYERS)
    library = Decoder(tiny_model(family))
    engine = engine_of(family, torch.bfloat16, graphs=True, schedule=schedule)
    rows = [
        Request(row.prompt_ids, SamplingParams(max_new_tokens=14, logprobs=1, ignore_eos=True))
        for row in requests(5, 3)
    ]
    wanted = [oracle(library, schedule, row, set()) for row in rows]
    held = [oracle_logits(library, schedule, list(row.prompt_ids), one) for row, one in zip(rows, wanted, strict=True)]
    seen: list[torch.Tensor] = []
    draw = engine._draw

    def forced(drawn: list, logits: torch.Tensor) -> None:
        seen.append(logits.float().cpu())
        draw(drawn, logits)
        for row in drawn:
            row.tokens[-1] = wanted[rows.index(row.request)][len(row.tokens) - 1]

    engine._draw = forced  # type: ignore[method-assign, assignment]
    engine.open(5, 20, 14)
    engine.admit(rows)
    for _ in range(12):
        engine.step()
    engine.close()
    for place, want in enumerate(held):
        got = torch.stack([logits[place] for logits in seen])
        assert float((got - want[: len(got)]).abs().max()) < BF16_BOUND * float(want.abs().max())


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_loop_waits_for_nothing() -> None:
    """Once graphs are there: no step makes the host wait for the device, but for what it asked for a step before."""
    engine = engine_of("llama", torch.bfloat16, graphs=True, max_rows=8)
    rows = [Request(row.prompt_ids, SamplingParams(max_new_tokens=30, ignore_eos=True)) for row in requests(8, 3)]
    for checked in (False, False, True):  # kernels are compiled, then graphs captured
        engine.open(8, 20, 30)
        engine.admit(rows)
        with no_synchronisation() if checked else torch.inference_mode():
            for _ in range(20):
                assert not engine.step()
        engine.close()
