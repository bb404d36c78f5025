"""How many tokens exact mode drafts: from measured seconds and measured acceptance, none where drafting does not pay.

With an acceptance a of each draft behind accepted ones, γ drafts yield (1 - a^(γ+1)) / (1 - a) tokens a row on average
(Leviathan et al. 2023, arXiv 2211.17192). They cost γ steps of few layers and one pass of all layers over γ + 1 tokens,
whose seconds grow with γ: slowly where weights are read from memory, in proportion where the processor computes.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MOST_DRAFTS = 8
FIRST = 1  # drafts of a round that only measures
KEPT = 7  # newest measurements, of which the median counts: a step beside other work takes twice as long
NEEDED = 3  # measurements before the first choice
JUDGED = 64  # drafts over which acceptance is taken, about; tokens for the yield
GAIN = 1.1  # drafting must promise so many times the tokens per second of plain steps
PROBE, RAREST = 32, 1024  # plain steps between two rounds that only measure: at first, and at most


class _Costs:
    """Seconds at about one number of rows: of a plain step, of a draft, and of each further token that is verified."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=KEPT)
        self.drafts: deque[float] = deque(maxlen=KEPT)
        self.tokens: deque[float] = deque(maxlen=KEPT)
        self.rounds = self.steps = 0  # since the other was last measured
        self.interval = PROBE
        self.best = 0  # drafts, by the measurements so far

    def rate(self, count: int, acceptance: float) -> float:
        """Tokens per second of a row with `count` drafts."""
        seconds = median(self.plain) + (count * (median(self.drafts) + median(self.tokens)) if count else 0.0)
        return expected_tokens(count, acceptance) / max(seconds, 1e-9)


class DraftLength:
    """Chooses γ for a number of rows. Up to four, each number has its costs; above, those that share a power of two."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._accepted, self._judged = 1.0, 2.0
        self._made, self._expected = 1.0, 1.0  # tokens of rounds: fewer than expected, where rows end within a round

    def choose(self, rows: int) -> int:
        """Drafts of the next round; 0: a plain step."""
        costs = self._at(rows)
        if len(costs.plain) < NEEDED or costs.rounds >= PROBE:
            return 0
        if len(costs.drafts) < NEEDED or costs.steps >= costs.interval:
            return FIRST
        return costs.best

    def stepped(self, rows: int, seconds: float) -> None:
        """A plain step has taken so long."""
        costs = self._at(rows)
        costs.plain.append(seconds)
        if costs.rounds and len(costs.plain) >= NEEDED:
            costs.best = self._best(costs)
        costs.rounds, costs.steps = 0, costs.steps + 1

    def drafted(
        self,
        rows: int,
        count: int,
        draft_seconds: float,
        verify_seconds: float,
        *,
        accepted: int,
        judged: int,
        tokens: int,
    ) -> None:
        """A round has taken so long, and made these tokens; of `judged` drafts, those behind accepted ones, so many
        were accepted.
        """
        costs = self._at(rows)
        costs.drafts.append(draft_seconds / count)
        costs.tokens.append(max(0.0, verify_seconds - median(costs.plain)) / count)
        kept = 1 - min(1.0, judged / JUDGED)  # sums, not a mean of shares: a round of few drafts would count too much
        self._accepted, self._judged = kept * self._accepted + accepted, kept * self._judged + judged
        expected = rows * expected_tokens(count, self._accepted / self._judged)
        kept = 1 - min(1.0, expected / JUDGED)
        self._made, self._expected = kept * self._made + tokens, kept * self._expected + expected
        probed = costs.steps >= costs.interval
        costs.rounds, costs.steps = costs.rounds + 1, 0
        costs.best = self._best(costs)
        if costs.best > 0:
            costs.interval = PROBE
        elif probed:
            costs.interval = min(RAREST, 2 * costs.interval)

    def _best(self, costs: _Costs) -> int:
        """The number of drafts that promises most; 0 unless it promises enough."""
        acceptance = self._accepted / self._judged
        rates = [costs.rate(count, acceptance) for count in range(MOST_DRAFTS + 1)]
        best = rates.index(max(rates))
        return best if rates[best] * min(1.0, self._made / self._expected) > GAIN * rates[0] else 0

    def _at(self, rows: int) -> _Costs:
        return self._costs.setdefault(rows if rows <= 4 else 4 * rows.bit_length(), _Costs())


def expected_tokens(count: int, acceptance: float) -> float:
    """Tokens of a round of `count` drafts, on average; acceptance: of each behind accepted ones."""
    return sum(acceptance**number for number in range(count + 1))
