"""An evaluation as tables for a terminal, as Parquet and JSON with every score, and the answers of each line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from actors.answers import Answer
from pipeline.evaluate.data import EvalRow
from pipeline.evaluate.metrics import METRICS
from pipeline.evaluate.results import Evaluation, Line, Score, answers_file

WIDTH = 120  # columns that the tables are made for, whatever a pipe says its width is


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
    fields = [one.with_type(pa.float64()) if pa.types.is_null(one.type) else one for one in table.schema]
    pq.write_table(table.cast(pa.schema(fields)), evaluation.output / "table.parquet")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_answers(output: Path, rows: Sequence[EvalRow], answers: Mapping[str, Sequence[Answer]]) -> None:
    """`answers-<line>.parquet` for each line: prompt, answer, its length, references if there are any."""
    prompts = [row.prompt for row in rows]
    if any(isinstance(one, str) for one in prompts):  # files of both kinds: ids as text
        prompts = [one if isinstance(one, str) else json.dumps(one) for one in prompts]
    for name, each in answers.items():
        columns: dict[str, Any] = {
            "prompt": prompts,
            "answer": [one.generated_text for one in each],
            "generated_tokens": [one.generated_tokens for one in each],
            "finish_reason": [one.finish_reason for one in each],
        }
        if rows[0].references:
            columns["references"] = [list(row.references) for row in rows]
        pq.write_table(pa.table(columns), output / answers_file(name))


def print_tables(console: Console, evaluation: Evaluation) -> None:
    """Speed and the metric that lines are judged by; below, the other metrics."""
    wide = Console(file=console.file, width=max(console.width, WIDTH), soft_wrap=True, highlight=False)
    wide.print(_main_table(evaluation))
    wide.print()
    wide.print(_further_table(evaluation))
    metric = METRICS[evaluation.metric]
    percent = f"{100 * evaluation.confidence:g}%"
    wide.print(
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
    """Metrics of the second table: all others, but for an exact match of free text, which says next to nothing."""
    return [
        name
        for name in evaluation.lines[0].scores
        if name != evaluation.metric and not (name == "exact_match" and evaluation.metric == "bleu")
    ]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True, vertical="bottom")
    return table


def _score(line: Line, name: str) -> str:
    score: Score = line.scores[name]
    return bracketed(score.value, score.low, score.high, METRICS[name].decimals)


def bracketed(value: float, low: float, high: float, decimals: int, signed: bool = False) -> str:
    """A value and its interval; the value alone where there is nothing to tell of."""
    value, low, high = (round(one, decimals) + 0.0 for one in (value, low, high))  # + 0.0: no -0.0
    sign = "+" if signed and value else ""
    if low == value == high:
        return f"{value:{sign}.{decimals}f}"
    return f"{value:{sign}.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
