"""A sink that keeps what a process counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Recorded:
    """Sums of counters by name, with the part after a slash; last values of gauges."""

    counters: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        assert amount > 0  # Ray's counters refuse others
        self.counters["/".join([name, *labels.values()])] += amount  # type: ignore[assignment]

    def set(self, name: str, value: float) -> None:
        self.gauges[name] = value
