"""A sink that keeps what a process counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pipeline.metrics import METRICS


@dataclass
class Recorded:
    """Sums of counters by name, with the part after a slash; last values of gauges."""

    counters: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, amount: float, part: str | None) -> None:
        if METRICS[name].kind == "gauge":
            self.gauges[name] = amount
            return
        assert amount > 0  # Ray's counters refuse others
        self.counters[f"{name}/{part}" if part else name] += amount  # type: ignore[assignment]
