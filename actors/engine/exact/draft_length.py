"""How many tokens exact mode drafts: from measured seconds and measured acceptance, none where drafting does not pay.

With an acceptance a of each draft behind accepted ones, γ drafts yield (1 - a^(γ+1)) / (1 - a) tokens a row on average
(Leviathan et al. 2023, arXiv 2211.17192). They cost γ steps of few layers and one pass of all layers over γ + 1 tokens,
whose seconds grow with γ: slowly where weights are read from memory, in proportion where the processor computes.
Drafts that a row looks up cost that pass alone: each is worth it whose chance to count is above its share of a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from actors.engine.exact.lookup import Acceptance

MOST_DRAFTS = 8
FIRST = 2  # drafts of the layers in a round that only measures, of all rows: a single one would bear its other costs
MEASURED = 4  # tokens looked up in such a round; one token's time is too short to measure
KEPT = 7  # newest measurements, of which the lower quartile counts: other work makes steps slower
NEEDED = 3  # plain steps before the first choice
TRIALS = 2  # rounds of the layers before it, of which the first one prepares what it runs
JUDGED = 64.0  # drafts over which acceptance is taken, about; tokens for the yield
PRIOR = 3.0, 4.0  # drafts accepted and judged before the first: too high costs rounds, too low the whole gain
GAIN = 1.1  # drafting must promise so many times the tokens per second of plain steps
WORTH = 1.2  # least ratio of a lookup draft's expected gain to its cost
PROBE, RAREST = 32, 1024  # plain steps between two rounds that only measure: at first, and at most
SOON = 4  # the same behind rounds that paid until now, and rounds before the next plain step, at first: either may have
# been measured beside other work
RARER = 4  # times as many after each lookup that finds nothing
LAYERS_RARER, TRIAL_LOSS = 2, 0.01  # the same for the layers, whose rounds may take so much of the time in vain
LOOKED = 16  # steps after which looking up is judged
LOSS = 0.005  # share that it may lose then


@dataclass(frozen=True)
class Plan:
    """What a step drafts.

    Args:
        count: Tokens that the layers draft for each row; 0: none.
        most: Tokens that are looked up for a row, at most; 0: none.
        least: Chance to count that such a draft must have.
        total: Tokens that are looked up for all rows, at most.
    """

    count: int = 0
    most: int = 0
    least: float = 0.0
    total: float = math.inf

    def looked_up(self, acceptance: float) -> int:
        """Drafts to verify of those that a row has looked up; acceptance: of each behind accepted ones."""
        chance, count = acceptance, 0
        while count < self.most and chance >= self.least:
            chance, count = chance * acceptance, count + 1
        return count


@dataclass
class Round:
    """What a round has drafted and verified, and what counted.

    Args:
        rows: In flight.
        steps: Of the drafting layers.
        draft_seconds: Of these steps.
        verify_seconds: Of the pass of all layers, and of sampling.
        drafted: Tokens that the layers have drafted, for `drafting` rows.
        looked_up: Tokens that were looked up.
        accepted, judged: Of the layers' drafts: those that counted, and those behind accepted ones.
        tokens: Of the rows that the layers drafted for.
    """

    rows: int
    steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafted: int = 0
    drafting: int = 0
    looked_up: int = 0
    accepted: int = 0
    judged: int = 0
    tokens: int = 0


class _Costs:
    """Seconds at about one number of rows: of a plain step, of a draft, and of each further token that is verified."""

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=KEPT)
        self.drafts: deque[float] = deque(maxlen=KEPT)
        self.tokens: deque[tuple[float, int]] = deque(maxlen=KEPT)  # each, and its weight
        self.rounds = self.steps = 0  # since the other was last measured
        self.interval, self.plain_interval = PROBE, SOON
        self.best = 0  # drafts, by the measurements so far
        self.looked = self.rest = 0  # steps since looking up was judged; steps without it that are left
        self.looked_interval = PROBE
        self.made = self.spent = 0.0  # in these steps: tokens and seconds, each over those of a plain step
        self.gain = 1.0  # speed-up of these steps over plain ones, at the last decision

    @property
    def step(self) -> float:
        """Seconds of a plain step."""
        return max(1e-9, _quartile(self.plain))

    def draft(self, rows: int) -> float:
        """Seconds of one draft of each row by the layers, verified, over those of a plain step."""
        return (_quartile(self.drafts) + rows * self.token) / self.step

    @property
    def token(self) -> float:
        """Seconds of a further token that is verified."""
        ordered, left = sorted(self.tokens), sum(weight for _, weight in self.tokens) / 4
        for seconds, weight in ordered:
            left -= weight
            if left <= 0:
                return seconds
        return 0.0  # nothing is known

    def share(self, rows: int) -> float:
        """Seconds of a further token that is verified, as a share of those of a plain step's token."""
        return self.token * rows / self.step


