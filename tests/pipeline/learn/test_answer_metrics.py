"""Fidelity, length ratio and repetition, from counts: the damages that each of them finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.generate.answer_checks import repeated_ngrams
from pipeline.learn.evaluate.intervals import Bootstrap, paired_scores
from pipeline.learn.evaluate.metrics import METRICS, answer_statistics

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
    found = paired_scores({name: statistics(answers) for name, answers in lines.items()}, "1x", Bootstrap(samples=100))
    assert [found[name]["length_ratio"].loss for name in lines] == [0, 0.5, 1]
    assert [found[name]["repetition"].loss for name in lines] == [0, 0, 0]
