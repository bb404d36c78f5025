"""Quality against wall clock as a picture, `plot.png` and `plot.svg`: speeds joined by a line, the rest in a legend."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pipeline.learn.evaluate.metrics import METRICS
from pipeline.learn.evaluate.results import Evaluation, Line, Score

MARKERS = {"speed": "o", "reference": "h", "keep order": "s", "decay": "^", "depth": "D", "prompt": "v", "model": "X"}
OTHER = "P"  # marker of any other group
SPEED = "#0072B2"
# the first eight after Okabe and Ito: distinct for the colour-blind
COLOURS = (
    *("#D55E00", "#009E73", "#A8487E", "#946C00", "#56B4E9", "#000000", "#B00020", "#777777"),
    *("#4B3B8F", "#7AB800", "#E6A000", "#8C564B"),
)
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
    colours = cycle(COLOURS)
    for line in lines:
        is_speed = line.group == "speed"
        _draw_point(axes, line, line.scores[evaluation.metric], SPEED if is_speed else next(colours))
        if is_speed:
            name = f"{line.name} (full depth)" if line is full else line.name
            point = (line.wall_clock, line.scores[evaluation.metric].value)
            axes.annotate(name, point, (5, 5), textcoords="offset points", fontsize=FONT, color=SPEED)
    speeds = sorted((line for line in lines if line.group == "speed"), key=lambda line: line.nominal or 0)
    points = [(line.wall_clock, line.scores[evaluation.metric].value) for line in speeds]
    axes.plot(*zip(*points, strict=True), color=SPEED, alpha=0.35, linewidth=1, zorder=2)
    level = full.scores[evaluation.metric].value
    axes.axhline(level, color="#888888", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    unit = f" ({metric.unit})" if metric.unit else ""
    better = "higher" if metric.higher_is_better else "lower"
    base = "full depth" if full.group == "speed" else "1x"
    axes.set_xlabel(f"wall-clock speed-up over {base}, whole run (×)")
    axes.set_ylabel(f"{metric.title}{unit}, {better} is better")
    axes.set_title(
        f"Quality against speed: {evaluation.rows:,} rows, batches of up to {evaluation.batch}, "
        f"{100 * evaluation.confidence:g}% bootstrap intervals",
        fontsize=FONT + 1,
        loc="left",
    )
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12, y=0.12)
    if any(line.group != "speed" for line in lines):
        figure.legend(loc="outside right upper", fontsize=FONT, frameon=False)
    return figure


def _draw_point(axes: Axes, line: Line, score: Score, colour: str) -> None:
    """The line's score with its interval; a line that is no speed gets an entry in the legend."""
    axes.errorbar(
        line.wall_clock,
        score.value,
        # a percentile interval may not hold its value
        yerr=[[max(score.value - score.low, 0)], [max(score.high - score.value, 0)]],
        fmt=MARKERS.get(line.group, OTHER),
        label=None if line.group == "speed" else line.name,
        color=colour,
        ecolor=(*matplotlib.colors.to_rgb(colour), 0.35),
        elinewidth=1.2,
        capsize=2.5,
        markersize=7.0,
        markeredgecolor="white",
        markeredgewidth=0.6,
        zorder=3,
    )
