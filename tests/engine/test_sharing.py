"""Prompts that are computed once for many rows give each the answer it has alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine_cases import PREFIX, SPECS, STOP, every_case, with_prefix
from oracle import oracle_answers
from tiny_models import LAYERS, tiny_model

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Completion, Request, SamplingParams


def plain(decoder: Decoder, spec: ScheduleSpec, rows: list[Request]) -> list[Completion]:
    engine = Engine(decoder, spec.build(LAYERS), STOP)
    return [generate(engine, [row], budget_bytes=2**40, max_rows=1)[0] for row in rows]


@every_case
def test_a_shared_prefix_changes_no_token(decoder: Decoder, library: Decoder, spec: int) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = with_prefix(13, seed=1)
    got = generate(Engine(decoder, schedule, STOP), rows, budget_bytes=2**40, max_rows=5, prefix=PREFIX)
    tokens = [list(completion.token_ids) for completion in got]
    assert tokens == oracle_answers(library, schedule, rows, STOP, tokens)


def test_a_beginning_is_computed_once() -> None:
    decoder = Decoder(tiny_model("llama"))
    engine = Engine(decoder, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), STOP)
    rows = with_prefix(13, seed=2)
    first = generate(engine, rows, budget_bytes=2**40, max_rows=5, prefix=PREFIX)
    sharing = [row for row in rows if list(row.prompt_ids[:17]) == PREFIX and len(row.prompt_ids) > 17]
    whole = sum(len(row.prompt_ids) for row in rows)
    stats = engine.take_stats()
    assert stats.shared_prompt_tokens == 17 * len(sharing)
    assert stats.prompt_tokens == whole - 17 * len(sharing) + 17
    assert generate(engine, rows, budget_bytes=2**40, max_rows=5, prefix=PREFIX) == first
    assert engine.take_stats().prompt_tokens == whole - 17 * len(sharing)
    other = generate(engine, rows, budget_bytes=2**40, max_rows=5, prefix=PREFIX[:9])
    assert [one.token_ids for one in other] == [one.token_ids for one in first]


def test_samples_of_a_prompt_share_its_pass(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
    sampling = SamplingParams(max_new_tokens=10, temperature=1.0)
    rows = [Request([5 + row, 9, 11][: 1 + row], sampling, 100 * row + k) for row in range(3) for k in range(4)]
    passes = []
    alone = plain(decoder, ScheduleSpec(speedup=2, horizon=6), rows)
    engine = Engine(decoder, schedule, STOP)
    whole = engine.executor.prefill

    def counting(prompts: Any, *rest: Any) -> Any:
        passes.append(len(prompts))
        return whole(prompts, *rest)

    monkeypatch.setattr(engine.executor, "prefill", counting)
    got = generate(engine, rows, budget_bytes=2**40, max_rows=12)
    assert passes == [3]
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in got}) > 3
    assert (engine.stats.prompt_tokens, engine.stats.shared_prompt_tokens) == (6, 18)
    got = generate(Engine(decoder, schedule, STOP), rows, budget_bytes=2**40, max_rows=5, prefix=[5])
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
