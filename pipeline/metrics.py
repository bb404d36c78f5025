"""Defines the metrics of a running job, and passes their values to this process's sink. Does not import Ray.

A sink is a function that exports values, such as the sink for Ray in `run.remote`. Without a sink, they are dropped.
Counters increase once per shard or retry, never per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Part = Literal["prepare", "prefill", "decode", "commit"]  # work that the counter `seconds` distinguishes
Sink = Callable[[str, float, Part | None], None]  # arguments: metric's name; amount (counter) or value (gauge); part


@dataclass(frozen=True)
class Metric:
    """A metric. text: its description, with the unit."""

    kind: Literal["counter", "gauge"]
    text: str


METRICS = {
    "rows": Metric("counter", "rows committed, row errors included"),
    "row_errors": Metric("counter", "rows committed with an error"),
    "generated_tokens": Metric("counter", "tokens generated; if a shard is answered again, its tokens count again"),
    "prompt_tokens": Metric("counter", "tokens computed in prefill, without padding"),
    "decode_steps": Metric("counter", "tokens that were the input of a decode step"),
    "layer_steps": Metric("counter", "layers run, summed over decode steps"),
    "seconds": Metric("counter", "seconds of tasks and actors, by part: prepare, prefill, decode, commit"),
    "store_retries": Metric("counter", "calls to the object store that failed and were retried"),
    "job_rows": Metric("gauge", "rows of the job"),
    "job_rows_done": Metric("gauge", "committed rows of the job, including rows of earlier runs"),
    "eta_seconds": Metric("gauge", "seconds until all rows are answered, at the rate of the last five minutes"),
}


_sink: Sink | None = None


def install(sink: Sink | None) -> Sink | None:
    """Send this process's metrics to `sink`; None: drop them. Return the previous sink."""
    global _sink
    before, _sink = _sink, sink
    return before


@contextmanager
def installed(sink: Sink) -> Iterator[None]:
    """Install a sink, and restore the previous one after the block."""
    before = install(sink)
    try:
        yield
    finally:
        install(before)


def add(name: str, amount: float = 1.0, *, part: Part | None = None) -> None:
    """Increase a counter. An amount of 0 or less changes nothing. part: set it only for `seconds`."""
    assert METRICS[name].kind == "counter" and (part is not None) == (name == "seconds"), name
    if _sink is not None and amount > 0:
        _sink(name, amount, part)


def set_gauge(name: str, value: float) -> None:
    """Set a gauge. Call this at least every 20 s, because Ray drops older values."""
    assert METRICS[name].kind == "gauge", name
    if _sink is not None:
        _sink(name, value, None)
