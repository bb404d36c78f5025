"""Exact mode of the paged engine, without a GPU: in fp32 token for token the uncached oracle at full depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import STOP, any_schedule, requests, with_prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers
from test_gpu_engine import FUSED, PREFIX, answers, bytes_of, fused
from tiny_models import LAYERS, tiny_model

from actors.engine.decoder import Decoder
from actors.engine.exact.engine import Drafter
from actors.engine.gpu import buffers
from actors.engine.gpu.exact import GpuExactEngine
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.types import Request, SamplingParams

FULL = ScheduleSpec().build(LAYERS)
HALF = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)


def exact(
    decoder: Decoder,
    drafts: Schedule = HALF,
    *,
    pages: int = 4000,
    max_rows: int = 48,
    stop: Sequence[int] | set[int] = STOP,
    drafter: Decoder | None = None,
    **how: Any,
) -> GpuExactEngine:
    own = Drafter(drafter or decoder, drafts)
    return GpuExactEngine(
        decoder, FULL, stop, drafter=own, budget_bytes=bytes_of(decoder, pages), max_rows=max_rows, **how
    )


@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("family", FUSED)
def test_answers_equal_the_oracle_at_full_depth(family: str, scheduler: str) -> None:
    rows = requests(5, seed=3) + requests(6, seed=3, sampled=True)
    library, engine = Decoder(tiny_model(family)), exact(fused(family))
    got = answers(engine, rows, scheduler)
    assert [list(tokens) for tokens in got] == oracle_answers(library, FULL, rows, STOP, got)
    stats = engine.take_stats()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens < stats.verified_tokens
    assert stats.decode_steps == sum(len(tokens) - 1 for tokens in got)
    assert stats.layer_steps == stats.full_layer_steps == LAYERS * stats.decode_steps


@settings(max_examples=15, deadline=None)
@given(
    drafts=any_schedule(),
    count=st.integers(1, 6),
    max_rows=st.integers(1, 60),
    read_every=st.integers(1, 6),
    pages=st.sampled_from([4000, 4000, 150]),
    seed=st.integers(0, 999),
)
def test_any_drafts_equal_the_oracle(
    drafts: Schedule, count: int, max_rows: int, read_every: int, pages: int, seed: int
) -> None:
    """However many rows are in flight, how seldom the host polls, and where pages run out."""
    rows = requests(9, seed, sampled=True)
    engine = exact(fused("llama"), drafts, count=count, max_rows=max_rows, read_every=read_every, pages=pages)
    got = answers(engine, rows)
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("llama")), FULL, rows, STOP, got)


def test_rows_that_share_a_beginning() -> None:
    rows = with_prefix(9, seed=1)
    got = answers(exact(fused("qwen3")), rows, prefix=PREFIX)
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("qwen3")), FULL, rows, STOP, got)


def test_perfect_drafts_are_all_accepted_and_save_steps() -> None:
    """Drafts of all layers are full depth's: a round yields 4 tokens of each row, and the host polls fewer rounds."""
    rows = [
        Request([4 + row, 9], SamplingParams(max_new_tokens=25, temperature=row % 2, ignore_eos=True), row)
        for row in range(4)
    ]
    engine = exact(fused("llama"), FULL, stop=())
    answers(engine, rows)
    stats = engine.take_stats()
    assert stats.drafted_tokens == stats.accepted_tokens == 4 * 18 and stats.verified_tokens == 4 * 24


def test_rows_keep_their_pages_up_to_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they may have come to it since the last poll, but have not: others would write into their pages."""
    monkeypatch.setattr(buffers, "LEAST_TOKENS", 8)
    rows = [
        Request(row.prompt_ids, SamplingParams(max_new_tokens=32 if place % 3 else 16, ignore_eos=True), row.key)
        for place, row in enumerate(requests(12, seed=1))
    ]
    got = answers(exact(fused("llama"), max_rows=24, pages=60), rows)
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("llama")), FULL, rows, STOP, got)


def test_a_drafter_with_other_weights_changes_no_answer() -> None:
    other = fused("llama")
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    rows = requests(7, seed=5, sampled=True)
    got = answers(exact(fused("llama"), drafter=other), rows)
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("llama")), FULL, rows, STOP, got)
