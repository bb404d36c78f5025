"""Computes metrics in two steps: K statistics for each row, then one score from their K sums over all rows.

This makes the bootstrap of a corpus metric cheap: a resampled data set only needs new sums.
Shapes: N rows have statistics [N, K]; S data sets have sums [S, K] and scores [S].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer
from sacrebleu.metrics.bleu import BLEU

from pipeline.answer.answer_checks import repeated_ngrams
from pipeline.config.adapt import SHORT
from pipeline.config.forms import normalized

Array = npt.NDArray[np.float64]
ORDER = 4  # longest n-gram of BLEU
TOKENS, OWN_TOKENS, REPEATS, GRAMS, REGRET = range(5)  # columns of `answer_statistics`
CONFIDENCE = 0.95  # an interval holds this share of the resampled scores
SAMPLES, SEED = 1000, 0  # number of resampled data sets, and the random seed that draws them
DRAWN_AT_ONCE = 2**22  # limit for the row numbers drawn at once, which take 32 MiB
LABEL_CHARACTERS = 8
# a character of a script without spaces between words (Thai to Burmese, Khmer, Japanese, Chinese) counts as a word
_SPACELESS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


@dataclass(frozen=True)
class Metric:
    """A metric. title, unit: as shown in tables. score: function from sums [S, K] to the scores of S data sets."""

    title: str
    unit: str
    higher_is_better: bool
    decimals: int
    score: Callable[[Array], Array]


def _bleu(sums: Array) -> Array:
    scores = []
    for counts in sums.astype(int).tolist():
        correct, total = counts[2 : 2 + ORDER], counts[2 + ORDER :]
        length, reference = counts[:2]
        found = BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp", effective_order=True)
        scores.append(found.score)
    return np.array(scores)


def _mean(sums: Array) -> Array:
    quotient: Array = sums[:, 0] / sums[:, 1]
    return quotient


def _percent(sums: Array) -> Array:
    return 100 * _mean(sums)


def _fidelity(sums: Array) -> Array:
    likelihood = np.exp(-sums[:, REGRET] / sums[:, TOKENS])
    length = sums[:, TOKENS] / sums[:, OWN_TOKENS]
    return 100 * likelihood * np.minimum(length, 1 / length) * (1 - sums[:, REPEATS] / np.maximum(sums[:, GRAMS], 1))


EXACT = ("exact_match", "agreement_exact")  # metrics that are 0 or 1 in each row
METRICS = {
    "bleu": Metric("BLEU", "", True, 1, _bleu),
    "exact_match": Metric("exact match", "%", True, 1, _percent),
    "rouge_l": Metric("ROUGE-L", "", True, 1, _percent),
    "agreement_exact": Metric("same answer", "%", True, 1, _percent),
    "fidelity": Metric("fidelity", "", True, 1, _fidelity),
    "token_kl": Metric("token KL", "nats", False, 3, _mean),
}


def bleu_statistics(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return [rows, 10]: answer length, closest reference's length; matched n-grams and all n-grams, each for n = 1-4.

    sacrebleu counts with tokenizer 13a, in lower case, against all references of a row. The sums over rows give the
    corpus BLEU. If no answer has four words, it counts only n-grams of the longest answer's length or shorter.
    """
    # effective_order changes no count, but without it sacrebleu warns about every sentence
    metric = BLEU(lowercase=True, tokenize="13a", effective_order=True)
    pairs = zip(texts, references, strict=True)
    scores = [metric.sentence_score(_spaced(text), [*map(_spaced, each)]) for text, each in pairs]
    counts = [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores]
    return np.array(counts, dtype=np.float64)


