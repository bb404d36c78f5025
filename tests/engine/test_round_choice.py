"""Exact mode on a GPU drafts only where it is faster: laws of `RoundChoice` in made-up time; the engine's answers."""

from __future__ import annotations

import random

import pytest
from engine_cases import STOP, requests
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_answers
from test_gpu_engine import answers, fused
from test_gpu_exact import FULL, exact
from tiny_models import tiny_model

from actors.engine.decoder import Decoder
from actors.engine.gpu.round_choice import PROBE, RoundChoice
from actors.engine.types import Request, SamplingParams

WINDOWS = 2000


def played(choice: RoundChoice, rows: int, gain: float, windows: int, noise: float = 0.0) -> float:
    """Tokens a second over those of plain steps, which make one each; rounds make three, `gain` a second."""
    rng, tokens, seconds = random.Random(0), 0.0, 0.0
    for _ in range(windows):
        rounds = choice.rounds(rows)
        made, lasted = (3.0, 3.0 / gain) if rounds else (1.0, 1.0)
        lasted *= 1 + noise * rng.random()
        choice.measured(rows, rounds, made, lasted)
        tokens, seconds = tokens + made, seconds + lasted
    return tokens / seconds


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 600), gain=st.floats(0.4, 3.0))
def test_it_never_loses_and_finds_what_pays(rows: int, gain: float) -> None:
    rate = played(RoundChoice(), rows, gain, WINDOWS)
    assert rate >= 0.98
    assert rate >= 0.96 * gain


def test_noise_of_a_tenth_does_not_mislead_it() -> None:
    assert played(RoundChoice(), 8, 0.8, WINDOWS, noise=0.1) >= 0.97 / 1.05
    assert played(RoundChoice(), 8, 1.5, WINDOWS, noise=0.1) >= 1.4 / 1.05


def test_it_follows_what_changes_and_tells_numbers_of_rows_apart() -> None:
    choice = RoundChoice()
    played(choice, 4, 0.5, PROBE)
    assert not choice.rounds(4)
    played(choice, 4, 2.0, 40 * PROBE)
    assert choice.rounds(4)
    played(choice, 64, 0.5, PROBE)
    assert choice.rounds(4) and not choice.rounds(64)


class Alternating(RoundChoice):
    """Rounds in every second window, whatever they yield."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: list[tuple[int, bool, float]] = []
        self._next = False

    def rounds(self, rows: int) -> bool:
        self._next = not self._next
        return self._next

    def measured(self, rows: int, rounds: bool, tokens: float, seconds: float) -> None:
        assert seconds > 0
        self.windows.append((rows, rounds, tokens))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), read_every=st.integers(1, 4), max_rows=st.integers(4, 40))
def test_answers_are_the_same_whatever_is_chosen(seed: int, read_every: int, max_rows: int) -> None:
    rows = requests(8, seed, sampled=True)
    engine = exact(fused("llama"), choice=Alternating(), read_every=read_every, max_rows=max_rows)
    got = answers(engine, rows)
    assert [list(tokens) for tokens in got] == oracle_answers(Decoder(tiny_model("llama")), FULL, rows, STOP, got)


@pytest.mark.parametrize("rounds", [True, False])
def test_a_step_that_rides_in_a_prefill_has_one_token_and_no_kind(rounds: bool) -> None:
    choice = Alternating()
    choice._next = not rounds
    engine = exact(fused("llama"), FULL, stop=(), choice=choice, read_every=2)
    rows = [Request([4 + row, 9], SamplingParams(max_new_tokens=64, ignore_eos=True), row) for row in range(2)]
    engine.open(2, 2, 64)
    engine.admit(rows[:1])
    engine.step()
    made = 4 if rounds else 1
    assert (engine.rows[0].position, engine._window.kinds) == (made, {rounds})
    engine.admit(rows[1:])  # ends the window
    assert engine.stepped
    assert (engine.rows[0].position, engine._since, engine._window._ended) == (made + 1, 0, (2, {rounds}))
    engine.close()


def test_windows_are_measured_by_their_own_kind() -> None:
    """Drafts of all layers are all accepted: a round has 4 tokens of a row, a plain step one."""
    rows = [Request([4 + row, 9], SamplingParams(max_new_tokens=64, ignore_eos=True), row) for row in range(4)]
    choice = Alternating()
    answers(exact(fused("llama"), FULL, stop=(), choice=choice, read_every=2), rows)
    kinds = {kind for _, kind, _ in choice.windows}
    assert kinds == {False, True}
    assert {tokens for _, kind, tokens in choice.windows if not kind} == {2.0}
    assert {tokens for _, kind, tokens in choice.windows if kind} == {8.0}
    assert {count for count, _, _ in choice.windows} == {4}
