"""Metrics against their definitions; a resampled corpus metric is that metric of the resampled corpus."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pipeline.answer.answer_checks import repeated_ngrams
from pipeline.learn.score import metrics
from pipeline.learn.score.lines import Line, remarks, uselessness
from pipeline.learn.score.metrics import METRICS, Score, mean_statistics, paired_scores
from pipeline.learn.score.statistics import by_chance

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


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 12))
@settings(max_examples=25, deadline=None)
def test_a_resampled_bleu_is_sacrebleus_own_of_the_resampled_corpus(seed: int, rows: int) -> None:
    texts, references = corpus(seed, rows)
    statistics = metrics.bleu_statistics(texts, references)
    counts = metrics.resampled_counts(rows, 4, np.random.default_rng(seed))
    assert (counts.sum(axis=1) == rows).all()
    found = METRICS["bleu"].score(metrics.resampled_sums(statistics, 4, seed))
    for one, score in zip(counts.astype(int), found, strict=True):
        drawn = [row for row in range(rows) for _ in range(one[row])]
        streams: Any = [[(*references[row], None, None)[place] for row in drawn] for place in range(3)]
        bleu = sacrebleu.BLEU(lowercase=True, tokenize="13a", effective_order=True)
        assert score == pytest.approx(bleu.corpus_score([texts[row] for row in drawn], streams).score, abs=1e-9)


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
    full, line = (np.stack([sums, tokens], axis=1) for sums in (np.full(20, 1.0), np.linspace(1.5, 2.5, 20)))
    kl = paired_scores({"1x": {"token_kl": full}, "2x": {"token_kl": line}}, "1x")["2x"]["token_kl"]
    assert (kl.value, kl.loss) == pytest.approx((0.4, 0.2)) and 0 < kl.loss_low < kl.loss < kl.loss_high


def test_intervals_cover_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of 60 Bernoulli rows at 80% confidence."""
    monkeypatch.setattr(metrics, "CONFIDENCE", 0.8)
    rng = np.random.default_rng(5)
    inside = 0
    for trial in range(200):
        rows = mean_statistics((rng.random(60) < 0.4).astype(float))
        monkeypatch.setattr(metrics, "SEED", trial)
        score = paired_scores({"1x": {"exact_match": rows}}, "1x")["1x"]["exact_match"]
        inside += score.low <= 40 <= score.high
    assert 0.7 * 200 < inside < 0.9 * 200


@pytest.mark.parametrize("rows", [2, 20, 200])
def test_rows_that_do_not_differ_do_not_show_that_no_row_would(rows: int) -> None:
    line = {"agreement_exact": mean_statistics(np.ones(rows))}
    found = paired_scores({"1x": line, "2x": line}, "1x")
    full, fast = (found[name]["agreement_exact"] for name in ("1x", "2x"))
    assert (full.loss, full.loss_low, full.loss_high) == (fast.loss, fast.loss_low, 0) == (0, 0, 0)
    assert (1 - fast.loss_high / 100) ** rows == pytest.approx(0.05)
    gained = {"agreement_exact": mean_statistics(np.arange(rows) > 0)}  # full depth is wrong in a row that 2x gains
    assert paired_scores({"1x": gained, "2x": line}, "1x")["2x"]["agreement_exact"].loss_high == fast.loss_high


def test_few_rows_at_once_draw_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = mean_statistics(np.arange(7.0))
    whole = metrics.resampled_sums(statistics, 40, 3)
    monkeypatch.setattr(metrics, "DRAWN_AT_ONCE", 21)
    np.testing.assert_array_equal(metrics.resampled_sums(statistics, 40, 3), whole)


def test_rouge_l_is_the_librarys_best_over_references() -> None:
    texts, references = corpus(3, 20)
    scorer = RougeScorer(["rougeL"])
    want = [scorer.score_multi(each, text)["rougeL"].fmeasure for text, each in zip(texts, references, strict=True)]
    np.testing.assert_allclose(metrics.rouge_l_statistics(texts, references)[:, 0], want)
    assert metrics.rouge_l_statistics(["", "!"], [[""], ["!"]])[:, 0].tolist() == [1, 1]


