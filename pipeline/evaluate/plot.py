"""Quality against wall clock as a picture: `plot.png` and `plot.svg`, every point labelled where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from pipeline.evaluate.label_placement import Box, place_labels
from pipeline.evaluate.metrics import METRICS
from pipeline.evaluate.results import Evaluation, Line

# after Okabe and Ito, darkened for text: colours that the colour-blind tell apart; shapes tell the groups apart in grey
STYLES = {
    "speed": ("o", "#0072B2"),
    "reference": ("h", "#000000"),
    "keep order": ("s", "#D55E00"),
    "decay": ("^", "#009E73"),
    "depth": ("D", "#A8487E"),
    "prompt": ("v", "#946C00"),
    "model": ("X", "#B00020"),
}
OTHER = ("P", "#555555")
SIZE, DPI, FONT = (9.0, 5.6), 150, 9.0
MARK = 7.0  # points across
PIECES = 24  # of each stretch of the line through the speeds


def write_plot(evaluation: Evaluation) -> None:
    """Draw the metric that lines are judged by over the whole run's wall clock, with its intervals."""
    figure = draw(evaluation.lines, evaluation)
    with matplotlib.rc_context({"svg.hashsalt": "skipdecode"}):
        figure.savefig(evaluation.output / "plot.png", dpi=DPI)
        figure.savefig(evaluation.output / "plot.svg", metadata={"Date": None})


def draw(lines: Sequence[Line], evaluation: Evaluation) -> Figure:
    """The figure, not yet written."""
    metric = METRICS[evaluation.metric]
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in lines:
        score = line.scores[evaluation.metric]
        mark, colour = STYLES.get(line.group, OTHER)
        axes.errorbar(
            line.wall_clock,
            score.value,
            # a percentile interval may lie beside its value
            yerr=[[max(score.value - score.low, 0)], [max(score.high - score.value, 0)]],
            fmt=mark,
            color=colour,
            ecolor=(*matplotlib.colors.to_rgb(colour), 0.35),
            elinewidth=1.2,
            capsize=2.5,
            markersize=MARK,
            markeredgecolor="white",
            markeredgewidth=0.6,
            zorder=3,
        )
    path = _path(lines, evaluation.metric)
    axes.plot(*zip(*path, strict=True), color=STYLES["speed"][1], alpha=0.35, linewidth=1, zorder=2)
    full = next(line for line in lines if line.name == evaluation.full_depth)
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
    _label(figure, axes, lines, evaluation.metric, full)
    return figure


def _path(lines: Sequence[Line], metric: str) -> list[tuple[float, float]]:
    """The speeds' points, slowest nominal speed first: a line joins them."""
    speeds = sorted((line for line in lines if line.group == "speed"), key=lambda line: line.nominal or 0)
    return [(line.wall_clock, line.scores[metric].value) for line in speeds]


def _label(figure: Figure, axes: Axes, lines: Sequence[Line], metric: str, full: Line) -> None:
    """Each line's name beside its point, joined to it by a thin line where it had to go further away."""
    figure.canvas.draw()  # settles the layout: from here on pixels mean something
    figure.set_layout_engine("none")
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    pixels = DPI / 72
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    points = [tuple(to_pixels((line.wall_clock, line.scores[metric].value))) for line in lines]
    names = [f"{line.name} (full depth)" if line is full and line.group == "speed" else line.name for line in lines]
    halo = [withStroke(linewidth=2.5, foreground="white")]
    texts = [axes.text(0, 0, name, fontsize=FONT, va="bottom", zorder=4, path_effects=halo) for name in names]
    extents = [text.get_window_extent(renderer) for text in texts]
    frame = axes.get_window_extent(renderer)
    boxes = place_labels(
        points,
        [(extent.width + 2 * pixels, extent.height + pixels) for extent in extents],
        _drawn(axes, lines, metric, full.scores[metric].value, frame, pixels),
        Box(frame.x0 + 4, frame.y0 + 4, frame.x1, frame.y1),
        MARK / 2 * pixels,
    )
    for line, text, box, point in zip(lines, texts, boxes, points, strict=True):
        colour = STYLES.get(line.group, OTHER)[1]
        left, bottom = to_data((box.left + pixels, box.bottom + pixels / 2))
        text.set_position((float(left), float(bottom)))
        text.set_color(colour)
        end = box.nearest(*point)
        far = ((end[0] - point[0]) ** 2 + (end[1] - point[1]) ** 2) ** 0.5 > MARK * pixels
        if far:
            (x0, y0), (x1, y1) = to_data(point), to_data(end)
            axes.plot([x0, x1], [y0, y1], color=colour, linewidth=0.6, alpha=0.7, zorder=2.5)


def _drawn(axes: Axes, lines: Sequence[Line], metric: str, level: float, frame: Bbox, pixels: float) -> list[Box]:
    """Intervals, full depth's level and the line through the speeds, as boxes that labels keep clear of."""
    to_pixels = axes.transData.transform
    boxes = []
    for line in lines:
        score = line.scores[metric]
        x, low = to_pixels((line.wall_clock, score.low))
        boxes.append(Box(x - 2 * pixels, low, x + 2 * pixels, to_pixels((line.wall_clock, score.high))[1]))
    y = to_pixels((1, level))[1]
    boxes.append(Box(frame.x0, y - pixels, frame.x1, y + pixels))
    path = [to_pixels(point) for point in _path(lines, metric)]
    for start, end in pairwise(path):
        for step in range(PIECES):
            x, y = start + (end - start) * (step + 0.5) / PIECES
            boxes.append(Box(x - 2 * pixels, y - 2 * pixels, x + 2 * pixels, y + 2 * pixels))
    return boxes
