"""An estimate for a terminal, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.config.job import JobConfig
from pipeline.estimate.measure import EXACT
from pipeline.estimate.predict import Prediction
from pipeline.estimate.run import Estimate
from pipeline.messages import counted
from pipeline.runtime.wide_console import wide

BINS = 8  # of the histogram
BAR = 30  # characters of its longest bar


def histogram(tokens: list[int]) -> list[dict[str, int]]:
    """Prompt lengths in bins of equal width: {"from", "to", "rows"}, both ends counted."""
    low, high = min(tokens), max(tokens)
    width = max(1, -(-(high - low + 1) // BINS))
    counts = np.bincount((np.array(tokens) - low) // width)
    return [
        {"from": low + index * width, "to": low + (index + 1) * width - 1, "rows": int(count)}
        for index, count in enumerate(counts)
    ]


def device_hours(config: JobConfig, seconds: float) -> float:
    """Hours of all devices of the job."""
    return seconds * config.devices / 3600


def money(config: JobConfig, seconds: float) -> float | None:
    """Of a run; None without a price."""
    return None if config.price_per_hour is None else device_hours(config, seconds) * config.price_per_hour


def to_dict(found: Estimate) -> dict[str, Any]:
    """Plain values. `chosen` is the line of `speeds` that the job runs."""
    config, manifest, batching = found.job.config, found.job.manifest, found.job.manifest.batching
    rows = sum(shard.rows for shard in found.left)
    speeds = {name: _line(config, name, one, found) for name, one in found.predictions.items()}
    chosen, full = speeds[found.chosen], speeds.get("1x")
    saves = None
    if full is not None and found.chosen != "1x":
        saves = {name: full[name] - chosen[name] for name in ("seconds", "device_hours", "money") if full[name]}
    return {
        "output": config.output.path,
        "rows": manifest.rows,
        "rows_left": rows,
        "files": len(manifest.files),
        "shards": len(manifest.shards),
        "shards_left": len(found.left),
        "prompt_tokens": {
            "mean": float(np.mean(found.prompt_tokens)),
            "median": float(np.median(found.prompt_tokens)),
            "most": max(found.prompt_tokens),
            "histogram": histogram(found.prompt_tokens),
            "rows": len(found.prompt_tokens),
            "shared_prefix": len(batching.prefix),
        },
        "row_errors": {
            "sampled": len(found.prompt_tokens) + found.bad[0],
            "errors": found.bad[0],
            "first": found.bad[1],
        },
        "batching": {
            "scheduler": batching.scheduler,
            "max_batch": batching.max_batch,
            "shard_rows": batching.shard_rows,
            "cache_bytes": batching.cache_bytes,
            "threads": batching.threads,
        },
        "actors": config.actors.most,
        "devices": config.devices,
        "price_per_hour": config.price_per_hour,
        "sample": {"rows": found.sampled_rows, "actor_seconds": found.sample_seconds},
        "warnings": found.warnings,
        "startup": {**asdict(found.startup), "seconds": found.startup.seconds},
        "speeds": list(speeds.values()),
        "chosen": chosen,
        "saves": saves,
    }


def _line(config: JobConfig, name: str, one: Prediction, found: Estimate) -> dict[str, Any]:
    loss = found.losses.get(name)
    price = money(config, 1.0)
    return {
        "speed": name,
        **asdict(one),
        "tokens_per_second": one.generated_tokens / one.seconds,
        "device_seconds_per_million_tokens": {
            "at_work": 1e6 * one.busy_seconds * (config.actors.gpus or 1) / max(one.generated_tokens, 1),
            "with_start_up_and_idle": 1e6 * one.seconds * config.devices / max(one.generated_tokens, 1),
        },
        "device_hours": device_hours(config, one.seconds),
        "money": None if price is None else price * one.seconds,
        "money_low": None if price is None else price * one.low,
        "money_high": None if price is None else price * one.high,
        "loss": None if loss is None else asdict(loss),
    }


def print_estimate(console: Console, found: Estimate) -> None:
    """Print rows, prompts, batches, the table of speeds, and what the job's speed saves and loses."""
    console = wide(console, 150)
    values = to_dict(found)
    config, tokens, batching = found.job.config, values["prompt_tokens"], values["batching"]
    left = "" if values["rows_left"] == values["rows"] else f", {values['rows_left']:,} rows left"
    rows, files, shards = (counted(values[f"{noun}s"], noun) for noun in ("row", "file", "shard"))
    console.print(f"{rows} in {files}, {shards}{left}")
    console.print(
        f"prompts: {tokens['mean']:,.0f} tokens on average, {tokens['most']:,} at most, of {tokens['rows']:,} rows"
        + (f"; all begin with the same {tokens['shared_prefix']:,}" if tokens["shared_prefix"] else ""),
    )
    most = max(entry["rows"] for entry in tokens["histogram"])
    for entry in tokens["histogram"]:
        bar = "#" * round(BAR * entry["rows"] / most)
        console.print(f"  {entry['from']:>7,} to {entry['to']:>7,}  {entry['rows']:>6,}  {bar}")
    if found.bad[0]:
        console.print(f"rows with an error in the sample: {found.bad[0]:,}; the first: {found.bad[1]}", markup=False)
    how = "" if config.scores else f"{batching['scheduler']}, "
    console.print(
        f"batches: {how}at most {batching['max_batch']:,} rows in flight and "
        f"{batching['cache_bytes'] / 2**20:,.0f} MiB of cache an actor; "
        f"{counted(values['actors'], 'actor')}\n",
    )
    console.print(_table(found, values))
    actors, done = "an actor" if values["actors"] == 1 else "actors", "scored" if config.scores else "answered"
    console.print(
        f"\nwall clock with {found.startup.seconds:.0f} s of start-up, in brackets a 90% interval; from "
        f"{values['sample']['rows']:,} rows that {actors} {done} here",
    )
    cost, made = values["chosen"]["device_seconds_per_million_tokens"], "scored" if config.scores else "generated"
    console.print(
        f"cost at work: {cost['at_work']:,.0f} device-seconds for a million {made} tokens; with start-up and idle: "
        f"{cost['with_start_up_and_idle']:,.0f}"
    )
    if values["saves"] is not None:
        console.print(_saves(found, values))
    for line in found.warnings:
        console.print(f"warning: in the sample, {line}", markup=False)
    if config.budget is not None:
        console.print(_budget(config, values))


