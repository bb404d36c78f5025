"""Reports an engine's metrics once a second, from a separate thread, while it works on a shard. Imports no ray."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import fields
from typing import TYPE_CHECKING

from actors.engine.types import EngineStats
from pipeline import metrics

if TYPE_CHECKING:
    from actors.generator import Generator

SECONDS = 1.0  # seconds between two reports
COUNTERS = ("generated_tokens", "prompt_tokens", "decode_steps", "layer_steps")


class LiveCounts:
    """Reports the engine's counts since the last report; does nothing without a sink.

    source: read without a lock, because every value is one attribute; nobody else may take its counts.
    """

    def __init__(self, source: Generator) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._reported = EngineStats()
        if (sink := metrics.exporter()) is not None:
            threading.Thread(target=_run, args=(weakref.ref(self), sink), name="metrics", daemon=True).start()

    def report(self) -> None:
        """Report now."""
        engine = self.source.engine
        with self._lock:
            stats, before = engine.stats, self._reported
            # counts of dropped rows are taken back; a counter is not
            most = {item.name: max(getattr(stats, item.name), getattr(before, item.name)) for item in fields(stats)}
            self._reported = EngineStats(**most)
        for name in COUNTERS:
            metrics.add(name, most[name] - getattr(before, name))
        metrics.add("seconds", most["prefill_seconds"] - before.prefill_seconds, part="prefill")
        metrics.add("seconds", most["decode_seconds"] - before.decode_seconds, part="decode")
        metrics.set_gauge("rows_in_flight", len(engine.rows))
        metrics.set_gauge("cache_bytes", engine.used_cache_bytes())
        metrics.set_gauge("cache_bytes_limit", self.source.cache_bytes)


def _run(reference: weakref.ref[LiveCounts], sink: metrics.Sink) -> None:
    """Report as long as the sink is installed and the counts are in use."""
    while metrics.exporter() is sink and (counts := reference()) is not None:
        counts.report()
        del counts
        time.sleep(SECONDS)