def exact_match_statistics(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return [rows, 2]: 1 if the text equals a reference, ignoring case and outer space, else 0; and a constant 1."""
    pairs = zip(texts, references, strict=True)
    return mean_statistics([normalized(text) in map(normalized, each) for text, each in pairs])


def rouge_l_statistics(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Array:
    """Return [rows, 2]: the text's best ROUGE-L F score over its references, without stemming; and a constant 1.

    A text that equals a reference scores 1 even if it has no words.
    """
    pairs = zip(texts, references, strict=True)
    return mean_statistics([max(_rouge_l(reference, text) for reference in each) for text, each in pairs])


def answer_statistics(answers: Sequence[Sequence[int]], own: Sequence[Sequence[int]], regret: Array) -> Array:
    """Return [rows, 5]: tokens of the answer, tokens of full depth's answer, repeated 4-grams, all 4-grams, and regret.

    Fidelity is 100 · exp(-regret / tokens) · min(length ratio, 1 / length ratio) · (1 - repeated 4-grams / 4-grams).
    Length and repetition are factors, because regret hardly shows that an answer is too short, too long or repetitive.

    Args:
        answers, own: Token ids of the answers and of full depth's answers, with end tokens.
        regret: Regret of each answer in nats; see `answer_regret`.
    """
    counts = [(len(answer), len(other), *repeated_ngrams(answer)) for answer, other in zip(answers, own, strict=True)]
    return np.concatenate([np.array(counts, dtype=np.float64), regret[:, None]], axis=1)


def mean_statistics(values: Sequence[float] | Array) -> Array:
    """Return [rows, 2]: each row's value and a constant 1. The mean is the sum of values divided by the sum of ones."""
    first = np.asarray(values, dtype=np.float64)
    return np.stack([first, np.ones_like(first)], axis=1)


def default_metric(references: Sequence[Sequence[str]] | None, lengths: Sequence[int], *, choices: bool) -> str:
    """Return the metric that decides how good answers are, unless the job sets one.

    references: right answers of each row. lengths: tokens of the answers at full depth. choices: whether the job sets
    the labels.
    """
    if references is None:
        return "agreement_exact" if choices or median(lengths) <= SHORT else "fidelity"
    if choices or all(is_label(text) for row in references for text in row):
        return "exact_match"
    return "bleu" if any(len(row) > 1 for row in references) else "rouge_l"


def is_label(text: str) -> bool:
    """Tell whether a text is a single word or, in a script without spaces, has at most `LABEL_CHARACTERS`."""
    return len(text.split()) == 1 and len(_SPACELESS.findall(text)) <= LABEL_CHARACTERS


def _spaced(text: str) -> str:
    return _SPACELESS.sub(r" \g<0> ", text)


class _Words(Tokenizer):  # type: ignore[misc]
    """Splits a text into words of letters and digits of any script. rouge_score's own tokenizer drops all but a-z."""

    def tokenize(self, text: str) -> list[str]:
        return re.findall(r"[^\W_]+", _spaced(text).lower())


_SCORER = RougeScorer(["rougeL"], tokenizer=_Words())


def _rouge_l(reference: str, text: str) -> float:
    return 1.0 if reference == text else float(_SCORER.score(reference, text)["rougeL"].fmeasure)


@dataclass(frozen=True)
class Score:
    """The score of a line in a metric. `value` and `loss` come from the rows themselves, intervals from resampled rows.

    loss: difference from full depth on the same rows, positive if the line is worse. low, high: interval for `value`;
    `value` may lie outside. loss_low, loss_high: interval for `loss`.
    """

    value: float
    loss: float
    loss_high: float
    low: float = 0.0
    high: float = 0.0
    loss_low: float = 0.0


def resampled_counts(rows: int, samples: int, rng: np.random.Generator) -> Array:
    """Draw `samples` sets of `rows` rows with replacement. Return each row's count in each set, [samples, rows]."""
    positions = rng.integers(rows, size=(samples, rows)) + rows * np.arange(samples)[:, None]
    return np.bincount(positions.ravel(), minlength=samples * rows).reshape(samples, rows).astype(np.float64)


def resampled_sums(statistics: Array, samples: int, seed: int) -> Array:
    """Draw `samples` data sets from the rows of `statistics`, with replacement. Return the sums of each data set."""
    rng, rows = np.random.default_rng(seed), len(statistics)
    at_once = max(1, DRAWN_AT_ONCE // rows)
    return np.concatenate(
        [resampled_counts(rows, min(at_once, samples - done), rng) @ statistics for done in range(0, samples, at_once)]
    )


def paired_scores(statistics: Mapping[str, Mapping[str, Array]], full_depth: str) -> dict[str, dict[str, Score]]:
    """Return line -> metric -> score, with percentile intervals from a paired bootstrap over rows.

    Method: Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP 2004. Data sets of
    equal size are drawn with replacement, and every line is scored on the same data sets. If a line's exact matches
    are lost in no row, no data set shows a loss. Then the interval goes up to the share of lost rows that is seen in
    none of n rows with a probability of 5%, about 3 / n.

    Args:
        statistics: Line -> metric -> array [rows, statistics]; all lines have the same rows.
        full_depth: Name of the line that losses are measured against.
    """
    values_of = {}  # (line, metric) -> score of the rows themselves, then of each resampled data set
    for line, metrics in statistics.items():
        for metric, rows in metrics.items():
            sums = np.concatenate([rows.sum(axis=0)[None], resampled_sums(rows, SAMPLES, SEED)])
            values_of[line, metric] = METRICS[metric].score(sums)
    scores: dict[str, dict[str, Score]] = {line: {} for line in statistics}
    for (line, metric), values in values_of.items():
        losses = values_of[full_depth, metric] - values
        losses = losses if METRICS[metric].higher_is_better else -losses
        low, high = interval(values[1:])
        loss_low, loss_high = interval(losses[1:])
        if metric in EXACT and line != full_depth and losses.max() <= 0:
            loss_high = 100 * (1 - (1 - CONFIDENCE) ** (1 / len(statistics[line][metric])))
        scores[line][metric] = Score(float(values[0]), float(losses[0]), loss_high, low, high, loss_low)
    return scores


def interval(samples: Array) -> tuple[float, float]:
    """Return the percentile interval of the bootstrap scores `samples`."""
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
