"""Computes intervals by paired bootstrap over rows, of every line and of its loss against full depth.

Percentile intervals after Koehn, "Statistical Significance Tests for Machine Translation Evaluation", EMNLP
2004: data sets of as many rows are drawn with replacement, the same ones for every line, and scored whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeline.learn.evaluate.metrics import METRICS, Array
from pipeline.learn.evaluate.results import CONFIDENCE, Score

DRAWN_AT_ONCE = 2**22  # maximum number of row numbers drawn at once, 32 MiB
SAMPLES, SEED = 1000, 0  # resampled data sets of every interval, and the seed of their draw


def resampled_counts(rows: int, samples: int, rng: np.random.Generator) -> Array:
    """Return how often each data set, drawn with replacement, holds each row: [samples, rows]."""
    positions = rng.integers(rows, size=(samples, rows)) + rows * np.arange(samples)[:, None]
    return np.bincount(positions.ravel(), minlength=samples * rows).reshape(samples, rows).astype(np.float64)


def resampled_sums(statistics: Array, samples: int, seed: int) -> Array:
    """Return the sums of statistics [N, K] over each resampled data set: [samples, K]."""
    rng, rows = np.random.default_rng(seed), len(statistics)
    at_once = max(1, DRAWN_AT_ONCE // rows)
    return np.concatenate(
        [resampled_counts(rows, min(at_once, samples - done), rng) @ statistics for done in range(0, samples, at_once)]
    )


def paired_scores(statistics: Mapping[str, Mapping[str, Array]], full_depth: str) -> dict[str, dict[str, Score]]:
    """Return the scores of every line and metric.

    statistics: line -> metric -> [N, K] over the same N rows. full_depth: line that losses are measured against.
    """
    values_of = {}  # [1 + samples]: the data set itself, then the resampled ones
    for line, metrics in statistics.items():
        for metric, rows in metrics.items():
            sums = np.concatenate([rows.sum(axis=0)[None], resampled_sums(rows, SAMPLES, SEED)])
            values_of[line, metric] = METRICS[metric].score(sums)
    scores: dict[str, dict[str, Score]] = {line: {} for line in statistics}
    for (line, metric), values in values_of.items():
        losses = values_of[full_depth, metric] - values
        better = METRICS[metric].higher_is_better
        losses = abs(losses) if better is None else losses if better else -losses
        low, high = interval(values[1:])
        loss_low, loss_high = interval(losses[1:])
        scores[line][metric] = Score(float(values[0]), float(losses[0]), loss_high, low, high, loss_low)
    return scores


def interval(samples: Array) -> tuple[float, float]:
    """Return the percentile interval of bootstrap samples [S]."""
    low, high = np.quantile(samples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
