"""A cache of 8 bits on the paged engine, without a GPU: answers against the definition's oracle, memory, refusals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import PREFIX, SPECS, STOP, any_schedule, requests, with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers, oracle_logits_each
from rounded_cache import rounded_answer, rounded_logits
from test_gpu_engine import FUSED, fused
from tiny_models import LAYERS, tiny_model

from actors.engine import build
from actors.engine.checkpoint.compressed import LIMITS, Kind
from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.exact.engine import Drafter
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.exact import GpuExactEngine
from actors.engine.gpu.pages import PAGE_TOKENS, PagedCache, page_bytes, row_pages, token_bytes
from actors.engine.gpu.products import DTYPES
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request
from actors.generator import Generator

KINDS = st.sampled_from(list(LIMITS))
SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
UNPENALIZED = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# root mean square of an error of logits, in their standard deviations: random weights magnify what is rounded
BOUNDS: dict[Kind, float] = {"int8": 0.08, "fp8": 0.3}


def engine_of(decoder: Decoder, schedule: Schedule, kind: Kind | None, pages: int = 4000, **how: Any) -> GpuEngine:
    itemsize = 1 if kind else decoder.dtype.itemsize
    budget = pages * page_bytes(decoder.kv_heads, decoder.head_dim, itemsize)
    return GpuEngine(decoder, schedule, STOP, budget_bytes=budget, **{"max_rows": 5, "kv_cache": kind, **how})


def answers(engine: GpuEngine, rows: list[Request], scheduler: str = "refill", **how: Any) -> list[list[int]]:
    done = generate(engine, rows, budget_bytes=2**40, max_rows=engine.max_rows, scheduler=scheduler, **how)
    assert engine._run is not None and engine._run.cache.free == engine.pages
    assert all(one.error is None for one in done)
    return [list(one.token_ids) for one in done]


def same(family: str, schedule: Schedule, rows: list[Request], kind: Kind, got: list[list[int]], ties: int = 1) -> None:
    """The oracle's tokens; in at most so many rows a number lay between two codes, and both tokens are as likely."""
    library = Decoder(tiny_model(family))
    wanted = [rounded_answer(library, schedule, row, STOP, kind) for row in rows]
    apart = [place for place, (one, want) in enumerate(zip(got, wanted, strict=True)) if one != want]
    assert len(apart) <= ties
    for place in apart:
        one, want = got[place], wanted[place]
        at = next(number for number, pair in enumerate(zip(one, want, strict=False)) if pair[0] != pair[1])
        logits = rounded_logits(library, schedule, rows[place].prompt_ids, want[:at], kind)[-1]
        assert rows[place].sampling.temperature or abs(float(logits[one[at]] - logits[want[at]])) < 0.02 * logits.std()


def test_the_oracle_without_rounding_is_the_uncached_one() -> None:
    for family, spec in (("llama", 1), ("opt", 3), ("olmo2", 7)):
        library, schedule = Decoder(tiny_model(family)), SPECS[spec].build(LAYERS)
        rows = requests(6, seed=3)
        got = [rounded_answer(library, schedule, row, STOP, None) for row in rows]
        assert got == oracle_answers(library, schedule, rows, STOP, got)


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", FUSED)
def test_logits_are_near_those_of_a_whole_cache(family: str, kind: Kind) -> None:
    library = Decoder(tiny_model(family))
    for spec, row in itertools.product((0, 1), requests(3, seed=7)):
        schedule = SPECS[spec].build(LAYERS)
        response = [(5 * place) % 90 + 3 for place in range(20)]
        whole = oracle_logits_each(library, schedule, row.prompt_ids, response)
        found = rounded_logits(library, schedule, row.prompt_ids, response, kind)
        torch.testing.assert_close(found[0], whole[0], rtol=1e-4, atol=1e-5)  # of the prompt's own pass
        error = (found - whole).square().mean().sqrt() / whole.std()
        assert 0 < error < BOUNDS[kind], float(error)


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", FUSED)
def test_greedy_rows_equal_the_oracle(family: str, kind: Kind, scheduler: str) -> None:
    rows = requests(9, seed=3)
    engine = engine_of(fused(family), SCHEDULE, kind)
    got = answers(engine, rows, scheduler)
    assert engine._run is not None and engine._run.cache.memory.keys.dtype == DTYPES[kind]
    same(family, SCHEDULE, rows, kind, got)


@settings(max_examples=15, deadline=None)
@given(
    schedule=any_schedule(),
    kind=KINDS,
    max_rows=st.integers(1, 9),
    read_every=st.integers(1, 6),
    pages=st.sampled_from([4000, 90]),
    scheduler=st.sampled_from(["lock_step", "refill"]),
    seed=st.integers(0, 99),
)
def test_what_a_row_draws_hangs_on_no_other(
    schedule: Schedule, kind: Kind, max_rows: int, read_every: int, pages: int, scheduler: str, seed: int
) -> None:
    """Greedy and sampled rows, with others beside them, preempted or not: each is its own oracle's."""
    rows = [
        Request(row.prompt_ids, row.sampling.merged(UNPENALIZED), row.key) for row in requests(7, seed, sampled=True)
    ]
    engine = engine_of(fused("llama"), schedule, kind, pages, max_rows=max_rows, read_every=read_every)
    same("llama", schedule, rows, kind, answers(engine, rows, scheduler))


