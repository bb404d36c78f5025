"""Inputs and outputs of `score`. Plain values; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.errors import UserError
from actors.engine.types import TokenLogprob


@dataclass(frozen=True)
class ScoreRequest:
    """A prompt and its continuations.

    Args:
        prompt_ids: Token ids, at least one. The tokens of a text by themselves have its first one as prompt, or the
            token that begins a sequence.
        continuations: Token ids of each, which may be none.
        top: Likeliest tokens that are returned with each token.
    """

    prompt_ids: Sequence[int]
    continuations: Sequence[Sequence[int]]
    top: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest continuation."""
        return max(map(len, self.continuations), default=0)

    def check(self, context_length: int, vocab_size: int) -> None:
        """Raise UserError if the prompt is empty, a token is unknown, or prompt and a continuation exceed the context.

        The last token of a continuation is never an input.
        """
        if not self.prompt_ids:
            raise UserError("empty prompt")
        for name, ids in (("prompt", self.prompt_ids), *(("continuation", ids) for ids in self.continuations)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                token = max(ids) if max(ids) >= vocab_size else min(ids)
                raise UserError(f"{name}: token {token} lies outside the model's vocabulary of {vocab_size}")
        if len(self.prompt_ids) + max(self.longest - 1, 0) > context_length:
            raise UserError(
                f"prompt of {len(self.prompt_ids)} tokens and continuation of {self.longest} exceed the context of "
                f"{context_length}"
            )


@dataclass(frozen=True)
class ContinuationScore:
    """Log-probabilities of one continuation.

    Args:
        tokens: Of each token, nats under the model's own distribution, with the likeliest ones if asked for.
        greedy: Of each token, whether it is the likeliest one.
    """

    tokens: tuple[TokenLogprob, ...]
    greedy: tuple[bool, ...]

    @property
    def cumulative(self) -> float:
        """Sum over the tokens, nats."""
        return math.fsum(token.logprob for token in self.tokens)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-probability of a token; None without tokens, inf beyond what a float holds."""
        if not self.tokens:
            return None
        try:
            return math.exp(-self.cumulative / len(self.tokens))
        except OverflowError:
            return math.inf

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have generated these tokens."""
        return all(self.greedy)


@dataclass(frozen=True)
class RequestScore:
    """Scores of a request's continuations, in their order; none if there is an error, which says why."""

    continuations: tuple[ContinuationScore, ...]
    error: str | None = None
