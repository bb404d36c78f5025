"""Where to write labels beside the points of a plot, so that none covers a point or another label.

Pure geometry in pixels; knows no plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ANGLES = 24
DISTANCES = (0.0, 6.0, 14.0, 24.0, 36.0, 50.0, 66.0, 84.0, 104.0, 128.0, 156.0)  # pixels between a point and its label
ROUNDS = 6
# costs: of a pixel outside, of a square pixel of mark or label covered, of one of an obstacle, of leaders that cross
OUTSIDE, COVERED, TOUCHED, CROSSED = 50.0, 20.0, 2.0, 400.0


@dataclass(frozen=True)
class Box:
    """A rectangle; left < right, bottom < top."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """Area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def centre(self) -> tuple[float, float]:
        """Its middle."""
        return (self.left + self.right) / 2, (self.bottom + self.top) / 2

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box nearest to (x, y)."""
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    frame: Box,
    radius: float,
) -> list[Box]:
    """A box for each point's label: near its point, inside `frame`, clear of all else where there is room.

    sizes: width and height of each label. obstacles: what else had better not be. radius: of the points' marks.
    Greedy, then improved label by label; deterministic.
    """
    marks = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    choices = []
    for point, size in zip(points, sizes, strict=True):
        boxes = _candidates(point, size, radius)
        costs = [_fixed_cost(box, point, marks, obstacles, frame) for box in boxes]
        choices.append(sorted(zip(costs, boxes, strict=True), key=lambda one: one[0]))
    placed: dict[int, Box] = {}
    # those in the thick of it first: they have the fewest places to go to
    order = sorted(range(len(points)), key=lambda one: (sum(math.dist(points[one], other) for other in points), one))
    for turn in range(ROUNDS):
        before = dict(placed)
        for one in order:
            others = [(points[other], box) for other, box in placed.items() if other != one]
            least = math.inf
            for cost, box in choices[one]:
                if cost >= least:  # no later one can be cheaper
                    break
                total = cost + sum(_between(points[one], box, point, other) for point, other in others)
                if total < least:
                    least, placed[one] = total, box
        if turn and placed == before:
            break
    return [placed[one] for one in range(len(points))]


def _candidates(point: tuple[float, float], size: tuple[float, float], radius: float) -> list[Box]:
    """Boxes all around a point, nearest first; at 0 to the right, where one looks first."""
    boxes = []
    for distance in DISTANCES:
        for number in range(ANGLES):
            angle = 2 * math.pi * number / ANGLES
            x = point[0] + math.cos(angle) * (radius + 2 + distance)
            y = point[1] + math.sin(angle) * (radius + 2 + distance)
            # the box leans away from the point: its near side at (x, y)
            left = x - size[0] * (1 - math.cos(angle)) / 2
            bottom = y - size[1] * (1 - math.sin(angle)) / 2
            boxes.append(Box(left, bottom, left + size[0], bottom + size[1]))
    return boxes


def _fixed_cost(
    box: Box, point: tuple[float, float], marks: Sequence[Box], obstacles: Sequence[Box], frame: Box
) -> float:
    outside = (
        max(frame.left - box.left, 0)
        + max(box.right - frame.right, 0)
        + max(frame.bottom - box.bottom, 0)
        + max(box.top - frame.top, 0)
    )
    covered = sum(box.overlap(mark) for mark in marks)
    touched = sum(box.overlap(one) for one in obstacles)
    end = box.nearest(*point)
    passed = sum(_meets(point, end, mark) for mark in marks if mark.centre != point)
    return OUTSIDE * outside + COVERED * covered + TOUCHED * touched + CROSSED / 4 * passed + math.dist(point, end)


def _between(point: tuple[float, float], box: Box, other_point: tuple[float, float], other: Box) -> float:
    """What two labels cost each other: overlap, and leaders that cross or run through a label."""
    end, other_end = box.nearest(*point), other.nearest(*other_point)
    crossed = (
        _cross(point, end, other_point, other_end) + _meets(point, end, other) + _meets(other_point, other_end, box)
    )
    return COVERED * box.overlap(other) + CROSSED * crossed


def _cross(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float], d: tuple[float, float]) -> bool:
    """Whether segments ab and cd cross."""

    def side(p: tuple[float, float], q: tuple[float, float], r: tuple[float, float]) -> float:
        return (q[0] - p[0]) * (r[1] - p[1]) - (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) * side(a, b, d) < 0 and side(c, d, a) * side(c, d, b) < 0


def _meets(start: tuple[float, float], end: tuple[float, float], box: Box) -> bool:
    """Whether the segment passes through the inside of a box (looked at in 16 steps)."""
    if max(start[0], end[0]) <= box.left or min(start[0], end[0]) >= box.right:
        return False
    if max(start[1], end[1]) <= box.bottom or min(start[1], end[1]) >= box.top:
        return False
    for step in range(1, 16):
        x = start[0] + (end[0] - start[0]) * step / 16
        y = start[1] + (end[1] - start[1]) * step / 16
        if box.left < x < box.right and box.bottom < y < box.top:
            return True
    return False
