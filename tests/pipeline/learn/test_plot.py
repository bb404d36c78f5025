"""The plot names every line, distinguishes all of them, and is the same file for the same numbers."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from pipeline.learn.evaluate.plot import draw, write_plot
from pipeline.learn.evaluate.results import Evaluation, Line, Score

NAMES = ["paper", "even order", "learned order", "early exit", "cosine", "power 2", "step", "constant", "prompt first"]


def line_of(name: str, group: str, wall_clock: float, value: float) -> Line:
    score = Score(value, 0, 1, value - 1, value + 1, -1)
    return Line(name, 3.0, "full", 2.0, 1.0, {"bleu": score}, group, wall_clock=wall_clock)


def test_the_picture_names_every_line_and_its_axes(tmp_path: Path) -> None:
    lines = [line_of(f"{speed}x", "speed", 1 + speed / 4, 65.0) for speed in range(1, 6)]
    lines += [line_of(f"3x {name}", "decay", 1.75, 64 + place / 9) for place, name in enumerate(NAMES)]
    evaluation = Evaluation(lines, tmp_path, 504, 64, "bleu", "1x", {})
    figure = draw(lines, evaluation)
    axes = figure.axes[0]
    [legend] = figure.legends
    named = [*(text.get_text() for text in axes.texts), *(text.get_text() for text in legend.get_texts())]
    assert [name.removesuffix(" (full depth)") for name in named] == [line.name for line in lines]
    extents = [text.get_window_extent() for text in axes.texts]
    assert not any(extent.overlaps(other) for extent, other in combinations(extents, 2))
    handles = [handle.lines[0] for handle in axes.get_legend_handles_labels()[0]]
    assert len({(handle.get_marker(), handle.get_color()) for handle in handles}) == len(NAMES)
    assert axes.get_xlabel() == "wall-clock speed-up over full depth, whole run (×)"
    assert axes.get_ylabel() == "BLEU, higher is better"
    assert "504 rows, batches of up to 64" in axes.get_title(loc="left")
    write_plot(evaluation)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "plot.svg").read_text()
    write_plot(evaluation)
    assert (tmp_path / "plot.svg").read_text() == first  # same numbers, same file
