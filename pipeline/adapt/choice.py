"""From what was measured to what is advised: the fastest speed within the tolerance, and when it has paid for itself.

Pure functions; no model, no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Quality:
    """A score, and what it loses against the job's own checkpoint at full depth; `loss_high` at worst."""

    value: float
    loss: float
    loss_high: float


@dataclass(frozen=True)
class Measured:
    """A checkpoint at one speed over the held-out rows.

    nominal: None for the job's own checkpoint at full depth, whose layer_ratio may be None. seconds: of one row, whole
    wall clock. scores: by the metric's name, in its unit.
    """

    nominal: float | None
    layer_ratio: float | None
    seconds: float
    scores: Mapping[str, Quality]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measured:
        """What `to_dict` gave."""
        return cls(**{**values, "scores": {name: Quality(**score) for name, score in values["scores"].items()}})


def choose(metric: str, tolerance: float, lines: Sequence[Measured]) -> Measured | None:
    """The fastest speed-up whose loss is at worst within `tolerance`; of equally fast ones the shallower.

    None if there is none; a nominal 1 is no speed-up.
    """
    within = [line for line in _candidates(lines) if line.scores[metric].loss_high <= tolerance]
    return min(within, key=lambda line: (line.seconds, -(line.layer_ratio or 1.0)), default=None)


def nearest(metric: str, lines: Sequence[Measured]) -> Measured:
    """The speed-up that the smallest tolerance would admit."""
    return min(_candidates(lines), key=lambda line: (line.scores[metric].loss_high, line.seconds))


def _candidates(lines: Sequence[Measured]) -> list[Measured]:
    return [line for line in lines if line.nominal is not None and line.nominal > 1]


def side_by_side(actors: int, gpus: float, threads: int, cores: int | None, devices: int | None) -> float:
    """How many actors' work gets done at once: those that find hardware of their own; the others take turns.

    actors: at most, each with `gpus` GPUs and `threads` threads. cores, devices: CPU cores and GPUs of the machine;
    None: of a cluster, taken to have room for all.
    """
    if gpus:
        own = actors * min(gpus, 1.0)  # actors that share a GPU take turns on it
        room = own if devices is None else devices / max(gpus, 1.0)
    else:
        own = float(actors)
        room = own if cores is None else cores / threads
    return max(1.0, min(own, room))


@dataclass(frozen=True)
class BreakEven:
    """What adaptation costs and saves, in seconds.

    cost: wall clock of the adaptation. full, fast: of one row at full depth without it, and at the chosen speed with
    it, by one actor. rows: that the job has. actors: that answer side by side, each as fast as that one.
    """

    cost: float
    full: float
    fast: float
    rows: int
    actors: float = 1.0

    @property
    def at_rows(self) -> int | None:
        """Rows from which adaptation has paid for itself; None if a row saves nothing."""
        saved = self.full - self.fast
        return math.ceil(self.cost * self.actors / saved) if saved > 0 else None

    @property
    def pays(self) -> bool:
        """Whether this job is long enough."""
        return self.at_rows is not None and self.rows >= self.at_rows

    @property
    def without(self) -> float:
        """Seconds of the job without adaptation."""
        return self.rows * self.full / self.actors

    @property
    def saved(self) -> float:
        """Seconds that this job saves, the cost of adaptation taken off; below 0 it loses."""
        return self.without - self.rows * self.fast / self.actors - self.cost

    def sentences(self, speed: str) -> list[str]:
        """The account, for people."""
        lines = [
            f"adaptation took {_duration(self.cost)}, the evaluation before it not counted; a row takes one actor "
            f"{_duration(self.full)} at full depth without it and {_duration(self.fast)} at {speed} with it"
        ]
        job = f"this job has {self.rows:,} rows"
        if self.at_rows is None:
            lines.append(f"break-even: never, for {speed} saves no time on this hardware; adaptation does not pay")
        elif not self.pays:
            lines.append(f"break-even: {self.at_rows:,} rows; {job}, so that adaptation does not pay for it alone")
        else:
            percent = 100 * self.saved / self.without
            lines.append(
                f"break-even: {self.at_rows:,} rows; {job}: {_duration(self.without)} become "
                f"{_duration(self.without - self.saved)}, adaptation included: {percent:.0f}% saved"
            )
        lines.append(
            f"(assumed: {self.actors:.3g} actor{'s' * (self.actors != 1)} at work side by side, each on hardware of "
            "its own that is as fast as the one measured on this machine)"
        )
        return lines


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.2f} ms"