def _table(found: Estimate, values: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    priced = found.job.config.price_per_hour is not None
    names = [
        "speed",
        "wall clock",
        "",
        "tokens/s",
        "scored tokens" if found.job.config.scores else "new tokens",
        "layer ratio",
        "cache MiB",
        "device-hours",
    ]
    for name in [*names, *(["money"] if priced else []), *(["loss"] if found.losses else [])]:
        table.add_column(name, justify="left" if name == "loss" else "right", no_wrap=True)
    for line in values["speeds"]:
        loss = found.losses.get(line["speed"])
        cells = [
            line["speed"] + (" *" if line["speed"] == found.chosen else ""),
            duration(line["seconds"]),
            f"[{duration(line['low'])}, {duration(line['high'])}]".replace("[", r"\["),
            f"{line['tokens_per_second']:,.0f}",
            f"{line['generated_tokens']:,}",
            "-" if line["layer_ratio"] is None else f"{line['layer_ratio']:.2f}x",
            f"{line['cache_bytes'] / 2**20:,.1f}",
            f"{line['device_hours']:.3g}",
        ]
        cells += [f"{line['money']:,.2f}"] if priced else []
        cells += [str(loss).replace("[", r"\[") if loss else "-"] if found.losses else []
        table.add_row(*cells)
    return table


def _saves(found: Estimate, values: dict[str, Any]) -> str:
    """Such as: 2x saves 41.00 and 5.2 h against 1x; bleu loses 0.3 [-0.5, 1.1]."""
    saves = values["saves"]
    parts = [f"{saves['money']:,.2f}"] if saves.get("money") is not None else []
    parts.append(duration(abs(saves["seconds"])))
    verb = "saves" if saves["seconds"] >= 0 else "costs"
    loss = found.losses.get(found.chosen)
    known = "no evaluate or adapt record beside the checkpoint says what it loses"
    if found.chosen == EXACT:
        known = "its answers are those of 1x"
    elif loss:
        known = f"{loss} ({loss.source})"
    return f"{found.chosen} {verb} {' and '.join(parts)} against 1x; {known}".replace("[", r"\[")


def _budget(config: JobConfig, values: dict[str, Any]) -> str:
    """Whether the job's speed stays within its budget."""
    assert config.budget is not None
    chosen = values["chosen"]
    needed = {"hours": chosen["device_hours"], "money": chosen["money"], "tokens": chosen["generated_tokens"]}
    over = [
        f"{name} {needed[name]:,.4g} of {limit:,.4g}"
        for name, limit in config.budget.model_dump(exclude_none=True).items()
        if needed[name] > limit
    ]
    return f"budget: not enough, the job would stop: {', '.join(over)}" if over else "budget: enough"


def duration(seconds: float) -> str:
    """In the largest unit that reads well."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
