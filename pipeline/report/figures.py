"""Figures of a job's report: what its tables and plots show, from the shards' statistics, the plan and the runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.commit.runs import JobRun
from pipeline.generate.agreement import Agreement
from pipeline.generate.distributions import first_values
from pipeline.generate.stats import Totals, add_up
from pipeline.report.timeline import run_spans

MOST_BARS = 26
MOST_KINDS = 1000  # of errors that are told apart
SHOWN_KINDS = 20


@dataclass(frozen=True)
class Histogram:
    """Counts between each first value and the next; the last bin ends with the value `end`."""

    firsts: list[int]
    counts: list[int]
    end: int

    @property
    def values(self) -> int:
        """How many are counted."""
        return sum(self.counts)

    def quantile(self, share: float) -> int:
        """The first value of the bin in which this share of all values is reached."""
        place = int(np.searchsorted(np.cumsum(self.counts), share * self.values))
        return self.firsts[min(place, len(self.firsts) - 1)]

    @property
    def ranges(self) -> list[str]:
        """The values of each bin, for people."""
        lasts = [*(first - 1 for first in self.firsts[1:]), self.end]
        pairs = zip(self.firsts, lasts, strict=True)
        return [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in pairs]


def lengths(column: pa.ChunkedArray) -> Histogram | None:
    """Of a column of `distributions.histogram`, in bins of equal width but for the last, which holds the longest 1%
    where they are far from the rest. None if it is empty.
    """
    counts = _summed(column)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None
    firsts = first_values(len(counts) + 1)
    most = int(np.searchsorted(np.cumsum(counts), 0.99 * counts.sum()))
    width = int(firsts[most + 1] - firsts[most])  # a power of two: shorter bins lie within one of this width
    low = int(firsts[filled[0]]) // width
    places = np.minimum(firsts[:-1] // width, int(firsts[most]) // width + 1) - low
    joined = np.bincount(places[filled[0] :], counts[filled[0] :]).astype(int)
    joined = np.trim_zeros(joined, "b")
    return Histogram(
        [(low + place) * width for place in range(len(joined))], joined.tolist(), int(firsts[filled[-1] + 1]) - 1
    )


def depths(column: pa.ChunkedArray) -> Histogram | None:
    """Of a column of `distributions.depth_histogram`; layers are joined until few bins are left. None if empty."""
    counts = _summed(column)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return None
    width = -(-(int(filled[-1] - filled[0]) + 1) // MOST_BARS)
    joined = np.bincount((filled - filled[0]) // width, counts[filled]).astype(int)
    firsts = [int(filled[0]) + place * width for place in range(len(joined))]
    return Histogram(firsts, joined.tolist(), firsts[-1] + width - 1)


def _summed(column: pa.ChunkedArray) -> np.ndarray:
    """Element by element, the sum of lists of any length."""
    lists = column.combine_chunks()
    sizes = lists.value_lengths().to_numpy()
    values = lists.flatten().to_numpy()
    places = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.bincount(places, values).astype(np.int64)


@dataclass
class ErrorKind:
    """Answers that failed alike. example: the error of one of them. row_id: of its row. shard: that holds it."""

    kind: str
    answers: int
    row_id: str
    example: str
    shard: int


def error_kinds(shards: pa.Table) -> list[ErrorKind]:
    """The most frequent kinds, and as the last entry, with an empty kind, the answers of all others."""
    found: dict[str, ErrorKind] = {}
    for shard, text in zip(shards["shard"].to_pylist(), shards["error_kinds"].to_pylist(), strict=True):
        for kind, answers, row_id, example in json.loads(text) if text else ():
            if kind not in found and len(found) >= MOST_KINDS:
                kind = ""
            known = found.setdefault(kind, ErrorKind(kind, 0, row_id, example, shard))
            known.answers += answers
    others = found.pop("", None)
    listed = sorted(found.values(), key=lambda one: -one.answers)
    rest = sum(one.answers for one in listed[SHOWN_KINDS:]) + (others.answers if others else 0)
    return listed[:SHOWN_KINDS] + ([ErrorKind("", rest, "", "", 0)] if rest else [])


@dataclass(frozen=True)
class Outcome:
    """A line of plan against outcome. range: the interval of the prediction."""

    name: str
    predicted: str
    range: str
    actual: str
    difference: str


@dataclass(frozen=True)
class Comparison:
    """Predicted and actual figures, and a note if they are not of the same rows."""

    lines: list[Outcome]
    note: str


def compare(prediction: Mapping[str, Any], runs: Sequence[JobRun], shards: pa.Table) -> Comparison:
    """The prediction beside the runs that began after it was made.

    Raises:
        KeyError, TypeError: the prediction is damaged.
    """
    began = prediction["made"]
    spans = [(begin, end) for begin, end in run_spans(runs, shards) if begin >= began]
    seconds = sum(end - begin for begin, end in spans)
    later = shards.filter(pa.array(shards["started"].to_numpy() >= began))
    done, chosen = add_up(later), prediction["chosen"]
    hours = seconds * prediction["devices"] / 3600
    values: list[tuple[str, float | None, float | None, str]] = [
        ("wall clock, start-up included, s", chosen["seconds"], seconds, ",.1f"),
        ("device-hours", chosen["device_hours"], hours, ",.4g"),
        ("prefill, s", chosen["prefill_seconds"], done.prefill_seconds, ",.1f"),
        ("decode, s", chosen["decode_seconds"], done.decode_seconds, ",.1f"),
        ("generated tokens", chosen["generated_tokens"], done.generated_tokens, ",.0f"),
        ("layer ratio", chosen["layer_ratio"], done.layer_ratio, ".2f"),
    ]
    if chosen["money"] is not None:
        values.insert(2, ("money", chosen["money"], hours * prediction["price_per_hour"], ",.2f"))
    interval = f"{chosen['low']:,.1f} to {chosen['high']:,.1f}"
    lines = [
        Outcome(
            name,
            "" if predicted is None else format(predicted, form),
            interval if place == 0 else "",
            "" if actual is None else format(actual, form),
            f"{actual / predicted - 1:+.1%}" if predicted and actual is not None else "",
        )
        for place, (name, predicted, actual, form) in enumerate(values)
    ]
    note = ""
    if done.rows != prediction["rows_left"]:
        note = f"The prediction is for {prediction['rows_left']:,} rows; {done.rows:,} were answered after it."
    return Comparison(lines, note)


def held_seconds(runs: Sequence[JobRun], shards: pa.Table) -> float | None:
    """Return the device-seconds of all runs, start-up and idle included; None if no run is recorded.

    shards: statistics as in `STATS_SCHEMA`.
    """
    return sum((end - begin) * runs[-1].devices for begin, end in run_spans(runs, shards)) if runs else None


def clock_speedups(
    agreement: Agreement | None, totals: Totals, held: float | None
) -> tuple[float | None, float | None]:
    """Return the speed-ups of the whole run and of decode alone over full depth, as timed on the sampled rows.

    held: see `held_seconds`. None where the sampled rows were not timed.
    """
    decode = None if agreement is None else agreement.decode_ratio
    if agreement is None or not held or not totals.generate_seconds or (totals.decode_steps and decode is None):
        return None, None
    saved = totals.prefill_seconds * ((agreement.prefill_ratio or 1.0) - 1)
    saved += totals.decode_seconds * ((decode or 1.0) - 1)
    devices = totals.device_seconds / totals.generate_seconds
    return 1 + saved * devices / held, decode if totals.decode_steps else None