def test_preempted_rows_come_to_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for the longest row and little more, and rows admitted as if none in flight would grow."""
    found: list[int] = []
    take = GpuEngine.take_preempted

    def counted(engine: GpuEngine) -> list[int]:
        tickets = take(engine)
        found.extend(tickets)
        return tickets

    def trusting(engine: GpuEngine, waiting: Sequence[Request], prefixes: Any) -> int:
        assert engine._run is not None
        needed = [row_pages(SCHEDULE, len(one.prompt_ids), 6, 4) for one in waiting]
        return sum(total <= engine._run.cache.free for total in itertools.accumulate(needed))

    monkeypatch.setattr(GpuEngine, "take_preempted", counted)
    monkeypatch.setattr(GpuEngine, "admission_estimate", trusting)
    rows = requests(16, 1, most_new=40)
    rows = [Request(row.prompt_ids, row.sampling.merged({"ignore_eos": True}), row.key) for row in rows]
    needed = [row_pages(SCHEDULE, len(row.prompt_ids), row.sampling.max_new_tokens + 8, 4) for row in rows]
    engine = engine_of(fused("llama"), SCHEDULE, "int8", max(needed) + 3, max_rows=8)
    same("llama", SCHEDULE, rows, "int8", answers(engine, rows))
    assert found


@pytest.mark.parametrize("kind", LIMITS)
def test_copies_of_a_shared_beginning_are_rounded_alike(kind: Kind) -> None:
    rows = with_prefix(11, seed=1)
    for prefix in (PREFIX, ()):
        same("llama", SCHEDULE, rows, kind, answers(engine_of(fused("llama"), SCHEDULE, kind), rows, prefix=prefix))


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("family", ["llama", "opt-post-norm"])
def test_exact_mode_has_full_depths_answers_over_the_same_cache(family: str, kind: Kind) -> None:
    full = ScheduleSpec().build(LAYERS)
    rows = [Request(row.prompt_ids, row.sampling.merged(UNPENALIZED), row.key) for row in requests(9, 3, sampled=True)]
    decoder = fused(family)
    engine = GpuExactEngine(
        decoder, full, STOP, drafter=Drafter(decoder, SCHEDULE), budget_bytes=2**22, max_rows=48, kv_cache=kind
    )
    same(family, full, rows, kind, answers(engine, rows))
    assert engine.take_stats().accepted_tokens > 0


@given(st.integers(1, 40), st.integers(1, 8), st.sampled_from([8, 64, 80, 128]), KINDS)
def test_the_bytes_of_pages_are_those_of_codes_and_scales(pages: int, kv_heads: int, size: int, kind: Kind) -> None:
    shape: dict[str, Any] = {
        "kv_heads": kv_heads,
        "head_dim": size,
        "dtype": DTYPES[kind],
        "device": torch.device("cpu"),
    }
    cache = PagedCache(SCHEDULE, 2, pages, 20, 20, **shape)
    assert cache.bytes == (pages + 1) * page_bytes(kv_heads, size, 1)
    assert page_bytes(kv_heads, size, 1) == PAGE_TOKENS * token_bytes(kv_heads, size, 1)


def test_the_same_memory_holds_almost_twice_the_rows() -> None:
    """Llama-3-8B's pages; and an engine admits by its own bytes."""
    assert (page_bytes(8, 128, 2), page_bytes(8, 128, 1)) == (65_536, 33_792)
    decoder = fused("llama")
    plain, codes = (
        GpuEngine(decoder, SCHEDULE, STOP, budget_bytes=2**18, max_rows=99, kv_cache=kind) for kind in (None, "int8")
    )
    ratio = 4 * decoder.head_dim / (decoder.head_dim + 4)  # float32 against codes and a scale
    assert codes.pages == pytest.approx(ratio * plain.pages, rel=0.01)
    assert codes.row_bytes(20, 14) * ratio == plain.row_bytes(20, 14) and codes.token_bytes * ratio == plain.token_bytes
    rows = [Request([5] * 60, requests(1, 1)[0].sampling.merged({"max_new_tokens": 40}), key) for key in range(99)]
    admitted = []
    for engine in (plain, codes):
        engine.open(99, 60, 40)
        admitted.append(engine.admission_estimate(rows))
        assert admitted[-1] == engine.pages // row_pages(SCHEDULE, 60, 48, 4)
        engine.close()
        assert engine.at(ScheduleSpec().build(LAYERS)).token_bytes == engine.token_bytes
    assert 1.9 * admitted[0] < admitted[1] < 99


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({}, "only the paged engine on a GPU has it; leave kv_cache out"),
        ({"engine": "library"}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"dtype": "float16"}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"compile": True}, "kv_cache = 'int8' is for the paged engine in bfloat16"),
        ({"kv_cache": "int4"}, "kv_cache = 'int4': must be one of int8, fp8"),
    ],
)
def test_a_generator_without_such_a_cache_says_so_before_it_loads(
    tmp_path: Path, how: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = pytest.importorskip("tiny_checkpoint", reason="what makes one is not installed", exc_type=ImportError)
    checkpoint = tiny.tiny_checkpoint(tmp_path / "model")
    monkeypatch.setattr(build, "load_decoder", lambda *given, **more: pytest.fail("weights were read"))
    with pytest.raises(UserError, match=re.escape(line)):
        Generator(str(checkpoint), **{"device": "cpu", "kv_cache": "int8", **how})


def test_a_gpu_without_fp8_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    plain = build.EngineSettings("paged", "bfloat16", "cuda", False, None, None, False)
    build.check_cache(replace(plain, kv_cache="int8"), torch.device("cuda"), paged=True)
    with pytest.raises(UserError, match=r"^kv_cache = 'fp8' needs a GPU of compute capability 8\.9 .*"):
        build.check_cache(replace(plain, kv_cache="fp8"), torch.device("cuda"), paged=True)
