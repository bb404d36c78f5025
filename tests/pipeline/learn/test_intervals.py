"""Intervals: a resampled corpus metric is that metric of the resampled corpus; losses are paired."""

from __future__ import annotations

import random

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pipeline.learn.evaluate import intervals
from pipeline.learn.evaluate.intervals import paired_scores, resampled_counts, resampled_sums
from pipeline.learn.evaluate.metrics import (
    METRICS,
    bleu_statistics,
    exact_match_statistics,
    mean_statistics,
    rouge_l_statistics,
    same_statistics,
)

WORDS = ["the", "Eagle", "serves", "French", "food,", "near", "the", "river.", "It's", "a", "pub!", "£20-25"]


def corpus(seed: int, rows: int) -> tuple[list[str], list[list[str]]]:
    """Texts near to one of one to three references each."""
    rng = random.Random(seed)
    texts, references = [], []
    for _ in range(rows):
        each = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(rng.randint(1, 3))]
        words = rng.choice(each).split()
        texts.append(
            " ".join(word if rng.random() < 0.7 else rng.choice(WORDS) for word in words[: rng.randint(0, 12)])
        )
        references.append(each)
    return texts, references


def sacrebleu_score(texts: list[str], references: list[list[str]]) -> float:
    streams = [[one[place] if place < len(one) else None for one in references] for place in range(3)]
    return sacrebleu.BLEU(lowercase=True, tokenize="13a").corpus_score(texts, streams).score  # type: ignore[arg-type]


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_a_resampled_bleu_is_sacrebleus_own_of_the_resampled_corpus(seed: int, rows: int) -> None:
    texts, references = corpus(seed, rows)
    statistics = bleu_statistics(texts, references)
    counts = resampled_counts(rows, 4, np.random.default_rng(seed))
    assert (counts.sum(axis=1) == rows).all()
    found = METRICS["bleu"].score(resampled_sums(statistics, 4, seed))
    for one, score in zip(counts.astype(int), found, strict=True):
        drawn = [row for row in range(rows) for _ in range(one[row])]
        want = sacrebleu_score([texts[row] for row in drawn], [references[row] for row in drawn])
        assert score == pytest.approx(want, abs=1e-9)


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=30), lost=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_losses_are_paired(values: list[float], lost: float) -> None:
    """A line that loses the same on every row loses exactly that in every sample, however much rows differ."""
    full = mean_statistics(np.array(values))
    worse = full - np.array([lost, 0])
    scores = paired_scores({"1x": {"rouge_l": full}, "2x": {"rouge_l": worse}}, "1x")
    own, two = scores["1x"]["rouge_l"], scores["2x"]["rouge_l"]
    assert (own.loss, own.loss_low, own.loss_high) == (0, 0, 0)
    assert (two.loss, two.loss_low, two.loss_high) == pytest.approx([100 * lost] * 3, abs=1e-9)
    assert own.value == pytest.approx(100 * float(np.mean(values)))
    assert own.low <= own.high


def test_worse_is_positive_also_where_lower_is_better() -> None:
    tokens = np.full(20, 5.0)
    full = np.stack([np.full(20, 1.0), tokens], axis=1)
    line = np.stack([np.linspace(1.5, 2.5, 20), tokens], axis=1)
    lines = {"1x": {"token_kl": full, "perplexity": full}, "2x": {"token_kl": line, "perplexity": line}}
    found = paired_scores(lines, "1x")["2x"]
    assert found["token_kl"].value == pytest.approx(0.4)
    assert found["token_kl"].loss == pytest.approx(0.2)
    assert 0 < found["token_kl"].loss_low < found["token_kl"].loss < found["token_kl"].loss_high
    assert found["perplexity"].value == pytest.approx(np.exp(0.4))
    assert found["perplexity"].loss == pytest.approx(np.exp(0.4) - np.exp(0.2))


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 60 Bernoulli rows at 80% confidence."""
    monkeypatch.setattr(intervals, "CONFIDENCE", 0.8)
    rng = np.random.default_rng(5)
    inside = 0
    for trial in range(200):
        rows = mean_statistics((rng.random(60) < 0.4).astype(float))
        monkeypatch.setattr(intervals, "SEED", trial)
        score = paired_scores({"1x": {"exact_match": rows}}, "1x")["1x"]["exact_match"]
        inside += score.low <= 40 <= score.high
    assert 0.7 * 200 < inside < 0.9 * 200


def test_few_rows_at_once_draw_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = mean_statistics(np.arange(7.0))
    whole = resampled_sums(statistics, 40, 3)
    monkeypatch.setattr("pipeline.learn.evaluate.intervals.DRAWN_AT_ONCE", 21)
    np.testing.assert_array_equal(resampled_sums(statistics, 40, 3), whole)


def test_rouge_l_is_the_librarys_best_over_references() -> None:
    texts, references = corpus(3, 20)
    scorer = RougeScorer(["rougeL"])
    want = [scorer.score_multi(each, text)["rougeL"].fmeasure for text, each in zip(texts, references, strict=True)]
    np.testing.assert_allclose(rouge_l_statistics(texts, references)[:, 0], want)
    assert rouge_l_statistics(["", "你好"], [[""], ["你好"]])[:, 0].tolist() == [1, 1]  # words it cannot see


def test_exact_match_ignores_case_and_outer_space_and_agreement_does_not() -> None:
    texts = [" Card_Arrival", "b", "c"]
    assert exact_match_statistics(texts, [["card_arrival"], ["x", "B "], ["d"]])[:, 0].tolist() == [1, 1, 0]
    assert same_statistics(texts, ["Card_Arrival", "b", "C"])[:, 0].tolist() == [0, 1, 0]
