"""Figures of a job's report from the shards' statistics and the recorded runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.commit.runs import JobRun
from pipeline.generate.agreement import Agreement
from pipeline.generate.stats import Totals

MOST_KINDS = 1000  # of errors that are told apart
SHOWN_KINDS = 20


def error_kinds(shards: pa.Table) -> list[dict[str, Any]]:
    """Return the most frequent kinds: `kind`, number of `answers`, `row_id`, error (`example`) and `shard` of one.

    The last entry, with an empty kind, counts the answers of all others.
    """
    found: dict[str, dict[str, Any]] = {}
    for shard, text in zip(shards["shard"].to_pylist(), shards["error_kinds"].to_pylist(), strict=True):
        for kind, answers, row_id, example in json.loads(text) if text else ():
            kind = kind if kind in found or len(found) < MOST_KINDS else ""
            one = {"kind": kind, "answers": 0, "row_id": row_id, "example": example, "shard": shard}
            found.setdefault(kind, one)["answers"] += answers
    others = found.pop("", {"answers": 0})
    listed = sorted(found.values(), key=lambda one: -one["answers"])
    rest = sum(one["answers"] for one in listed[SHOWN_KINDS:]) + others["answers"]
    return listed[:SHOWN_KINDS] + ([{"kind": "", "answers": rest}] if rest else [])


def run_spans(runs: Sequence[JobRun], shards: pa.Table) -> list[tuple[float, float]]:
    """Return begin and end of each run, s since 1970; of runs that are not recorded the span of their shards.

    A run that was killed ends with its last shard.
    """
    started, finished = (shards[name].to_numpy() for name in ("started", "finished"))
    timed = started > 0
    started, finished = started[timed], finished[timed]
    begins = [run.began for run in runs]
    if len(started) and (not runs or started.min() < begins[0]):
        begins.insert(0, float(started.min()))
    ends = [*[None] * (len(begins) - len(runs)), *(run.ended for run in runs)]
    places = np.searchsorted(np.array(begins), started, side="right") - 1
    spans = []
    for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        last = max(finished[places == number], default=begin)
        # a shard may finish after its run was stopped; clocks of nodes differ
        spans.append((begin, max(float(last), end or begin)))
    return spans


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
