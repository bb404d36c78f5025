"""Holds the results of scoring several speeds, and prints tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.answers import Answer
from pipeline.learn.score.metrics import CONFIDENCE, METRICS, Score
from pipeline.messages import LEAST_TIMED, counted

Scores = dict[str, Score]  # metric name -> score


@dataclass(frozen=True)
class Line:
    """One line of the table: the measurements of a schedule, or of another model at full depth.

    Args:
        name: Speed and further keys of the schedule, or the name of the other model.
        nominal: Requested speed-up; None for another model.
        prompt: Prompt policy of the schedule.
        layer_ratio: Layers at full depth divided by layers run, over all decode steps; None if `nominal` is None.
        seconds: Time to answer all rows, median over timed rounds; in the record of `adapt`, time of one row.
        mean_depth: Mean number of layers of a decode step; None if there was no decode step.
        decode_seconds: Time of all decode steps, median over timed rounds.
        tokens_per_second: Generated tokens divided by `seconds`.
        timed_seconds: Time of all timed rounds together.
        wall_clock, decode_wall_clock: Speed-ups: `seconds` and `decode_seconds` of the 1x line divided by this line's.
            None if the rounds of one of the two lines took less than `LEAST_TIMED` together.
        cache_bytes: Size of the KV cache of the largest batch.
        warnings: Signs of bad answers, such as one text for most rows.
        uniform: Whether all tokens run the same layers, although fewer than at full depth.
    """

    name: str
    nominal: float | None
    prompt: str
    layer_ratio: float | None
    seconds: float
    scores: Scores
    mean_depth: float | None = None
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    timed_seconds: float = 0.0
    wall_clock: float | None = None
    decode_wall_clock: float | None = None
    cache_bytes: int = 0
    warnings: tuple[str, ...] = ()
    uniform: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Line:
        """Build a line from the values in a record."""
        return cls(**{**values, "scores": scores_of(values["scores"]), "warnings": tuple(values["warnings"])})


def scores_of(values: Mapping[str, Mapping[str, float]]) -> Scores:
    """Build scores from the values in a record."""
    return {name: Score(**score) for name, score in values.items()}


def chance_metric(metric: str, chance: Scores) -> str:
    """Return the metric in which lines are compared with chance, which has no token_kl: `metric` or a similar one."""
    return next((name for name in (metric, "fidelity") if name in chance), "agreement_exact")


def uselessness(line: Line, chance: Scores, metric: str) -> str | None:
    """Return a sentence that calls `line` useless if its score is no better than chance. Otherwise return None."""
    metric = chance_metric(metric, chance)
    if metric not in chance or line.scores[metric].value > chance[metric].value:
        return None
    title, value = METRICS[metric].title, line.scores[metric].value
    return f"{line.name} is useless, no better than chance: {title} {value:.1f}, by chance {chance[metric].value:.1f}"


def remarks(lines: Sequence[Line], chance: Scores, metric: str) -> list[str]:
    """Return sentences that name useless lines and signs of bad answers."""
    useless = [text for line in lines if (text := uselessness(line, chance, metric)) is not None]
    return [*useless, *(f"{line.name}: {text}" for line in lines for text in line.warnings)]


@dataclass(frozen=True)
class Evaluation:
    """Results of scoring several speeds.

    lines: in the table's order. answers: line name -> answers, in the order of the rows. batch: maximum number of rows
    in a batch. metric: name of the main metric. full_depth: name of the line that losses are measured against.
    chance: scores of answers that do not depend on their prompt.
    """

    lines: list[Line]
    answers: Mapping[str, Sequence[Answer]]
    batch: int
    metric: str
    full_depth: str
    chance: Scores

    @property
    def rows(self) -> int:
        """Number of rows that each line answers."""
        return len(self.answers[self.full_depth])

    def to_dict(self) -> dict[str, Any]:
        """Return the result without its answers, as plain values for JSON."""
        values = asdict(replace(self, answers={}))
        del values["answers"]
        return {"rows": self.rows, **values}


def print_tables(console: Console, evaluation: Evaluation) -> None:
    """Print a table of speeds and the main metric, a table of the other metrics, and warnings about bad lines."""
    console.print(_main_table(evaluation))
    console.print()
    console.print(_further_table(evaluation))
    metric = METRICS[evaluation.metric]
    console.print(
        f"\n{counted(evaluation.rows, 'row')}, batches of up to {evaluation.batch}. In brackets: "
        f"{100 * CONFIDENCE:g}% intervals, paired bootstrap over rows.\n"
        f"Loss: {metric.title} lost compared with {evaluation.full_depth}; a loss below 0 is a gain.\n"
        f"Wall clock: time at 1x ÷ time of the line; left out unless both were timed for at least {LEAST_TIMED:g} s."
    )
    for text in remarks(evaluation.lines, evaluation.chance, evaluation.metric):
        console.print(text)


def _main_table(evaluation: Evaluation) -> Table:
    metric = METRICS[evaluation.metric]
    title = f"{metric.title} %" if metric.unit == "%" else metric.title
    speed = (
        "layer\nratio",
        "mean\ndepth",
        "wall clock\nwhole",
        "decode",
        "timed\ns",
        "seconds",
        "tokens\n/s",
        "cache\nMiB",
    )
    table = _table("line", *speed, title, "loss")
    for line in evaluation.lines:
        score = line.scores[evaluation.metric]
        table.add_row(
            line.name,
            "-" if line.layer_ratio is None else f"{line.layer_ratio:.2f}x",
            "-" if line.mean_depth is None else f"{line.mean_depth:.1f}",
            clock_ratio(line.wall_clock),
            clock_ratio(line.decode_wall_clock),
            f"{line.timed_seconds:,.0f}",
            f"{line.seconds:.3g}" if line.seconds < 100 else f"{line.seconds:,.0f}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.cache_bytes / 2**20:.1f}",
            bracketed(score.value, score.low, score.high, metric.decimals),
            bracketed(score.loss, score.loss_low, score.loss_high, metric.decimals, signed=True)
            if line.name != evaluation.full_depth
            else "-",
        )
    if evaluation.metric in evaluation.chance:
        table.add_row("chance", *[""] * 8, f"{evaluation.chance[evaluation.metric].value:.{metric.decimals}f}", "")
    return table


def _further_table(evaluation: Evaluation) -> Table:
    """Return a table of all metrics except the main one. If BLEU is the main metric, exact match is left out too."""
    names = [name for name in evaluation.lines[0].scores if name != evaluation.metric]
    if evaluation.metric == "bleu":
        names.remove("exact_match")
    columns = {line.name: line.scores for line in evaluation.lines} | {"chance": evaluation.chance}
    table = _table("", *columns)
    for name in names:
        metric, found = METRICS[name], [scores.get(name) for scores in columns.values()]
        shown = ("" if one is None else bracketed(one.value, one.low, one.high, metric.decimals) for one in found)
        table.add_row(f"{metric.title} {metric.unit}".rstrip(), *shown)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, name in enumerate(columns):
        table.add_column(name, justify="right" if column else "left", no_wrap=True, vertical="bottom")
    return table


def clock_ratio(value: float | None) -> str:
    """Return `wall_clock` of a line as text; "-" if it is None."""
    return "-" if value is None else f"{value:.2f}x"


def bracketed(value: float, low: float, high: float, decimals: int, signed: bool = False) -> str:
    """Return a value and its interval as text; only the value if both ends of the interval round to it."""
    value, low, high = (round(number, decimals) + 0.0 for number in (value, low, high))  # + 0.0: no -0.0
    sign = "+" if signed and value else ""
    if low == value == high:
        return f"{value:{sign}.{decimals}f}"
    return f"{value:{sign}.{decimals}f} [{low:.{decimals}f}, {high:.{decimals}f}]"
