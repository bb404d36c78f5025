"""Labels of the plot: beside their points, on top of nothing."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluate.label_placement import Box, place_labels
from pipeline.evaluate.plot import draw, write_plot
from pipeline.evaluate.results import Evaluation, Line, Score

FRAME = Box(0, 0, 1000, 600)
NAMES = ["paper", "even order", "learned order", "early exit", "cosine", "power 2", "step", "constant", "prompt first"]


@given(points=st.lists(st.tuples(st.floats(50, 950), st.floats(50, 550)), min_size=1, max_size=10))
@settings(max_examples=25, deadline=None)
def test_labels_cover_no_label_and_no_mark_and_stay_inside(points: list[tuple[float, float]]) -> None:
    check(points, place_labels(points, [(90, 14)] * len(points), [], FRAME, 6))


@pytest.mark.parametrize("spread", [0.0, 4.0, 25.0])
def test_they_do_so_when_fifteen_points_lie_together(spread: float) -> None:
    points = [(500 + spread * (place % 4), 300 + spread * (place // 4)) for place in range(15)]
    boxes = place_labels(points, [(110, 14)] * 15, [Box(0, 290, 1000, 292)], FRAME, 6)
    check(points, boxes)
    assert max(abs(box.centre[1] - 300) + abs(box.centre[0] - 500) for box in boxes) < 400


def check(points: list[tuple[float, float]], boxes: list[Box]) -> None:
    for one, two in combinations(boxes, 2):
        assert one.overlap(two) == 0
    for box in boxes:
        assert all(box.overlap(Box(x - 6, y - 6, x + 6, y + 6)) == 0 for x, y in points)
        assert box.left >= 0 and box.bottom >= 0 and box.right <= 1000 and box.top <= 600


def line(name: str, group: str, wall_clock: float, value: float) -> Line:
    score = Score(value, value - 1, value + 1, 0, -1, 1)
    return Line(name, group, 3.0, 2.0, 12.0, 1.0, 0.9, 100.0, wall_clock, wall_clock, 2**20, {"bleu": score})


def test_the_picture_names_every_line_and_its_axes(tmp_path: Path) -> None:
    lines = [line(f"{speed}x", "speed", 1 + speed / 4, 65.0) for speed in range(1, 6)]
    lines += [line(f"3x {name}", "decay", 1.75, 64 + place / 9) for place, name in enumerate(NAMES)]
    evaluation = Evaluation(lines, tmp_path, 504, 64, "bleu", "1x", 0.95)
    figure = draw(lines, evaluation)
    axes = figure.axes[0]
    texts = [text for text in axes.texts if text.get_text()]
    assert {text.get_text().split(" (")[0] for text in texts} == {one.name for one in lines}
    extents = [text.get_window_extent() for text in texts]
    assert not any(one.overlaps(two) for one, two in combinations(extents, 2))
    assert axes.get_xlabel() == "wall-clock speed-up over full depth, whole run (×)"
    assert axes.get_ylabel() == "BLEU, higher is better"
    assert "504 rows, batches of up to 64" in axes.get_title(loc="left")
    write_plot(evaluation)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    first = (tmp_path / "plot.svg").read_text()
    write_plot(evaluation)
    assert (tmp_path / "plot.svg").read_text() == first  # same numbers, same file
