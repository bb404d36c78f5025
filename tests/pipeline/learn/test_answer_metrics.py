"""Fidelity, length ratio and repetition, from counts: the damages that each of them finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.generate.answer_checks import repeated_ngrams
from pipeline.learn.evaluate.intervals import paired_scores
from pipeline.learn.evaluate.line_statistics import by_chance
from pipeline.learn.evaluate.metrics import METRICS, answer_statistics, kappa_statistics
from pipeline.learn.evaluate.results import Line, Score, remarks, uselessness

OWN = [list(range(row, row + 20)) for row in range(8)]
NONE = np.zeros(len(OWN))


def scores(answers: list[list[int]], regret: float = 0.0) -> dict[str, float]:
    sums = answer_statistics(answers, OWN, NONE + regret).sum(axis=0, keepdims=True)
    return {name: float(METRICS[name].score(sums)[0]) for name in ("fidelity", "length_ratio", "repetition")}


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_repeated_ngram_is_one_that_stands_before(tokens: list[int]) -> None:
    starts = range(len(tokens) - 3)
    seen = [any(tokens[start : start + 4] == tokens[early : early + 4] for early in range(start)) for start in starts]
    assert repeated_ngrams(tokens) == (sum(seen), len(seen))


def test_each_damage_costs_its_factor() -> None:
    assert scores(OWN) == {"fidelity": 100, "length_ratio": 1, "repetition": 0}
    assert scores([row[:10] for row in OWN]) == {"fidelity": 50, "length_ratio": 0.5, "repetition": 0}
    # as likely as own choices, since a language model expects a text that repeats to go on so
    twice = scores([row + row for row in OWN])
    assert twice["repetition"] == pytest.approx(100 * 17 / 37)
    assert twice["fidelity"] == pytest.approx(50 * 20 / 37)
    # tokens half as likely as the likeliest ones
    assert scores(OWN, 20 * np.log(2))["fidelity"] == pytest.approx(50)
    assert scores([[1, 2] for _ in OWN])["repetition"] == 0  # without a 4-gram


def test_other_lengths_and_other_repetition_are_losses_in_both_directions() -> None:
    def statistics(answers: list[list[int]]) -> dict[str, np.ndarray]:
        return dict.fromkeys(("length_ratio", "repetition"), answer_statistics(answers, OWN, NONE))

    lines = {"1x": OWN, "short": [row[:10] for row in OWN], "long": [[*row, *range(50, 70)] for row in OWN]}
    found = paired_scores({name: statistics(answers) for name, answers in lines.items()}, "1x")
    assert [found[name]["length_ratio"].loss for name in lines] == [0, 0.5, 1]
    assert [found[name]["repetition"].loss for name in lines] == [0, 0, 0]


def test_chance_is_the_commonest_label_or_another_rows_text() -> None:
    answers: list[Any] = [SimpleNamespace(generated_text=text) for text in ("joy", "anger", "joy", "fear")]
    assert [one.generated_text for one in by_chance(answers, labels=True)] == ["joy"] * 4
    assert by_chance(answers, labels=False) == [*answers[1:], answers[0]]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abcd")), min_size=2, max_size=30))
def test_kappa_is_cohens(pairs: list[tuple[str, str]]) -> None:
    full, own = ([pair[side] for pair in pairs] for side in (0, 1))
    rows = len(pairs)
    expected = sum(full.count(label) * own.count(label) for label in "abcd") / rows**2
    agreed = sum(one == other for one, other in pairs) / rows
    sums = kappa_statistics(own, full).sum(axis=0, keepdims=True)
    want = 0.0 if expected == 1 else (agreed - expected) / (1 - expected)
    assert METRICS["kappa"].score(sums)[0] == pytest.approx(want)


def test_a_line_at_or_below_chance_is_called_useless() -> None:
    def line(value: float) -> Line:
        return Line("2x", 2.0, "full", 2.0, 0.1, {"agreement_exact": Score(value, 0, 0)}, warnings=("9 are empty",))

    chance = {"agreement_exact": Score(61.0, 0, 0)}
    said = "2x is useless: its same answer of 61.0 is at or below chance, 61.0"
    assert uselessness(line(61.0), chance, "agreement_exact") == uselessness(line(61.0), chance, "token_kl") == said
    assert uselessness(line(61.5), chance, "agreement_exact") is uselessness(line(61.0), {}, "token_kl") is None
    assert remarks([line(61.0)], chance, "agreement_exact") == [said, "2x: 9 are empty"]
