"""What a server counts, in Prometheus' text format. Each replica counts for itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.engine.online.delivery import Totals
from actors.engine.online.loop import OnlineLoop

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Counts of requests, and the loop's own."""

    def __init__(self, loop: OnlineLoop) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "skipdecode_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self._registry
        )
        self.seconds, self.first_token, self.between_tokens = (
            Histogram(f"skipdecode_{name}_seconds", text, buckets=SECONDS, registry=self._registry)
            for name, text in (
                ("request", "Time of an answered request."),
                ("first_token", "Time to the first token of a streamed request."),
                ("between_tokens", "Time between two events of a streamed answer."),
            )
        )
        self._registry.register(_OfLoop(loop))

    def text(self) -> bytes:
        """All counts."""
        return generate_latest(self._registry)


class _OfLoop(Collector):
    def __init__(self, loop: OnlineLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """The loop's counts now."""
        loop = self._loop
        cache = getattr(loop.engine, "cache", None)
        for name, text, value in (
            ("rows_waiting", "Answers that wait to begin.", loop.waiting),
            ("rows_in_flight", "Answers being generated.", loop.in_flight),
            ("cache_bytes", "Bytes of the key/value cache.", 0 if cache is None else cache.bytes),
            ("cache_bytes_limit", "Most bytes of the key/value cache.", loop.cache_bytes),
        ):
            yield GaugeMetricFamily(f"skipdecode_{name}", text, value=value)
        for one in fields(Totals):
            text = str(one.metadata["unit"]).capitalize()
            yield CounterMetricFamily(f"skipdecode_{one.name}", text, value=getattr(loop.totals, one.name))
