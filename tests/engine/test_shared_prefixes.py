"""Beginnings that some prompts share: computed once for their rows, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_cases import PREFIX, SPECS, STOP, answer, every_case, generate, with_prefix
from hypothesis import given
from hypothesis import strategies as st
from oracle import oracle, oracle_answers
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine import scheduler as module
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.scheduler import shared_prefixes
from actors.engine.types import Completion, Request, SamplingParams

SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
nested_prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12)


@pytest.fixture
def short_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_TOKENS", "LEAST_LONGER", "LEAST_SAVED"):
        monkeypatch.setattr(module, name, 1)


def computed(prompts: Sequence[tuple[int, ...]], prefixes: Sequence[tuple[int, ...]]) -> int:
    """Tokens computed: each prefix once, and the rest of each distinct prompt."""
    rest = {prompt: len(prompt) - len(prefix) for prompt, prefix in zip(prompts, prefixes, strict=True)}
    return sum(rest.values()) + sum(map(len, set(prefixes)))


@pytest.mark.usefixtures("short_beginnings")
@given(nested_prompts)
def test_every_prompt_begins_with_its_prefix_and_no_token_is_computed_more_often(
    prompts: list[tuple[int, ...]],
) -> None:
    prefixes = shared_prefixes(prompts)
    for prompt, found in zip(prompts, prefixes, strict=True):
        assert found == () or (len(found) < len(prompt) and tuple(prompt[: len(found)]) == found)
    assert computed(prompts, prefixes) <= computed(prompts, [()] * len(prompts))


@pytest.mark.usefixtures("short_beginnings")
@given(nested_prompts)
def test_no_length_of_all_beginnings_saves_more(prompts: list[tuple[int, ...]]) -> None:
    ours = computed(prompts, shared_prefixes(prompts))
    for length in range(1, min(map(len, prompts))):
        assert ours <= computed(prompts, [prompt[:length] for prompt in prompts])


@pytest.mark.usefixtures("short_beginnings")
def test_beginnings_of_beginnings() -> None:
    category = {name: [name] * 4 for name in (7, 8)}
    prompts = [(1, 2, *category[name], question) for name in (7, 8) for question in range(20, 24)]
    assert set(shared_prefixes(prompts)) == {(1, 2, 7, 7, 7, 7), (1, 2, 8, 8, 8, 8)}
    few = [(1, 2, 3, name) for name in range(10, 30)]
    assert set(shared_prefixes(few)) == {(1, 2, 3)}


def with_categories(count: int, categories: int, seed: int) -> list[Request]:
    chance = random.Random(seed)
    examples = [[chance.randrange(3, VOCAB) for _ in range(12)] for _ in range(categories)]
    rows = []
    for number in range(count):
        question = [chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 6))]
        beginning = examples[chance.randrange(categories)] if number % 5 else []
        rows.append(Request([*beginning, *question], SamplingParams(max_new_tokens=chance.randint(1, 9)), key=number))
    return rows


@pytest.mark.usefixtures("short_beginnings")
@pytest.mark.parametrize("scheduler", ["lock_step", "refill"])
@pytest.mark.parametrize("max_rows", [3, 8, 40])
def test_many_beginnings_change_no_token_and_are_computed_once(scheduler: str, max_rows: int) -> None:
    library = Decoder(tiny_model("llama"))
    engine = Engine(library, SCHEDULE, STOP)
    rows = with_categories(40, 4, seed=max_rows)
    tokens = {}
    for share in (False, True):
        got = generate(engine, rows, budget_bytes=2**26, max_rows=max_rows, share_prefixes=share, scheduler=scheduler)
        for row, one in zip(rows, got, strict=True):
            assert list(one.token_ids) == oracle(library, SCHEDULE, row, STOP, one.token_ids)
        tokens[share] = engine.take_stats().prompt_tokens
    assert tokens[True] <= tokens[False] - 12 * (32 - 4 - 40 // max_rows)  # a batch may begin amid a category


def plain(decoder: Decoder, spec: ScheduleSpec, rows: list[Request]) -> list[Completion]:
    engine = Engine(decoder, spec.build(LAYERS), STOP)
    return [answer(engine, [row])[0] for row in rows]


@pytest.mark.usefixtures("shared_by_few")
@every_case
def test_a_shared_prefix_changes_no_token(decoder: Decoder, library: Decoder, spec: int) -> None:
    schedule = SPECS[spec].build(LAYERS)
    rows = with_prefix(13, seed=1)
    engine = Engine(decoder, schedule, STOP)
    got = answer(engine, rows, 5)
    assert engine.stats.shared_prompt_tokens > len(PREFIX)
    tokens = [list(completion.token_ids) for completion in got]
    assert tokens == oracle_answers(library, schedule, rows, STOP, tokens)


def test_a_short_beginning_is_not_shared_nor_one_that_saves_little() -> None:
    rows = [(*range(15), 20 + row) for row in range(100)]
    assert set(shared_prefixes(rows)) == {()}
    longer = [(*range(16), 20 + row) for row in range(17)]
    assert set(shared_prefixes(longer)) == {tuple(range(16))}
    assert set(shared_prefixes(longer[:-1])) == {()}


def test_a_templates_beginning_is_not_divided_by_the_first_words_of_the_rows() -> None:
    template = tuple(range(100))
    words = [(*template, 200 + row % 3, 300 + row) for row in range(240)]
    assert set(shared_prefixes(words)) == {template}
    examples = {category: (*template, *[200 + category] * 32) for category in range(3)}
    assert set(shared_prefixes([(*examples[row % 3], 300 + row) for row in range(240)])) == set(examples.values())


def test_a_part_of_the_prompts_has_the_prefixes_of_all() -> None:
    prompts = [(*range(16), 20 + row) for row in range(40)]
    assert shared_prefixes(prompts[:3], prompts) == shared_prefixes(prompts)[:3] == [tuple(range(16))] * 3
    assert shared_prefixes(prompts[:3]) == [()] * 3


@pytest.mark.usefixtures("shared_by_few")
def test_a_beginning_is_computed_once() -> None:
    decoder = Decoder(tiny_model("llama"))
    engine = Engine(decoder, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), STOP)
    rows = with_prefix(13, seed=2)
    first = answer(engine, rows, 5)
    found = shared_prefixes([row.prompt_ids for row in rows])
    (prefix,) = set(found) - {()}
    assert list(prefix) in (PREFIX, PREFIX[:-1])  # one prompt is PREFIX itself, and keeps a token of its own
    shared, whole = sum(map(len, found)), sum(len(row.prompt_ids) for row in rows)
    stats = engine.take_stats()
    assert stats.shared_prompt_tokens == shared
    assert stats.prompt_tokens == whole - shared + len(prefix)
    assert answer(engine, rows, 5) == first
    assert engine.take_stats().prompt_tokens == whole - shared  # kept since the call before
    other = answer(engine, rows, 5, share_prefixes=False)
    assert engine.take_stats().prompt_tokens == whole
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
    got = answer(engine, rows, 12)
    assert passes == [3]
    assert [one.token_ids for one in got] == [one.token_ids for one in alone]
    assert len({one.token_ids for one in got}) > 3
    assert (engine.stats.prompt_tokens, engine.stats.shared_prompt_tokens) == (6, 18)