def test_texts_of_any_script_and_length_are_scored() -> None:
    texts = ["New York", "Привет, МИР!", "你好世界", "Élan"]
    references = [["new york"], ["привет мир"], ["你好，世人"], ["lan"]]
    assert metrics.rouge_l_statistics(texts, references)[:, 0].tolist() == [1, 1, 0.75, 0]
    counts = metrics.bleu_statistics(texts, references)
    assert counts[2, 2:6].tolist() == [3, 1, 0, 0]  # 你 好 世, and 你 好
    assert METRICS["bleu"].score(counts[:1]) == pytest.approx(100)


def test_exact_match_ignores_case_and_outer_space() -> None:
    texts = [" Card_Arrival", "b", "c"]
    assert metrics.exact_match_statistics(texts, [["card_arrival"], ["x", "B "], ["d"]])[:, 0].tolist() == [1, 1, 0]


OWN = [list(range(row, row + 20)) for row in range(8)]
NONE = np.zeros(len(OWN))


def fidelity(answers: list[list[int]], regret: float = 0.0) -> float:
    sums = metrics.answer_statistics(answers, OWN, NONE + regret).sum(axis=0, keepdims=True)
    return float(METRICS["fidelity"].score(sums)[0])


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_repeated_ngram_is_one_that_stands_before(tokens: list[int]) -> None:
    starts = range(len(tokens) - 3)
    seen = [any(tokens[start : start + 4] == tokens[early : early + 4] for early in range(start)) for start in starts]
    assert repeated_ngrams(tokens) == (sum(seen), len(seen))


def test_each_damage_costs_its_factor() -> None:
    assert fidelity(OWN) == 100
    assert fidelity([row[:10] for row in OWN]) == 50
    assert fidelity([[*row, *range(50, 70)] for row in OWN]) == 50
    # as likely as own choices, since a language model expects a text that repeats to go on so
    assert fidelity([row + row for row in OWN]) == pytest.approx(50 * 20 / 37)
    # tokens half as likely as the likeliest ones
    assert fidelity(OWN, 20 * np.log(2)) == pytest.approx(50)
    assert fidelity([[1, 2] for _ in OWN]) == pytest.approx(10)  # without a 4-gram


def test_chance_is_the_commonest_label_or_another_rows_text() -> None:
    answers: list[Any] = [SimpleNamespace(generated_text=text) for text in ("joy", "anger", "joy", "fear")]
    assert [one.generated_text for one in by_chance(answers, labels=True)] == ["joy"] * 4
    assert by_chance(answers, labels=False) == [*answers[1:], answers[0]]


def test_a_line_at_or_below_chance_is_called_useless() -> None:
    def line(value: float) -> Line:
        return Line("2x", 2.0, "full", 2.0, 0.1, {"agreement_exact": Score(value, 0, 0)}, warnings=("9 are empty",))

    chance = {"agreement_exact": Score(61.0, 0, 0)}
    said = "2x is useless, no better than chance: same answer 61.0, by chance 61.0"
    assert uselessness(line(61.0), chance, "agreement_exact") == uselessness(line(61.0), chance, "token_kl") == said
    assert uselessness(line(61.5), chance, "agreement_exact") is uselessness(line(61.0), {}, "token_kl") is None
    assert remarks([line(61.0)], chance, "agreement_exact") == [said, "2x: 9 are empty"]
    free = replace(line(0), scores={"agreement_exact": Score(0, 0, 0), "fidelity": Score(80, 20, 25)})
    chance = {"agreement_exact": Score(0, 0, 0), "fidelity": Score(9, 91, 95)}  # long answers are seldom the same
    assert uselessness(free, chance, "token_kl") is None
    assert "fidelity 80.0, by chance 81.0" in str(uselessness(free, {"fidelity": Score(81, 19, 25)}, "token_kl"))
