"""Whether exact mode's steps are rounds or plain: whichever has had more tokens a second at that number of rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

KEPT = 7  # newest measurements, of which the median counts
NEEDED = 3  # of each kind before the first choice: graphs are captured in the first ones
PROBE, RAREST = 64, 4096  # windows between two measurements of the slower kind: at first, and at most
RARER = 4  # times as many after each that changes nothing
GAIN = 1.02  # rounds must have so many times the tokens a second of plain steps


@dataclass
class _Rates:
    """Tokens a second of a row, by whether steps were rounds; windows since the slower kind was last measured."""

    of: dict[bool, deque[float]] = field(default_factory=lambda: {kind: deque(maxlen=KEPT) for kind in (False, True)})
    since: int = 0
    interval: int = PROBE

    @property
    def rounds_pay(self) -> bool:
        return median(self.of[True]) > GAIN * median(self.of[False])


class RoundChoice:
    """Chooses for windows of a few steps. Numbers of rows within a power of two share their measurements."""

    def __init__(self) -> None:
        self._rates: dict[int, _Rates] = {}

    def rounds(self, rows: int) -> bool:
        """Whether the next window's steps are rounds."""
        rates = self._at(rows)
        for kind in (False, True):
            if len(rates.of[kind]) < NEEDED:
                return kind
        return rates.rounds_pay != (rates.since >= rates.interval)

    def measured(self, rows: int, rounds: bool, tokens: float, seconds: float) -> None:
        """A window has taken so long, in which a row had so many tokens, on average."""
        rates = self._at(rows)
        known = all(len(seen) >= NEEDED for seen in rates.of.values())
        paid = known and rates.rounds_pay
        rates.of[rounds].append(tokens / max(seconds, 1e-9))
        if not known:
            return
        rates.since += 1
        if rounds != paid:  # the slower kind
            rates.since = 0
            rates.interval = min(RAREST, RARER * rates.interval)
        if rates.rounds_pay != paid:
            rates.interval = PROBE

    def _at(self, rows: int) -> _Rates:
        return self._rates.setdefault(rows.bit_length(), _Rates())
