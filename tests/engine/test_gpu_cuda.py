"""The GPU's engine on a GPU: kernels, graphs and the device that is ahead of its host; skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import PREFIX, SPECS, STOP, requests
from oracle import oracle, oracle_answers, oracle_logits, oracle_logits_each
from tiny_models import LAYERS, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
pytest.importorskip("triton", reason="Triton is not installed: it comes with a GPU's torch, and with .[dev]")

from actors.engine.build import FP8_CAPABILITY  # noqa: E402
from actors.engine.checkpoint.compressed import LIMITS, Kind  # noqa: E402
from actors.engine.decoder import Decoder  # noqa: E402
from actors.engine.exact.engine import Drafter  # noqa: E402
from actors.engine.gpu import kernels, prefill, prompts, reference  # noqa: E402
from actors.engine.gpu.engine import GpuEngine  # noqa: E402
from actors.engine.gpu.exact import GpuExactEngine  # noqa: E402
from actors.engine.gpu.pages import page_bytes  # noqa: E402
from actors.engine.gpu.products import EightBits  # noqa: E402
from actors.engine.gpu.self_check import difference  # noqa: E402
from actors.engine.gpu.state import DeviceRows  # noqa: E402
from actors.engine.scheduler import generate  # noqa: E402
from actors.engine.schedules.schedule import Schedule, ScheduleSpec  # noqa: E402
from actors.engine.types import Request, SamplingParams  # noqa: E402
from actors.generator import Generator  # noqa: E402

assert os.environ.get("TRITON_INTERPRET") != "1" or not torch.cuda.is_available(), "kernels would not be compiled"
FUSED = ["llama", "opt", "opt-post-norm", "qwen2", "qwen3", "phi3-full", "olmo2", "smollm3-full"]
SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


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
        tokens = [list(completion.token_ids) for completion in got]
        assert tokens == oracle_answers(library, SCHEDULE, rows, STOP, tokens)


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


@pytest.mark.parametrize("graphs", [False, True])
def test_exact_mode_in_float32_equals_the_oracle(graphs: bool) -> None:
    """Greedy rows, of which a drain of few is rounds of drafts."""
    full, rows = ScheduleSpec().build(LAYERS), requests(17, seed=3)
    decoder, library = Decoder(tiny_model("llama").cuda()), Decoder(tiny_model("llama"))
    assert decoder.prepare_for_gpu(kernels)
    budget = 4000 * page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
    engine = GpuExactEngine(
        decoder, full, STOP, drafter=Drafter(decoder, SCHEDULE), budget_bytes=budget, max_rows=40, graphs=graphs
    )
    for _ in range(3):  # the third time every graph is there
        got = generate(engine, rows, budget_bytes=2**40, max_rows=40, scheduler="refill")
        tokens = [list(completion.token_ids) for completion in got]
        assert tokens == oracle_answers(library, full, rows, STOP, tokens)
    assert engine.take_stats().accepted_tokens > 0


def behind(decoder: Decoder, schedule: Schedule, row: Request, response: list[int]) -> torch.Tensor:
    """The oracle's logits [len(response), V], each behind one token fewer of the response than the next."""
    return oracle_logits_each(decoder, schedule, row.prompt_ids, response[:-1]).float()


