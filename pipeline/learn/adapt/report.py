"""Prints the result of an adaptation, and returns it as JSON values."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.config.adapt import MEANINGS
from pipeline.learn.adapt.run import Adapted
from pipeline.learn.adapt.task import AFTER, BEFORE
from pipeline.learn.score.lines import Line, bracketed, chance_metric, clock_ratio, remarks, uselessness
from pipeline.messages import LEAST_TIMED, duration


def print_adapted(console: Console, adapted: Adapted) -> None:
    """Print the scores before and after the training, the chosen speed, the break-even and the paths."""
    counts, folder = adapted.counts, adapted.folder
    console.print(
        f"{counts['drawn']:,} of {counts['job']:,} rows drawn: {counts['train']:,} trained on, "
        f"{counts.get('dev', 0):,} in the dev set, {counts['held_out']:,} held out; left out: "
        f"{counts['unreadable'] + counts['errors']:,} with an error, {counts['empty']:,} with an empty answer, "
        f"{counts['unreferenced']:,} without a reference, {counts['repeated']:,} with the prompt of a held-out row",
    )
    console.print(_table(adapted))
    unit = "nats" if adapted.metric == "token_kl" else "points of 100"
    console.print(f"{adapted.metric}: {MEANINGS[adapted.metric]}")
    console.print(
        f"losses are differences from the job's checkpoint at full depth, in {unit}; held-out rows, greedy sampling, "
        f"95% intervals by paired bootstrap over rows. Tolerance: {adapted.tolerance:g}. wall: time at 1x ÷ time of "
        f"the line, left out unless both were timed for at least {LEAST_TIMED:g} s",
    )
    if adapted.metric in adapted.chance:
        console.print(
            f"chance: {adapted.chance[adapted.metric].value:.4g} {adapted.metric}, the score of answers that do not "
            "depend on their row (the commonest label, or another row's text)"
        )
    for text in [*adapted.harmed, *remarks(adapted.after, adapted.chance, adapted.metric)]:
        console.print(text)
    console.print(_choice_by_engine(adapted), end="")
    if adapted.break_even is not None and adapted.chosen is not None:
        console.print("\n".join(adapted.break_even.sentences(adapted.chosen.name)))
    console.print(f"time: {', '.join(f'{stage} {seconds:,.1f} s' for stage, seconds in adapted.seconds.items())}")
    console.print(
        f"trained: {folder / adapted.trained}\nanswers to the held-out rows: {folder / BEFORE}, {folder / AFTER}",
    )
    if adapted.job_file is not None:
        console.print(f"next: skipdecode run {shlex.quote(str(adapted.job_file))}")


def _choice_by_engine(adapted: Adapted) -> str:
    """Return a line that compares the uniform schedules with the falling ones; no text if none was tried."""
    if not any(line.uniform for line in adapted.after):
        return ""
    chosen = "none" if adapted.chosen is None else adapted.chosen.name
    times = [
        f"{line.name} {duration(line.seconds)}" + ("" if _is_within(adapted, line) else " (outside the tolerance)")
        for line in adapted.after
        if line.nominal is not None and line.nominal > 1 and line.prompt == "first"
    ]
    return (
        f"chosen: {chosen}, the fastest within the tolerance on the engine {adapted.engine}. uniform: all tokens run "
        f"the same layers; otherwise depth falls. Time of a row: {', '.join(times)}\n"
    )


def _is_within(adapted: Adapted, line: Line) -> bool:
    return line.scores[adapted.metric].loss_high <= adapted.tolerance


def too_tight(adapted: Adapted) -> str:
    """Return why no speed was chosen, and which tolerance or number of rows would allow one."""
    closest = adapted.nearest
    if uselessness(closest, adapted.chance, adapted.metric) is not None:
        metric = chance_metric(adapted.metric, adapted.chance)
        return (
            f"every speed-up is useless: none has a higher {metric} than chance. No job file is written; "
            "raise adapt.rows or adapt.training.epochs"
        )
    score = closest.scores[adapted.metric]
    least = math.ceil(1000 * score.loss_high) / 1000  # rounded up, so that this speed is within the tolerance
    rows, held_out = "", adapted.counts["held_out"]
    if score.loss < adapted.tolerance:  # an interval's width is proportional to 1 / sqrt(number of rows)
        factor = ((score.loss_high - score.loss) / (adapted.tolerance - score.loss)) ** 2
        rows = (
            f"; if its loss stays {score.loss:.2g} with more rows, about {math.ceil(factor * held_out):,} held-out "
            f"rows (now {held_out:,}) would be enough"
        )
    return (
        f"no speed-up is within adapt.tolerance = {adapted.tolerance:g} of {adapted.metric}, and no job file is "
        f"written; {closest.name} would be within a tolerance of {least:g}{rows}"
    )


def to_dict(adapted: Adapted) -> dict[str, Any]:
    """Return the result as plain values for JSON, including the break-even's `at_rows` and `saved`."""
    values = asdict(adapted)
    if adapted.break_even is not None:
        values["break_even"] |= {"at_rows": adapted.break_even.at_rows, "saved": adapted.break_even.saved}
    paths = {"folder": adapted.folder, "job_file": adapted.job_file}
    return values | {name: path and str(path) for name, path in paths.items()}


def _table(adapted: Adapted) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("speed", "layer ratio", "wall", "timed s", adapted.metric, "before", "loss", "within", "token KL"):
        table.add_column(name, justify="right")
    before = {line.name: line for line in adapted.before}
    for line in adapted.after:
        if line.nominal is None:
            continue
        score = line.scores[adapted.metric]
        table.add_row(
            line.name + (" *" if line == adapted.chosen else ""),
            "" if line.layer_ratio is None else f"{line.layer_ratio:.2f}x",
            clock_ratio(line.wall_clock),
            f"{line.timed_seconds:,.0f}",
            f"{score.value:.4g}",
            f"{before[line.name].scores[adapted.metric].value:.4g}",
            bracketed(score.loss, score.loss_low, score.loss_high, 3 if adapted.metric == "token_kl" else 1),
            "yes" if _is_within(adapted, line) else "no",
            f"{line.scores['token_kl'].value:.3g}",
        )
    return table
