"""Plots of a report as SVG to be put into its page: matplotlib's, with the page's colours and fonts.

No text of the user's gets into a plot: labels are numbers and words of this file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.report.timeline import PARTS, Timeline, least_busy

WIDTH, WIDE = 4.0, 9.4  # inches of a plot in one column of the page, or in both
MOST_LANES = 14  # actors in a plot: of more, the slowest ones
FONT = 9.5  # points
# stand-ins that become the page's colours, of which there are light and dark ones
TEXT, GRID = "#000001", "#000002"
SERIES = [f"#0000a{number}" for number in range(len(PARTS))]
VARIABLES = {TEXT: "--text", GRID: "--grid", **{colour: f"--c{n}" for n, colour in enumerate(SERIES)}}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": FONT,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "path.simplify_threshold": 0.5,
}


def style() -> AbstractContextManager[None]:
    """The block in which plots are drawn."""
    return matplotlib.rc_context(_STYLE)


def number(value: float) -> str:
    """A number in at most five characters: 1,240, 12k, 0.35."""
    for least, unit, sign in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.3g}{sign}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit of a time axis of this length: seconds in it, and its sign."""
    return (1.0, "s") if seconds < 180 else (60.0, "min") if seconds < 10800 else (3600.0, "h")


def rates_plot(found: Timeline, rates: np.ndarray, unit: str) -> Markup:
    """One area per actor over the time of all runs, the whole job on top. rates: [actors, BINS]."""
    shown = _slowest(rates)
    height = 0.55 + 0.34 * (len(shown) + 1.6)
    figure, axes = _figure(WIDE, height, left=0.085, right=0.905, bottom=0.42 / height, top=1 - 0.08 / height)
    whole = rates.sum(axis=0)
    unit_seconds, sign = time_unit(found.edges[-1])
    edges = found.edges / unit_seconds
    lanes = [("all", whole, whole.max()), *((f"actor {n + 1}", rates[n], rates.max()) for n in shown)]
    at = 0.0
    ticks = []
    for place, (_, values, most) in enumerate(lanes):
        tall = 1.5 if place == 0 else 0.82
        at -= 1.62 if place == 0 else 1.0
        top = at + tall * np.append(values, values[-1]) / max(most, 1e-9)
        axes.fill_between(edges, at, top, step="post", color=SERIES[place > 0], alpha=0.85, linewidth=0)
        axes.axhline(at, color=GRID, linewidth=0.6)
        ticks.append(at + 0.3)
        seconds = np.diff(found.edges)
        mean = float((values * seconds).sum() / seconds.sum())
        axes.annotate(f"{number(mean)}/s", (1.008, at + 0.3), xycoords=("axes fraction", "data"), va="center")
    for start in found.starts[1:]:
        axes.axvline(start / unit_seconds, color=TEXT, linewidth=0.9, linestyle=(0, (3, 3)))
    axes.set_yticks(ticks, [name for name, *_ in lanes])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(at - 0.06, 0)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} {sign}"))
    return _svg(
        figure, f"rates-{unit}", f"{unit} per second of each actor over time, and of all together; means at the right"
    )


def seconds_plot(found: Timeline) -> Markup:
    """Where the seconds of each actor's runs went: a bar per actor, one for all, in shares of their wall clock."""
    lanes = least_busy(found.lanes, MOST_LANES)
    several = len(found.starts) > 1
    names = ["all", *(f"{f'run {lane.run}, ' if several else ''}actor {lane.number}" for lane in lanes)]
    sums = {part: sum(lane.seconds[part] for lane in found.lanes) for part in PARTS}
    rows = [sums, *(lane.seconds for lane in lanes)]
    height = 0.62 + 0.27 * len(rows)
    left = 0.155 if several else 0.085
    figure, axes = _figure(WIDE, height, left=left, right=0.97, bottom=0.34 / height, top=1 - 0.28 / height)
    starts = np.zeros(len(rows))
    for place, part in enumerate(PARTS):
        shares = np.array([100 * row[part] / max(sum(row.values()), 1e-9) for row in rows])
        axes.barh(np.arange(len(rows)), shares, left=starts, color=SERIES[place], height=0.74, label=part)
        starts = starts + shares
    axes.set_yticks(np.arange(len(rows)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=len(PARTS), frameon=False, handlelength=1.0)
    return _svg(figure, "seconds", "shares of each actor's wall clock: " + ", ".join(PARTS))


def bars_plot(name: str, labels: Sequence[str], counts: Sequence[float], unit: str, colour: int = 0) -> Markup:
    """A bar per label. unit: of the labels."""
    figure, axes = _figure(WIDTH, 2.1, left=0.125, right=0.99, bottom=0.235, top=0.96)
    places = np.arange(len(counts))
    axes.bar(places, counts, width=0.88, color=SERIES[colour])
    step = max(1, -(-len(labels) // 8))
    axes.set_xticks(places[::step], labels[::step])
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", linewidth=0.6)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.set_xlabel(unit)
    axes.set_xlim(-0.6, max(len(counts), 2) - 0.4)
    return _svg(figure, name, f"{name}: bars by {unit}")


def _slowest(rates: np.ndarray) -> list[int]:
    """Numbers of the lanes to show, in order: all, or those with the least rates."""
    order = np.argsort(rates.sum(axis=1), kind="stable")[:MOST_LANES]
    return sorted(int(lane) for lane in order)


def _figure(width: float, height: float, **margins: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    figure.subplots_adjust(**margins)
    return figure, axes


def _svg(figure: Figure, name: str, description: str) -> Markup:
    """The figure for a page: scaled by it, in its colours, with a text for those who do not see it."""
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    body = text.getvalue().partition("</metadata>")[2].partition("</defs>")[2]
    width, height = (72 * float(side) for side in figure.get_size_inches())
    used = set(re.findall(r"#(\w+)", body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)  # unique on the page
    body = re.sub(r"#0000(?:0[12]|a\d)", lambda found: f"var({VARIABLES[found[0]]})", body)
    body = re.sub(r"(\d+\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", " ", body))
    title = f"<title>{escape(description)}</title>"
    return Markup(f'<svg role="img" viewBox="0 0 {width:g} {height:g}">{title}{body}')
