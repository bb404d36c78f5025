"""Exports a process's metrics through Ray: each node's agent serves them to Prometheus, named ray_skipdecode_*."""

from __future__ import annotations

from functools import cache
from typing import Any

from ray.util.metrics import Counter, Gauge

from pipeline import metrics
from pipeline.metrics import METRICS, OUTPUT

PREFIX = "skipdecode_"  # Ray adds ray_ before it, and _total after a counter


class RayMetrics:
    """See `metrics.Sink`. output: the label of all metrics, the job's output folder."""

    def __init__(self, output: str) -> None:
        self.labels = {OUTPUT: output}

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """See `metrics.Sink`."""
        _metric(name).inc(amount, tags=self.labels | labels)

    def set(self, name: str, value: float) -> None:
        """See `metrics.Sink`."""
        _metric(name).set(value, tags=self.labels)


def export(output: str) -> None:
    """Export the metrics of this worker process, which works for the job of that output folder."""
    metrics.install(RayMetrics(output))


@cache
def _metric(name: str) -> Any:
    metric = METRICS[name]
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(f"{PREFIX}{name}", description=metric.text, tag_keys=(OUTPUT, *metric.labels))
