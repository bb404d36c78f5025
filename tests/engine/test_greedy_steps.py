"""Greedy steps in one native call: the tokens of the calls for each part, one after another."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from engine_cases import STOP, answer, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, LAYERS, MODELS, WINDOWLESS, tiny_model

from actors.engine.cpu import library
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import Request, SamplingParams

BF16, FULL, MOST_STEPS = torch.bfloat16, ScheduleSpec().build(LAYERS), 8
native = pytest.mark.skipif(not library.quantizes(BF16, torch.device("cpu")), reason="no kernel screens a head")
ALL = {**MODELS, **WINDOWLESS}
FAMILIES = [name for name, (kind, _) in ALL.items() if kind in ("llama", "opt", "mistral", "qwen2", "qwen3")]
FAMILIES += [name for name, (kind, _) in ALL.items() if kind in ("phi3", "olmo2", "smollm3")]
WITHOUT = ("opt-post-norm", "gemma", "gpt2")  # a projection behind the last layer; layers of the library


@functools.cache
def prepared(family: str) -> Decoder:
    decoder = Decoder(tiny_model(family).to(BF16))
    decoder.prepare_for_cpu()
    return decoder


@native
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT])
@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12) | st.integers(CONTEXT - 12, CONTEXT - 2), min_size=1, max_size=5),
    layers=st.lists(st.booleans(), min_size=LAYERS, max_size=LAYERS),
    count=st.integers(1, MOST_STEPS),
    seed=st.integers(0, 10**6),
)
@torch.inference_mode()
def test_steps_in_one_call_are_those_of_their_parts(
    family: str, lengths: list[int], layers: list[bool], count: int, seed: int
) -> None:
    """Of some rows, by any layers, within the context and behind it."""
    decoder, generator = prepared(family), torch.Generator().manual_seed(seed)
    steps = decoder.greedy_steps
    assert steps is not None
    engine = Engine(decoder, FULL, ())
    engine.open(len(lengths), max(lengths), MOST_STEPS + 2)
    prompts = [torch.randint(3, decoder.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    engine.admit([Request(prompt, SamplingParams(max_new_tokens=2), key=row) for row, prompt in enumerate(prompts)])
    cache, members = engine.cache, [row for row in range(len(lengths)) if (seed >> row) % 2 or row == 0]
    assert cache is not None
    per_layer, columns = [len(members) * runs for runs in layers], [[prompts[row][0] for row in members]]
    last = decoder.context_length - 1
    for number in range(count):
        places = [lengths[row] + number for row in members]
        cache.begin_step(places, decoder.device, members)
        ids, at = torch.tensor(columns[-1])[:, None], torch.tensor(places).clamp(max=last)[:, None]
        columns.append(decoder.likeliest(decoder.step(ids, at, per_layer, cache)))
    cache.begin_step([lengths[row] for row in members], decoder.device, members)
    found = steps(columns[0], per_layer, cache, count=count)
    assert min(found[-1]) >= 0
    for row in range(len(members)):
        told = next((step for step in range(count) if found[step][row] < 0), count)  # later tokens follow from another
        assert [column[row] for column in found[:told]] == [column[row] for column in columns[1 : told + 1]]
    engine.close()


@native
def test_a_head_that_the_screen_does_not_decide_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take the whole head then."""
    undecided, rows = Decoder(tiny_model("llama").to(BF16)), requests(6, seed=4, most_new=12)
    rows = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in rows]
    undecided.prepare_for_cpu()
    monkeypatch.setattr("actors.engine.cpu.screen.UNDECIDED", 10**9)  # no candidate may be left
    want = [one.token_ids for one in answer(Engine(prepared("llama"), FULL, STOP, cumulative_logprob=False), rows)]
    assert [one.token_ids for one in answer(Engine(undecided, FULL, STOP, cumulative_logprob=False), rows)] == want
    assert undecided.screen is not None and undecided.screen.undecided == undecided.screen.rows > 0


@native
def test_who_has_no_greedy_steps_is_asked_for_none() -> None:
    decoder = Decoder(tiny_model("llama").to(BF16))
    assert decoder.greedy_steps is None
    decoder.prepare_for_cpu(int8=True)
    assert decoder.greedy_steps is None  # its head has 8 bits: nothing is to screen
    for family in WITHOUT:
        assert prepared(family).greedy_steps is None


@native
@torch.inference_mode()
def test_a_token_or_slot_outside_is_refused() -> None:
    decoder = prepared("llama")
    engine = Engine(decoder, FULL, ())
    engine.open(1, 4, 3)
    engine.admit([Request([5, 6], SamplingParams(max_new_tokens=2), key=0)])
    steps = decoder.greedy_steps
    assert engine.cache is not None and steps is not None
    for token, place in ((decoder.vocab_size, 2), (-1, 2), (5, 6)):
        engine.cache.begin_step([place], decoder.device, [0])
        with pytest.raises(AssertionError, match="outside"):
            steps([token], [1] * LAYERS, engine.cache, count=2)
    engine.close()