@pytest.mark.parametrize("spec", range(len(SPECS)))
@pytest.mark.parametrize("family", FUSED)
def test_logits_in_bfloat16_are_near_the_oracle_in_float32(
    family: str, spec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every depth of every schedule, of a ragged batch, whose tokens are the oracle's.

    The bound is twice what the library's own rounding comes to."""
    schedule = SPECS[spec].build(LAYERS)
    library = Decoder(tiny_model(family))
    engine = engine_of(family, torch.bfloat16, graphs=True, schedule=schedule)
    rows = [Request(row.prompt_ids, SamplingParams(max_new_tokens=14, ignore_eos=True)) for row in requests(5, 3)]
    wanted = [oracle(library, schedule, row, set()) for row in rows]
    held, rounded = (
        [behind(decoder, schedule, row, one) for row, one in zip(rows, wanted, strict=True)]
        for decoder in (library, Decoder(tiny_model(family).bfloat16()))
    )
    bound = 2 * max(float((one - want).abs().max()) for one, want in zip(rounded, held, strict=True))
    # by slot and number of tokens; the last slot is that of padding lanes
    tokens = torch.tensor([*wanted, wanted[0]], device="cuda")
    seen = torch.zeros(*tokens.shape, library.vocab_size, device="cuda")

    def forced(state: DeviceRows, slots: torch.Tensor, logits: torch.Tensor, variant: object) -> None:
        counts = state.counts[slots]
        seen[slots, counts] = logits.float()
        state.operations.finish(slots, tokens[slots, counts], None, state)

    monkeypatch.setattr(DeviceRows, "sample", forced)
    engine.open(5, 20, 14)
    engine.admit(rows)
    for _ in range(12):
        engine.step()
    engine.close()
    for place, want in enumerate(held):
        error = float((seen[place, :13].cpu() - want[:13]).abs().max())
        assert error < bound, f"{error:.3f}, the bound is {bound:.3f}"


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", ["llama", "opt", "olmo2"])
def test_8_bits_are_near_the_same_products_on_a_cpu(family: str, kind: Kind) -> None:
    """By torch's products of the GPU, in graphs, against plain torch; the log-probabilities of whole answers."""
    if kind == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("the GPU has no fp8")

    def engine(device: str) -> GpuEngine:
        decoder = Decoder(tiny_model(family).bfloat16().to(device))
        assert decoder.prepare_for_gpu(kernels if device == "cuda" else reference, EightBits(kind))
        budget = 4000 * page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
        return GpuEngine(decoder, SCHEDULE, STOP, budget_bytes=budget, max_rows=5)

    rows = [
        Request(row.prompt_ids, SamplingParams(max_new_tokens=14, logprobs=5, ignore_eos=True))
        for row in requests(5, 3)
    ]
    want, got = (generate(engine(device), rows, budget_bytes=2**40, max_rows=5) for device in ("cpu", "cuda"))
    assert difference(want, got) < 0.1
    greedy = [Request(row.prompt_ids, SamplingParams(max_new_tokens=14, ignore_eos=True), row.key) for row in rows]
    captured = engine("cuda")
    first, *others = (generate(captured, greedy, budget_bytes=2**40, max_rows=5) for _ in range(3))
    for again in others:  # the third time a step is one graph
        assert [one.token_ids for one in again] == [one.token_ids for one in first]


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_a_cache_of_8_bits_has_the_answers_of_its_reference(family: str, kind: Kind) -> None:
    """Greedy, in float32, a row alone and beside others, in graphs and without; the reference is plain torch on a CPU.

    A number between two codes may have either, so that one row in nine may differ."""
    if kind == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("the GPU has no fp8")

    def engine(device: str, rows: int, graphs: bool) -> GpuEngine:
        decoder = Decoder(tiny_model(family).to(device))
        assert decoder.prepare_for_gpu(kernels if device == "cuda" else reference)
        how: dict[str, Any] = {"budget_bytes": 2**22, "max_rows": rows, "graphs": graphs}
        return GpuEngine(decoder, SCHEDULE, STOP, kv_cache=kind, **how)

    asked = requests(9, seed=3)
    want = [one.token_ids for one in generate(engine("cpu", 5, False), asked, budget_bytes=2**40, max_rows=5)]
    for rows, graphs in ((5, False), (5, True), (1, True)):
        captured = engine("cuda", rows, graphs)
        for _ in range(3 if graphs else 1):  # the third time a step is one graph
            got = generate(captured, asked, budget_bytes=2**40, max_rows=rows, scheduler="refill")
            assert sum(one.token_ids != wanted for one, wanted in zip(got, want, strict=True)) <= 1


def test_long_prompts_in_chunks_and_shared_beginnings_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's attention over prompts one behind another, which the CPU's tests do not reach."""
    rows = [Request([*PREFIX, *row.prompt_ids], row.sampling, row.key) for row in requests(9, seed=4)]

    def first_logits(tokens: int, prefix: list[int]) -> torch.Tensor:
        for module in (prompts, prefill):
            monkeypatch.setattr(module, "CHUNK_TOKENS", tokens)
        engine = engine_of("llama", torch.bfloat16, graphs=False, max_rows=9)
        seen: list[torch.Tensor] = []
        sample = DeviceRows.sample

        def watched(state: DeviceRows, slots: torch.Tensor, logits: torch.Tensor, variant: Any) -> None:
            seen.append(logits.float())
            sample(state, slots, logits, variant)

        monkeypatch.setattr(DeviceRows, "sample", watched)
        engine.open(9, 60, 12)
        engine.admit(rows, prefix)
        engine.close()
        monkeypatch.setattr(DeviceRows, "sample", sample)
        return torch.cat(seen).cpu()

    want, rounded = (
        torch.stack([oracle_logits(library, SCHEDULE, list(row.prompt_ids), []).float() for row in rows])
        for library in (Decoder(tiny_model("llama")), Decoder(tiny_model("llama").bfloat16()))
    )
    bound = 2 * float((rounded - want).abs().max())
    for tokens, prefix in ((8192, []), (8, []), (8192, PREFIX), (8, PREFIX)):
        got = first_logits(tokens, prefix)
        error = float((got - want).abs().max())
        assert error < bound, f"{error:.3f}, the bound is {bound:.3f}"


def test_the_paged_engine_gives_the_library_engines_texts(tmp_path: Path) -> None:
    """The engine's half of an actor with a GPU: from a checkpoint to texts, greedy, in float32."""
    tiny = pytest.importorskip("tiny", reason="what makes a checkpoint is not installed", exc_type=ImportError)
    checkpoint = tiny.tiny_checkpoint(tmp_path / "checkpoint")
    column = {"prompt": [f"row {row}: {'word ' * (row % 7)}" for row in range(40)]}
    texts = [
        Generator(str(checkpoint), dtype="float32", device="cuda", engine=engine, cache_bytes=2**26, max_batch=16)(
            column
        )["generated_text"].tolist()
        for engine in ("library", "paged", "auto")
    ]
    assert texts[0] == texts[1] == texts[2]
    chosen = Generator(str(checkpoint), device="cuda")
    assert isinstance(chosen.engine, GpuEngine) and chosen.max_batch == 512 and chosen.cache_bytes > 2**30


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
