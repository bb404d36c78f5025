"""Computes a job's figures from shard statistics and recorded runs, as lines for the console and the report page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from pipeline.answer.stats import Totals
from pipeline.commit.results import rows_of
from pipeline.commit.runs import JobRun
from pipeline.commit.sink import part_name
from pipeline.messages import counted, duration, parsed_control_tokens
from pipeline.plan.manifest import Manifest
from pipeline.storage.folder import Folder

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


def label_counts(totals: Totals, manifest: Manifest, most: int) -> list[tuple[str, int]]:
    """Return (label, number of answers): at most `most` labels, the unused ones last, then the sum of all others."""
    counts = [(" ".join(label.split()), count) for label, count in totals.labels.items()]
    if counts:
        counts += [(label, 0) for label in manifest.identity.get("choices") or () if label not in totals.labels]
    rest = sum(count for _, count in counts[most:]) + totals.unnamed_labels
    return counts[:most] + ([("all others", rest)] if rest or len(counts) > most else [])


def first_answers(folder: Folder, shards: pa.Table, count: int) -> list[tuple[str | None, dict[str, Any]]]:
    """Return the first `count` committed rows, each after the end of its prompt, as the model read it.

    The end of a prompt is None if no commit record keeps it. Stop at a part (output file) that cannot be read.
    """
    found = list[tuple[str | None, dict[str, Any]]]()
    with suppress(OSError, ValueError):
        for index, kept in zip(shards["shard"].to_pylist(), shards["prompt_ends"].to_pylist(), strict=True):
            if len(found) >= count:
                break
            ends, prompt = iter(json.loads(kept or "[]")), None
            for row in rows_of(folder.read(part_name(index))):
                prompt = prompt if row["sample_index"] else next(ends, None)
                found.append((prompt or None, row))
    return found[:count]


def held(runs: Sequence[JobRun], shards: pa.Table) -> tuple[float, float]:
    """Return the wall time of all recorded runs in s, and their device-seconds, both with start-up and idle time.

    A run that was killed ends with its last shard.
    """
    finished, wall, device_seconds = shards["finished"].to_numpy(), 0.0, 0.0
    ends = [*(run.began for run in runs[1:]), math.inf]
    for run, until in zip(runs, ends, strict=False):
        last = max(finished[(finished >= run.began) & (finished < until)], default=run.began)
        seconds = float(last if run.ended is None else run.ended) - run.began
        wall, device_seconds = wall + seconds, device_seconds + seconds * run.devices
    return wall, device_seconds


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
    wall, device_seconds = held(runs, shards)
    if wall:
        tokens = f", {totals.generated_tokens / wall:,.1f} tokens/s" if totals.decode_steps else ""
        yield f"{counted(len(runs), 'run')} took {duration(wall)}: {totals.rows / wall:,.1f} rows/s{tokens}"
    if totals.generated_tokens:
        yield _cost(totals, device_seconds)
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


def _cost(totals: Totals, held: float) -> str:
    """Return the line about device-seconds and money. held: device-seconds of all runs; 0 if no run is recorded."""
    price = totals.money / totals.device_seconds if totals.device_seconds else 0.0
    seconds, at_work = held or totals.device_seconds, f"{totals.device_seconds:,.1f} at work"
    each = 1e6 * seconds / totals.generated_tokens
    whole, million = (f" and money {price * amount:,.4g}" if price else "" for amount in (seconds, each))
    unit = "generated token" if totals.decode_steps else "answer"
    return (
        f"cost: {seconds:,.1f} device-seconds ({at_work}){whole}; "
        f"{each:,.0f} device-seconds{million} for a million {unit}s"
    )
