"""Paired bootstrap: intervals over rows, of every line and of its loss against full depth.

Percentile intervals after Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP
2004: data sets of as many rows are drawn with replacement, the same ones for every line, and scored whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from pipeline.learn.evaluate.metrics import METRICS, Array
from pipeline.learn.evaluate.results import Score

DRAWN_AT_ONCE = 2**22  # row numbers, 32 MiB


class Bootstrap(NamedTuple):
    """Resampled data sets of every interval, the seed of their draw, and the share of scores inside an interval."""

    samples: int = 1000
    seed: int = 0
    confidence: float = 0.95


DEFAULT = Bootstrap()


def resampled_counts(rows: int, samples: int, rng: np.random.Generator) -> Array:
    """[samples, rows]: how often each data set, drawn with replacement, holds each row."""
    drawn = rng.integers(rows, size=(samples, rows))
    positions = drawn + rows * np.arange(samples)[:, None]
    counts = np.bincount(positions.ravel(), minlength=samples * rows).reshape(samples, rows)
    return counts.astype(np.float64)


def resampled_sums(statistics: Array, samples: int, seed: int) -> Array:
    """Statistics [N, K] -> their sums over each resampled data set [samples, K]."""
    rng = np.random.default_rng(seed)
    rows = len(statistics)
    at_once = max(1, DRAWN_AT_ONCE // rows)
    return np.concatenate(
        [resampled_counts(rows, min(at_once, samples - done), rng) @ statistics for done in range(0, samples, at_once)]
    )


def paired_scores(
    statistics: Mapping[str, Mapping[str, Array]], full_depth: str, settings: Bootstrap = DEFAULT
) -> dict[str, dict[str, Score]]:
    """Scores of every line and metric.

    statistics: line -> metric -> [N, K] over the same N rows. full_depth: the line that losses are against.
    """
    names = [(line, metric) for line, metrics in statistics.items() for metric in metrics]
    widths = [statistics[line][metric].shape[1] for line, metric in names]
    together = np.concatenate([statistics[line][metric] for line, metric in names], axis=1)
    sums = np.concatenate(
        [together.sum(axis=0, keepdims=True), resampled_sums(together, settings.samples, settings.seed)]
    )
    # [1 + samples]: the data set itself, then the resampled ones
    values_of = {
        name: METRICS[name[1]].score(columns)
        for name, columns in zip(names, np.split(sums, np.cumsum(widths)[:-1], axis=1), strict=True)
    }
    scores: dict[str, dict[str, Score]] = {line: {} for line in statistics}
    for (line, metric), values in values_of.items():
        losses = values_of[full_depth, metric] - values
        better = METRICS[metric].higher_is_better
        losses = abs(losses) if better is None else losses if better else -losses
        low, high = interval(values[1:], settings.confidence)
        loss_low, loss_high = interval(losses[1:], settings.confidence)
        scores[line][metric] = Score(float(values[0]), float(losses[0]), loss_high, low, high, loss_low)
    return scores


def interval(samples: Array, confidence: float) -> tuple[float, float]:
    """The percentile interval of bootstrap samples [S]."""
    outside = (1 - confidence) / 2
    low, high = np.quantile(samples, [outside, 1 - outside])
    return float(low), float(high)
