"""Quality against wall clock as a picture, `plot.png` and `plot.svg`: speeds joined by a line, the rest in a legend."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.learn.evaluate.metrics import METRICS
from pipeline.learn.evaluate.results import CONFIDENCE, Evaluation, Line

MARKERS = "s^DvXPh"  # of the lines that are no speeds, in turn; with the colours no two of the first 100 look alike
SPEED, COLOURS = "tab:blue", [*matplotlib.color_sequences["Dark2"], *matplotlib.color_sequences["Set1"]]
SIZE, DPI, FONT = (9.0, 5.6), 150, 9.0  # inches, dots an inch, points


def write_plot(evaluation: Evaluation) -> None:
    """Draw the metric that lines are judged by over the whole run's wall clock, with its intervals."""
    figure = draw(evaluation.lines, evaluation)
    with matplotlib.rc_context({"svg.hashsalt": "skipdecode"}):
        figure.savefig(evaluation.output / "plot.png", dpi=DPI)
        figure.savefig(evaluation.output / "plot.svg", metadata={"Date": None})


def draw(lines: Sequence[Line], evaluation: Evaluation) -> Figure:
    """The figure of these lines."""
    metric = METRICS[evaluation.metric]
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    full = next(line for line in lines if line.name == evaluation.full_depth)
    speeds = sorted((line for line in lines if line.group == "speed"), key=lambda line: line.nominal or 0)
    others = [line for line in lines if line.group != "speed"]
    for number, line in enumerate([*speeds, *others], -len(speeds)):
        is_speed, score = number < 0, line.scores[evaluation.metric]
        axes.errorbar(
            line.wall_clock,
            score.value,
            # a percentile interval may not hold its value
            yerr=[[max(score.value - score.low, 0)], [max(score.high - score.value, 0)]],
            fmt="o" if is_speed else MARKERS[number % len(MARKERS)],
            label=None if is_speed else line.name,
            color=SPEED if is_speed else COLOURS[number % len(COLOURS)],
            elinewidth=0.6,
            capsize=2.5,
            markersize=7.0,
            markeredgecolor="white",
        )
        if is_speed:
            name = f"{line.name} (full depth)" if line is full else line.name
            point = (line.wall_clock, score.value)
            axes.annotate(name, point, (5, 5), textcoords="offset points", fontsize=FONT, color=SPEED)
    points = [(line.wall_clock, line.scores[evaluation.metric].value) for line in speeds]
    axes.plot(*zip(*points, strict=True), color=SPEED, alpha=0.35, linewidth=1)
    axes.axhline(full.scores[evaluation.metric].value, color="gray", linewidth=0.8, linestyle="--", zorder=1)
    unit = f" ({metric.unit})" if metric.unit else ""
    base = "full depth" if full.group == "speed" else "1x"
    axes.set_xlabel(f"wall-clock speed-up over {base}, whole run (×)")
    axes.set_ylabel(f"{metric.title}{unit}, {'higher' if metric.higher_is_better else 'lower'} is better")
    title = f"Quality against speed: {evaluation.rows:,} rows, batches of up to {evaluation.batch}, "
    interval = f"{100 * CONFIDENCE:g}% bootstrap intervals"
    axes.set_title(title + interval, fontsize=FONT + 1, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12, y=0.12)
    if others:
        figure.legend(loc="outside right upper", fontsize=FONT, frameon=False)
    return figure
