"""Prints the estimate of `skipdecode plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.messages import LEAST_TIMED, counted, duration

LEAST_ROWS = 8  # minimum number of answered rows for which a speed's interval is shown


def print_estimate(console: Console, found: Mapping[str, Any]) -> None:
    """Print an estimate: rows, prompts, batches, a table of speeds, and the saving and loss of the job's speed."""
    tokens, batching, errors, chosen = (found[name] for name in ("prompt_tokens", "batching", "row_errors", "chosen"))
    left = "" if found["rows_left"] == found["rows"] else f", {found['rows_left']:,} rows left"
    rows, files, shards = (counted(found[f"{noun}s"], noun) for noun in ("row", "file", "shard"))

    console.print(f"{rows} in {files}, {shards}{left}")
    console.print(
        f"prompts: {tokens['mean']:,.0f} tokens on average, {tokens['most']:,} at most, in {tokens['rows']:,} rows"
    )
    if errors["errors"]:
        console.print(f"rows with an error in the sample: {errors['errors']:,}; the first: {errors['first']}")
    console.print(
        f"batches: {batching['scheduler']}, at most {batching['max_batch']:,} rows in flight and "
        f"{batching['cache_bytes'] / 2**20:,.0f} MiB of KV cache per actor; {counted(found['actors'], 'actor')}\n"
    )
    console.print(_table(found))
    answered, actors = found["sample"]["rows"], "an actor" if found["actors"] == 1 else "actors"
    console.print(
        f"\n*: the job's speed; wall clock includes {found['startup']['seconds']:.0f} s of start-up; "
        f"{'brackets: 90% interval; ' * (answered >= LEAST_ROWS)}measured on {counted(answered, 'row')} that {actors} "
        f"answered here; about: timed for less than {LEAST_TIMED:g} s; ideal: speed-up if time were proportional to "
        "the layers run"
    )
    if loads := found["sample"]["further_loads"]:
        took = f"{'took' if loads == 1 else 'together took'} {duration(found['sample']['further_load_seconds'])}"
        console.print(f"the sample needed {counted(loads, 'further model')}, whose loading {took}; a run loads one")
    if saves := found["saves"]:
        money = f"{abs(saves['money']):,.2f} and " if "money" in saves else ""
        source = "the loss in quality is not known: the checkpoint holds no result of `evaluate` or `adapt`"
        if loss := chosen["loss"]:
            source = f"{_loss(loss)} ({loss['source']})"
        verb = "saves" if saves["seconds"] >= 0 else "costs"
        console.print(f"{chosen['speed']} {verb} {money}{duration(abs(saves['seconds']))} against 1x; {source}")
    for line in found["warnings"]:
        console.print(f"warning: in the sample, {line}")


def _loss(loss: Mapping[str, Any]) -> str:
    low = "" if loss["low"] is None else f"{loss['low']:.2g}, "
    return f"loses {loss['loss']:.2g} [{low}{loss['high']:.2g}] {loss['metric'].replace('_', ' ')}"


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    lines = [
        {
            "speed": line["speed"] + (" *" if line is found["chosen"] else ""),
            "wall clock": duration(line["seconds"]),
            "": f"[{duration(line['low'])}, {duration(line['high'])}]" if line["sampled"] >= LEAST_ROWS else "",
            "tokens/s": f"{line['tokens_per_second']:,.0f}",
            "new tokens": f"{line['generated_tokens']:,}",
            "layer ratio": _ratio(line["layer_ratio"]),
            "speed-up": _speedup(line, found["speeds"]),
            "ideal": _ratio(line["ideal"]),
            "cache MiB": f"{line['cache_bytes'] / 2**20:,.1f}",
            "device-hours": f"{line['device_hours']:.3g}",
            "money": "" if line["money"] is None else f"{line['money']:,.2f}",
            "loss": _loss(line["loss"]) if line["loss"] else "",
        }
        for line in found["speeds"]
    ]
    names = [name for name in lines[0] if any(line[name] for line in lines)]
    for name in names:
        table.add_column(name, justify="left" if name == "loss" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[name] or "-" for name in names))
    return table


def _speedup(line: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a speed-up with its interval; "about" says that the speed or 1x was timed for less than `LEAST_TIMED`."""
    if line["speedup"] is None or line["speed"] == "1x":
        return _ratio(line["speedup"])
    timed = min(one["timed_seconds"] for one in lines if one["speed"] in ("1x", line["speed"]))
    interval = f" [{line['speedup_low']:.2f}, {line['speedup_high']:.2f}]" if line["sampled"] >= LEAST_ROWS else ""
    return f"{'about ' * (timed < LEAST_TIMED)}{_ratio(line['speedup'])}{interval}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
