"""Prints the estimate of `skipdecode plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.messages import LEAST_TIMED, counted, duration


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
    actors = "an actor" if found["actors"] == 1 else "actors"
    console.print(
        f"\n*: the job's speed; wall clock includes {found['startup']['seconds']:.0f} s of start-up; brackets: 90% "
        f"interval; measured on {counted(chosen['sampled'], 'row')} that {actors} answered here; about: timed for less "
        f"than {LEAST_TIMED:g} s; ideal: speed-up if time were proportional to the layers run"
    )
    if saves := found["saves"]:
        money = f"{abs(saves['money']):,.2f} and " if "money" in saves else ""
        source = "the loss in quality is not known: no record of `adapt` lies beside the checkpoint"
        if loss := chosen["loss"]:
            source = f"{_loss(loss)} ({loss['source']})"
        verb = "saves" if saves["seconds"] >= 0 else "costs"
        console.print(f"{chosen['speed']} {verb} {money}{duration(abs(saves['seconds']))} against 1x; {source}")
    for line in filter(None, [errors["too_many"], *(f"in the sample, {line}" for line in found["warnings"])]):
        console.print(f"warning: {line}")


def _loss(loss: Mapping[str, Any]) -> str:
    low = "" if loss["low"] is None else f"{loss['low']:.2g}, "
    return f"loses {loss['loss']:.2g} [{low}{loss['high']:.2g}] {loss['metric'].replace('_', ' ')}"


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    seconds = {line["speed"]: line["timed_seconds"] for line in found["speeds"]}
    lines = []
    for line in found["speeds"]:
        about = "about " * (line["timed_seconds"] < LEAST_TIMED)
        speedup = "-" if line["speedup"] is None else f"{line['speedup']:.2f}x"
        if line["speedup"] is not None and line["speed"] != "1x":
            interval = f" [{line['speedup_low']:.2f}, {line['speedup_high']:.2f}]"
            speedup = "about " * (min(seconds["1x"], line["timed_seconds"]) < LEAST_TIMED) + speedup + interval
        cells = {
            "speed": line["speed"] + (" *" if line["speed"] == found["chosen"]["speed"] else ""),
            "wall clock": f"{about}{duration(line['seconds'])} [{duration(line['low'])}, {duration(line['high'])}]",
            "tokens/s": f"{line['tokens_per_second']:,.0f}",
            "layer ratio": "-" if line["layer_ratio"] is None else f"{line['layer_ratio']:.2f}x",
            "speed-up": speedup,
            "ideal": "-" if line["ideal"] is None else f"{line['ideal']:.2f}x",
            "device-hours": f"{line['device_hours']:.3g}",
            "money": "" if line["money"] is None else f"{line['money']:,.2f}",
            "loss": _loss(line["loss"]) if line["loss"] else "",
        }
        lines.append(cells)
    names = [name for name in lines[0] if any(line[name] for line in lines)]
    for name in names:
        table.add_column(name, justify="left" if name == "loss" else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*(cells[name] or "-" for name in names))
    return table
