"""Results of an evaluation: plain values, files of scores and answers, tables for a terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from actors.answers import Answer
from pipeline.learn.evaluate.metrics import METRICS
from pipeline.runtime.wide_console import wide

RECORD = "evaluate.json"
TABLES = ("table.json", "table.parquet", "plot.png", "plot.svg")


@dataclass(frozen=True)
class Score:
    """Hold one metric of one line, with bootstrap intervals over rows.

    Args:
        value: The metric over the rows themselves.
        loss: Paired difference from full depth, positive where the line is worse.
        loss_high: Upper percentile of the resampled losses.
        low: Lower percentile of the resampled values; `value` may lie outside. 0 in records of earlier versions.
        high: Upper percentile of the resampled values.
        loss_low: Lower percentile of the resampled losses.
    """

    value: float
    loss: float
    loss_high: float
    low: float = 0.0
    high: float = 0.0
    loss_low: float = 0.0


@dataclass(frozen=True)
class Line:
    """Hold the measurements of one schedule or baseline. Only the first fields are in records of earlier versions.

    Args:
        name: Speed and prompt policy, or another name.
        nominal: Speed-up in the recipe; None for another model.
        prompt: Prompt policy.
        layer_ratio: Layers of full depth divided by layers run, over all decode steps; None for another model.
        seconds: Median of the whole run over the runs; in `adapt`'s record, seconds of one row.
        scores: By the metric's name.
        group: Group of the line in table and plot.
        mean_depth: Layers of a decode step, mean. None if no answer had a decode step.
        decode_seconds: Median of the decode steps' seconds over the runs.
        tokens_per_second: Generated tokens divided by seconds of the whole run.
        wall_clock: Seconds of 1x divided by those of this line.
        decode_wall_clock: The same of the decode steps.
        cache_bytes: Key/value cache of the largest batch.
    """

    name: str
    nominal: float | None
    prompt: str
    layer_ratio: float | None
    seconds: float
    scores: dict[str, Score]
    group: str = "speed"
    mean_depth: float | None = None
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    wall_clock: float = 1.0
    decode_wall_clock: float = 1.0
    cache_bytes: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Line:
        """Return the line of a record; one of an earlier version has no name."""
        nominal, prompt = values["nominal"], values["prompt"]
        policy = "" if prompt == "full" or nominal in (None, 1) else f" prompt={prompt}"
        name = "full depth" if nominal is None else f"{nominal:g}x{policy}"
        return cls(
            **{"name": name, **values, "scores": {name: Score(**score) for name, score in values["scores"].items()}}
        )


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation.

    lines: in the table's order. rows: answered by each. batch: rows a batch at most, for all lines. metric: the one
    that lines are judged by. full_depth: name of the line that losses are against. confidence: share of the resampled
    scores inside an interval.
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


def flat(evaluation: Evaluation) -> list[dict[str, Any]]:
    """One object a line: its numbers, and of metric m `m`, `m_low`, `m_high`, `m_loss`, `m_loss_low`, `m_loss_high`."""
    rows = []
    for line in evaluation.lines:
        row = {name: value for name, value in asdict(line).items() if name != "scores"}
        row |= {"rows": evaluation.rows, "batch": evaluation.batch, "confidence": evaluation.confidence}
        for metric, score in line.scores.items():
            for name, value in asdict(score).items():
                row[metric if name == "value" else f"{metric}_{name}"] = value
        rows.append(row)
    return rows


def write_table(evaluation: Evaluation) -> None:
    """`table.json` and `table.parquet` in the output folder."""
    rows = flat(evaluation)
    finite = [{key: _finite(value) for key, value in row.items()} for row in rows]
    (evaluation.output / "table.json").write_text(json.dumps(finite, indent=2, allow_nan=False) + "\n")
    table = pa.Table.from_pylist(rows)
    fields = [field.with_type(pa.float64()) if pa.types.is_null(field.type) else field for field in table.schema]
    pq.write_table(table.cast(pa.schema(fields)), evaluation.output / "table.parquet")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_answers(output: Path, columns: Mapping[str, Sequence[Any]], answers: Mapping[str, Sequence[Answer]]) -> None:
    """`answers-<line>.parquet` for each line.

    columns: of the rows, such as prompt and id. answers: of each line, by its name.
    """
    for name, line_answers in answers.items():
        answer_columns = {
            "answer": [answer.generated_text for answer in line_answers],
            "generated_tokens": [answer.generated_tokens for answer in line_answers],
            "finish_reason": [answer.finish_reason for answer in line_answers],
        }
        pq.write_table(pa.table({**columns, **answer_columns}), output / answers_file(name))


def print_tables(console: Console, evaluation: Evaluation) -> None:
    """Print speed and the metric that lines are judged by, and the other metrics below."""
    console = wide(console)
    console.print(_main_table(evaluation))
    console.print()
    console.print(_further_table(evaluation))
    metric = METRICS[evaluation.metric]
    percent = f"{100 * evaluation.confidence:g}%"
    console.print(
        f"\n{evaluation.rows:,} rows, batches of up to {evaluation.batch}. In brackets: {percent} intervals, paired "
        f"bootstrap over rows.\nLoss: {metric.title} lost against {evaluation.full_depth}; below 0 is a gain."
    )


def _main_table(evaluation: Evaluation) -> Table:
    metric = METRICS[evaluation.metric]
    title = f"{metric.title} %" if metric.unit == "%" else metric.title
    table = _table("line", "layer\nratio", "mean\ndepth", "wall clock\nwhole", "\ndecode", "\nseconds", "tokens\n/s")
    for name in ("cache\nMiB", f"\n{title}", "\nloss"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in evaluation.lines:
        score = line.scores[evaluation.metric]
        table.add_row(
            line.name,
            "-" if line.layer_ratio is None else f"{line.layer_ratio:.2f}x",
            "-" if line.mean_depth is None else f"{line.mean_depth:.1f}",
            f"{line.wall_clock:.2f}x",
            f"{line.decode_wall_clock:.2f}x",
            f"{line.seconds:.3g}" if line.seconds < 100 else f"{line.seconds:,.0f}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.cache_bytes / 2**20:.1f}",
            bracketed(score.value, score.low, score.high, metric.decimals),
            bracketed(score.loss, score.loss_low, score.loss_high, metric.decimals, signed=True)
            if line.name != evaluation.full_depth
            else "-",
        )
    return table


def _further_table(evaluation: Evaluation) -> Table:
    names = further_metrics(evaluation)
    table = _table("line")
    for name in names:
        metric = METRICS[name]
        title = metric.title.replace(" to ", "\nto ")
        table.add_column(f"{title} {metric.unit}".rstrip(), justify="right", no_wrap=True, vertical="bottom")
    for line in evaluation.lines:
        table.add_row(line.name, *(_score(line, name) for name in names))
    return table


def further_metrics(evaluation: Evaluation) -> list[str]:
    """Metrics of the second table: all others, but for the exact match of free text."""
    return [
        name
        for name in evaluation.lines[0].scores
        if name != evaluation.metric and not (name == "exact_match" and evaluation.metric == "bleu")
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, name in enumerate(columns):
        table.add_column(name, justify="right" if column else "left", no_wrap=True, vertical="bottom")
    return table


def _score(line: Line, name: str) -> str:
    score: Score = line.scores[name]
    return bracketed(score.value, score.low, score.high, METRICS[name].decimals)


def bracketed(value: float, low: float, high: float, decimals: int, signed: bool = False) -> str:
    """A value and its interval; the value alone if the interval is empty."""
    value, low, high = (round(number, decimals) + 0.0 for number in (value, low, high))  # + 0.0: no -0.0
    sign = "+" if signed and value else ""
    if low == value == high:
        return f"{value:{sign}.{decimals}f}"
    return f"{value:{sign}.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
