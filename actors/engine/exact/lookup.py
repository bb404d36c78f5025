"""Prompt lookup: what once followed a row's last tokens, in prompt or answer, is a draft that no model computes.

Answers that extract, rewrite or repeat have long copies in them (Saxena 2023, "Prompt Lookup Decoding").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZES = (3, 2, 1)  # tokens that are looked for: the longest that is found counts
PRIOR = 4.0  # drafts of all rows that a row's own acceptance begins with
KEPT = 32.0  # drafts over which acceptance is taken, about


class Acceptance:
    """Share of the drafts that were accepted, of those behind accepted ones; older ones count less."""

    def __init__(self, accepted: float = 1.0, judged: float = 2.0, kept: float = KEPT) -> None:
        self.accepted, self.judged, self._kept = accepted, judged, kept

    @property
    def rate(self) -> float:
        """0 to 1."""
        return self.accepted / self.judged

    def add(self, accepted: int, judged: int) -> None:
        """Count further drafts: sums, not a mean of shares, in which a round of few drafts would count too much."""
        left = 1 - min(1.0, judged / self._kept)
        self.accepted, self.judged = left * self.accepted + accepted, left * self.judged + judged


@dataclass(frozen=True)
class Match:
    """Tokens that followed an earlier occurrence of a row's last `size` tokens."""

    size: int
    tokens: list[int]


class Lookup:
    """The n-grams of one row's prompt and answer, and how often what followed them came again.

    of_all: by size, the acceptance over all rows.
    """

    def __init__(self, prompt_ids: Sequence[int], of_all: dict[int, Acceptance]) -> None:
        self._tokens = list(prompt_ids)
        self._prompt = len(self._tokens)
        self._indexed = 0  # tokens of which all n-grams that end before them are in the index
        self._after: tuple[dict[object, int], ...] = tuple({} for _ in SIZES)  # n-gram -> where it last went on
        self._of_all = of_all
        self._own = {size: Acceptance(0.0, 0.0) for size in SIZES}

    def find(self, answer: Sequence[int], most: int) -> Match | None:
        """Up to `most` tokens that may follow the answer, which only grows from call to call."""
        tokens = self._tokens
        tokens += answer[len(tokens) - self._prompt :]
        for after, size in zip(self._after, SIZES, strict=True):
            for place in range(max(size, self._indexed), len(tokens)):
                after[tuple(tokens[place - size : place])] = place
        self._indexed = len(tokens)
        for after, size in zip(self._after, SIZES, strict=True):
            begin = after.get(tuple(tokens[-size:]))
            if begin is not None and len(tokens) >= size:
                found = tokens[begin : begin + most]
                while len(found) < most:  # the match overlaps the end: a repetition, which goes on
                    found.append(found[len(found) - (len(tokens) - begin)])
                return Match(size, found)
        return None

    def acceptance(self, match: Match) -> float:
        """Of each of its drafts behind accepted ones."""
        own, of_all = self._own[match.size], self._of_all[match.size]
        return (own.accepted + PRIOR * of_all.rate) / (own.judged + PRIOR)

    def judge(self, match: Match, accepted: int, judged: int) -> None:
        """So many of a match's first `judged` drafts were right, the others behind them not."""
        self._own[match.size].add(accepted, judged)
        self._of_all[match.size].add(accepted, judged)
