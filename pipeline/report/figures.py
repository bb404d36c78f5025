"""Computes a job's figures from shard statistics and recorded runs, as lines for the console and the report page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.answer.stats import Totals
from pipeline.commit.runs import JobRun
from pipeline.messages import counted, duration, parsed_control_tokens
from pipeline.plan.manifest import Manifest

MOST_KINDS = 1000  # maximum number of error kinds that are counted separately; all others are counted together
SHOWN_KINDS = 20


def error_kinds(shards: pa.Table) -> list[dict[str, Any]]:
    """Return the most common error kinds: `kind`, number of `answers`, and `row_id`, `example`, `shard` of one answer.

    If there are more kinds, a last entry with an empty `kind` counts the answers of all other kinds.
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
    """Return (begin, end) of each run, in s since 1970. The run's shards give the times that are not recorded."""
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
        # a shard may finish after the run was stopped, and the clocks of nodes differ
        spans.append((begin, max(float(last), end or begin)))
    return spans


def held_seconds(runs: Sequence[JobRun], shards: pa.Table) -> float | None:
    """Return the device-seconds of all runs, including start-up and idle time; None if no run is recorded."""
    if not runs:
        return None
    spans = run_spans(runs, shards)
    devices = [*[runs[0].devices] * (len(spans) - len(runs)), *(run.devices for run in runs)]
    return sum((end - begin) * count for (begin, end), count in zip(spans, devices, strict=True))


def total_lines(manifest: Manifest, totals: Totals, runs: Sequence[JobRun], shards: pa.Table) -> Iterator[str]:
    """Yield lines about the work and cost of a job. runs: recorded runs. shards: statistics in `STATS_SCHEMA`."""
    rows = counted(manifest.rows, "row")
    if not totals.shards:
        yield f"no shard is committed yet: 0 of {rows}"
        return
    answers = "" if totals.answers == totals.rows else f" ({totals.answers:,} answers)"
    of_all = "" if totals.rows == manifest.rows else f"{totals.rows:,} of "
    yield (
        f"{of_all}{rows}{answers} in {counted(totals.shards, 'shard')}, {totals.errors:,} with an "
        f"error; {totals.prompt_tokens:,} prompt and {totals.generated_tokens:,} generated tokens"
    )
    yield _nominal(manifest, totals)
    if totals.cut_off:
        ended = totals.stopped + totals.cut_off
        share = f"{totals.cut_off:,} of {counted(ended, 'answer')} ({totals.cut_off / ended:.1%})"
        yield f"cut off at a length limit (sampling.max_new_tokens, context): {share}"
    decode = ""
    if totals.mean_depth is None:
        if totals.generated_tokens:
            yield "no decode steps: prefill gives the whole answer"
    else:
        decode = f", decode {totals.decode_seconds:.1f}"
        ratio = "" if totals.layer_ratio is None else f", layer ratio {totals.layer_ratio:.2f}x"
        yield (
            f"mean depth {totals.mean_depth:.2f} of {manifest.identity['schedule']['num_layers']}{ratio}: "
            f"{totals.layer_steps:,} layer steps, {totals.full_layer_steps:,} at full depth"
        )
    yield (
        f"actor seconds: prefill {totals.prefill_seconds:.1f}{decode}, total {totals.generate_seconds:.1f}; "
        f"prepare {totals.prepare_seconds:.1f}, commit {totals.commit_seconds:.1f}; "
        f"padding {100 * totals.padding_fraction:.1f}%"
    )
    if runs and (wall := sum(end - begin for begin, end in run_spans(runs, shards))):
        tokens = f", {totals.generated_tokens / wall:,.1f} tokens/s" if totals.decode_steps else ""
        yield f"{counted(len(runs), 'run')} took {duration(wall)}: {totals.rows / wall:,.1f} rows/s{tokens}"
    yield from _cost(totals, held_seconds(runs, shards))
    yield (
        f"KV cache: at most {totals.cache_bytes / 2**20:.1f} MiB per batch; peak memory of an actor: "
        f"{totals.peak_memory_bytes / 2**20:,.0f} MiB"
    )
    if totals.shared_prompt_tokens:
        shared = f"{totals.shared_prompt_tokens:,} prompt tokens"
        yield f"{shared} were computed only once for several rows: shared prefixes, prompts and samples"
    if totals.out_of_memory:
        yield (
            f"memory ran out {counted(totals.out_of_memory, 'time')}, and the batch was halved and run again: lower "
            "actors.cache_bytes or max_new_tokens to avoid this"
        )
    if totals.control_tokens:
        yield parsed_control_tokens(totals.control_tokens)


def _nominal(manifest: Manifest, totals: Totals) -> str:
    """Return the line about the nominal speed-up."""
    schedule = manifest.identity["schedule"]
    layers, speedup = schedule["num_layers"], schedule["speedup"]
    prompt_layers = schedule["depths"][0] if schedule.get("prompt") == "first" else layers
    skips = totals.layer_steps < totals.full_layer_steps or prompt_layers < layers
    asked = f"{speedup:g}x" if speedup else "configured depths" if skips else "1x, full depth"
    prompts = f"; prompts run {prompt_layers} of {layers} layers" if prompt_layers < layers else ""
    return f"nominal speed-up: {asked}{prompts}"


def _cost(totals: Totals, held: float | None) -> Iterator[str]:
    """Yield lines with device-seconds and money: total, and per million tokens or answers. held: see `held_seconds`."""
    if not totals.generated_tokens:
        return
    price = totals.money / totals.device_seconds if totals.device_seconds else 0.0
    unit = "generated token" if totals.decode_steps else "answer"
    for name, seconds in (("at work", totals.device_seconds), ("with start-up and idle", held)):
        if seconds is not None:
            each = 1e6 * seconds / totals.generated_tokens
            whole, million = (f" and money {price * amount:,.4g}" if price else "" for amount in (seconds, each))
            amounts = f"{seconds:,.1f} device-seconds{whole}; {each:,.0f} device-seconds{million}"
            yield f"cost {name}: {amounts} for a million {unit}s"