class DraftLength:
    """Chooses γ for a number of rows. Up to four, each number has its costs; above, those that share a power of two.

    Args:
        layers: Whether there are layers that draft.
    """

    def __init__(self, *, layers: bool = True) -> None:
        self._layers = layers
        self._costs: dict[int, _Costs] = {}
        self._acceptance = Acceptance(*PRIOR, JUDGED)
        self._yield = Acceptance(16.0, 16.0, JUDGED)  # tokens of rounds: fewer than expected, where rows end within

    @property
    def acceptance(self) -> float:
        """Of each draft of the layers behind accepted ones."""
        return self._acceptance.rate

    def choose(self, rows: int) -> Plan:
        """Drafts of the next step; without any it is a plain one."""
        costs = self._at(rows)
        if len(costs.plain) < NEEDED or costs.rounds >= costs.plain_interval:
            return Plan()
        count = costs.best
        if self._layers and (len(costs.drafts) < TRIALS or costs.steps >= costs.interval):
            count = max(1, FIRST // rows)
        if costs.rest > 0:
            costs.rest -= 1
            return Plan(count)
        measuring = Plan(count, MEASURED, total=max(MEASURED, math.ceil(rows / 4)))
        if not costs.tokens:
            return measuring
        least = WORTH * costs.share(rows) * costs.gain  # a further draft must yield more than the others do
        if least < 1:
            return Plan(count, MOST_DRAFTS, least)
        self._rest(costs)
        return measuring  # what a token has cost may have been another load's

    def looked(self, rows: int, seconds: float, drafts: int, accepted: int) -> None:
        """Record the seconds of a step's lookup; `accepted` counts its drafts that saved a plain step."""
        costs = self._at(rows)
        costs.looked += 1
        costs.made += 1 + accepted / rows
        costs.spent += 1 + (seconds + drafts * costs.token) / costs.step
        if costs.looked >= LOOKED:
            costs.gain = max(1.0, costs.made / costs.spent)
            if costs.made < (1 - LOSS) * costs.spent:
                self._rest(costs)
            else:
                costs.looked_interval = PROBE
            costs.looked, costs.made, costs.spent = 0, 0.0, 0.0

    def stepped(self, rows: int, seconds: float) -> None:
        """A plain step has taken so long."""
        costs = self._at(rows)
        costs.plain.append(seconds)
        if costs.rounds and len(costs.plain) >= NEEDED:
            costs.best = self._best(rows, costs)
            costs.plain_interval = min(PROBE, 2 * costs.plain_interval)
        costs.rounds, costs.steps = 0, costs.steps + 1

    def drafted(self, done: Round) -> None:
        """A round is done."""
        costs, further = self._at(done.rows), done.drafted + done.looked_up
        weight = min(further, FIRST)  # a long round beside other work must not outweigh the others
        costs.tokens.append((max(0.0, done.verify_seconds - costs.step) / further, weight))
        costs.rounds += 1
        if not done.steps:
            return
        costs.drafts.append(done.draft_seconds / done.steps)
        self._acceptance.add(done.accepted, done.judged)
        expected = done.drafting * expected_tokens(done.drafted // done.drafting, self._acceptance.rate)
        self._yield.add(done.tokens, round(expected))
        if costs.steps >= costs.interval:
            costs.interval *= LAYERS_RARER
        costs.steps = 0
        costs.best = self._best(done.rows, costs)
        if costs.best > 0:
            costs.interval = SOON
        elif len(costs.drafts) >= TRIALS:
            count = max(1, FIRST // done.rows)
            loss = 1 + count * costs.draft(done.rows) - expected_tokens(count, self._acceptance.rate)
            costs.interval = min(RAREST, max(costs.interval, math.ceil(loss / TRIAL_LOSS)))

    def _best(self, rows: int, costs: _Costs) -> int:
        """The number of drafts that promises most; 0 unless it promises enough."""
        if not costs.drafts:
            return 0
        draft, acceptance = costs.draft(rows), self._acceptance.rate
        rates = [expected_tokens(count, acceptance) / (1 + count * draft) for count in range(MOST_DRAFTS + 1)]
        best = rates.index(max(rates))
        return best if rates[best] * min(1.0, self._yield.rate) > GAIN else 0

    @staticmethod
    def _rest(costs: _Costs) -> None:
        costs.rest, costs.looked_interval = costs.looked_interval, min(RAREST, RARER * costs.looked_interval)
        while len(costs.tokens) > 1:  # behind the rest it is measured again
            costs.tokens.popleft()

    def _at(self, rows: int) -> _Costs:
        return self._costs.setdefault(rows if rows <= 4 else 4 * rows.bit_length(), _Costs())


def expected_tokens(count: int, acceptance: float) -> float:
    """Tokens of a round of `count` drafts, on average; acceptance: of each behind accepted ones."""
    return sum(acceptance**number for number in range(count + 1))


def _quartile(seconds: Collection[float]) -> float:
    """The lower one: what disturbs a step makes it slower."""
    return sorted(seconds)[(len(seconds) - 1) // 4]
