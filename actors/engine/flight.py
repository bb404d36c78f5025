"""Rows between an engine's `open` and `close`: which of those that wait are admitted when."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice

from actors.engine.call import Call
from actors.engine.protocol import Ended, EngineProtocol
from actors.engine.runs import Run
from actors.engine.shared_prefixes import Prompt

REFILL_SHARE = 8  # rows are admitted once this share of the slots is free: a pass of one row costs as much as of a few
PAGED_REFILL_SHARE = 16  # the same where rows grow: a GPU computes a small pass in little time


class Flight:
    """The rows between an engine's `open` and `close`: those that wait for admission, and tickets of the others."""

    def __init__(self, engine: EngineProtocol, capacity: int, shape: tuple[int, int]) -> None:
        self.engine, self.capacity, self.shape = engine, capacity, shape
        self.members: list[tuple[Call, Run]] = []
        self.waiting: deque[tuple[Call, int]] = deque()
        self.left = 0  # rows that have not ended
        self.joined = False  # whether another run's rows have been added
        self._tickets: dict[int, tuple[Call, int]] = {}  # of rows in flight
        self._reported: set[int] = set()
        self._share = PAGED_REFILL_SHARE if engine.grows else REFILL_SHARE
        self._step_first = False  # whether a step must come before the next admission

    @property
    def call(self) -> Call:
        """The one whose rows are admitted."""
        return self.members[-1][0]

    @property
    def apart(self) -> bool:
        """Whether no other run may join."""
        return self.members[-1][1].apart

    @property
    def has_free_slots(self) -> bool:
        """Whether enough slots for a pass are free."""
        return self.capacity - len(self.engine.rows) >= math.ceil(self.capacity / self._share)

    def add(self, call: Call, run: Run) -> None:
        """Let a run's rows wait for admission."""
        self.joined = bool(self.members)
        self.members = [(one, other) for one, other in self.members if one.left(other)] + [(call, run)]
        self.waiting.extend((call, row) for row in run.rows)
        self.left += len(run.rows)

    def rows_of(self, call: Call) -> list[int]:
        """Rows of a call that are in flight."""
        held = (self._tickets[row.ticket] for row in self.engine.rows)
        return [index for one, index in held if one is call]

    def tokens_of(self, call: Call) -> list[tuple[int, int]]:
        """Rows of a call that are in flight, and their tokens so far."""
        known = [(*self._tickets[ticket], len(tokens)) for ticket, tokens in self.engine.generated().items()]
        return [(index, count) for one, index, count in known if one is call]

    def shape_in_flight(self) -> tuple[int, int]:
        """Longest prompt and most new tokens of the rows in flight; (1, 1) without any."""
        held = [self._tickets[row.ticket] for row in self.engine.rows]
        longest = max((call.lengths[row] for call, row in held), default=1)
        return longest, max((call.limits[row] for call, row in held), default=1)

    def report(self) -> None:
        """Call `on_batch` with the rows in flight and those that may be admitted next."""
        if self.call.on_batch is None:
            return
        next_rows = (row for _, row in islice(self.waiting, self.capacity))
        self._reported = {*self.rows_of(self.call), *next_rows}
        self.call.on_batch(sorted(self._reported))

    def next_rows(self) -> list[tuple[Call, int]]:
        """The waiting rows that are admitted now: as many as there is space for, once they are worth a pass.

        Where rows grow, those that are in flight make a step in each pass or between two passes.
        """
        engine, busy = self.engine, bool(self.engine.rows)
        if busy and self._step_first:
            self._step_first = False
            return []
        first = list(islice(self.waiting, self.capacity - len(engine.rows)))
        if not first or (busy and not self.has_free_slots):
            return []
        estimate = engine.admission_estimate(
            [call.requests[row] for call, row in first], [call.prefixes[row] for call, row in first]
        )
        if not busy:
            return first[: max(1, estimate)]
        if estimate < min(len(first), math.ceil(len(engine.rows) / self._share)):
            return []
        if not engine.grows:
            return first[:estimate]
        (_, prefix), members = next(groupby(first[:estimate], self._alike))
        alike = list(members)
        return alike[: engine.first_pass([call.requests[row] for call, row in alike], prefix)]

    def _alike(self, row: tuple[Call, int]) -> tuple[int, Prompt]:
        """Equal for rows that one pass computes."""
        call, index = row
        return id(call), call.prefixes[index]

    def admit(self, rows: Sequence[tuple[Call, int]]) -> Ended:
        """Admit the first waiting rows; returns the rows that have ended with their first token."""
        engine = self.engine
        if self.call.on_batch is not None and not self._reported.issuperset(row for _, row in rows):
            self.report()
        busy = bool(engine.rows)
        for (_, prefix), members in groupby(rows, self._alike):
            alike = list(members)
            call, before = alike[0][0], replace(engine.stats)
            tickets = engine.admit([call.requests[row] for _, row in alike], prefix)
            call.passes = call.passes.plus(engine.stats.minus(before).of_prompts())
            for _ in alike:
                self.waiting.popleft()
            self._tickets.update(zip(tickets, alike, strict=True))
        self._step_first = busy and engine.grows and not engine.stepped
        return engine.retire()

    def settle(self, ended: Ended) -> None:
        """Keep the completions of rows that have ended; preempted rows return to the head of the queue."""
        self.waiting.extendleft(self._tickets[ticket] for ticket in self.engine.take_preempted())
        for ticket, completion in ended:
            call, row = self._tickets.pop(ticket)
            call.completions[row] = completion
        self.left -= len(ended)
