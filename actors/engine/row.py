"""A row in flight: what it has drawn so far, and what ends it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from actors.engine.choices import Node
from actors.engine.sampling import RowSampling
from actors.engine.types import Completion, FinishReason, Request, TokenLogprob


@dataclass
class Row:
    """limit: most new tokens. stop_ids: tokens that end it. position: t of the token that the next
    step takes as input. node: how far a row that is bound to choices has come."""

    request: Request
    ticket: int
    limit: int
    sampling: RowSampling
    stop_ids: frozenset[int]
    node: Node | None = None
    position: int = -1
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    choice_logprob: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    choice: int | None = None
    finish: FinishReason | None = None

    def completion(self, cumulative_logprob: bool) -> Completion:
        """The answer of a row that has ended."""
        assert self.finish is not None
        return Completion(
            tuple(self.tokens),
            self.finish,
            self.logprob if cumulative_logprob else None,
            tuple(self.logprobs) if self.request.sampling.logprobs is not None else None,
            self.choice,
            None if self.choice is None else math.exp(self.choice_logprob),
        )

    def reason_to_end(self) -> FinishReason | None:
        """Why the last token ends the row, None if it does not; moves a row that is bound to choices on."""
        request, token, count = self.request, self.tokens[-1], len(self.tokens)
        if self.node is not None:
            assert request.choices is not None
            self.node, self.choice = request.choices.follow(self.node, token)
            if self.choice is not None:
                self.sampling.allowed = None
                return FinishReason.STOP
            self.sampling.allowed = request.choices.allowed(self.node)
            return None
        if count >= request.sampling.min_new_tokens:
            self.sampling.barred = ()
            if token in self.stop_ids:
                return FinishReason.STOP
            if request.ending is not None and request.ending.ended(self.tokens):
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.limit else None
