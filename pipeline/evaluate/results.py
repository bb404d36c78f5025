"""What an evaluation found: plain values. Knows neither models nor files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

RECORD = "evaluate.json"
TABLES = ("table.json", "table.parquet", "plot.png", "plot.svg")


@dataclass(frozen=True)
class Score:
    """One metric of one line, with bootstrap intervals over rows.

    value: of the line itself, over the rows as they are; low, high: percentiles of the resampled values, between
    which it need not lie. loss, loss_low, loss_high: likewise, of the paired difference from full depth, positive
    where the line is worse, whichever direction of the metric is the better one.
    """

    value: float
    low: float
    high: float
    loss: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True)
class Line:
    """One schedule, measured.

    nominal: the speed asked for. layer_ratio: layers of full depth over layers run, over all decode steps; None for
    another model than the one whose speeds these are. mean_depth: layers a decode step. Both are None where no
    answer had a decode step. seconds, decode_seconds: medians over the runs, of the whole run and of its
    decode steps alone. tokens_per_second: generated, whole run. wall_clock, decode_wall_clock: 1x's seconds over
    the line's. cache_bytes: of the largest batch. scores: by the metric's name.
    """

    name: str
    group: str
    nominal: float | None
    layer_ratio: float | None
    mean_depth: float | None
    seconds: float
    decode_seconds: float
    tokens_per_second: float
    wall_clock: float
    decode_wall_clock: float
    cache_bytes: int
    scores: dict[str, Score]


@dataclass(frozen=True)
class Evaluation:
    """lines: those of the table, in its order. rows: answered by each. batch: rows a batch at most, for all lines.

    metric: what the lines are judged by. full_depth: name of the line that losses are against. confidence: share
    of the resampled scores inside an interval.
    """

    lines: list[Line]
    output: Path
    rows: int
    batch: int
    metric: str
    full_depth: str
    confidence: float


def slug(name: str) -> str:
    """A line's name as part of a file name."""
    return re.sub(r"[^\w.]+", "-", name).strip("-")


def answers_file(line: str) -> str:
    """Name of the file with a line's answers."""
    return f"answers-{slug(line)}.parquet"


def output_files(lines: Iterable[str]) -> list[str]:
    """Names of all files of an evaluation of these lines, but for its record."""
    return [*TABLES, *map(answers_file, lines)]
