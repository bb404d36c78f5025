"""A row in flight (a request that is being answered), and functions that update rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.engine.constraints.constraint import AllowedTokens
from actors.engine.sampling.state import NO_TOKEN, Drawn, RowSampling
from actors.engine.types import NOT_NUMBERS, Completion, FinishReason, Request, TokenLogprob


@dataclass
class Row:
    """A request in flight, and its tokens and log-probabilities so far."""

    request: Request
    ticket: int  # number by which the engine's caller identifies the row
    limit: int  # maximum number of new tokens
    sampling: RowSampling
    stop_ids: frozenset[int]  # tokens that end the row
    progress: AllowedTokens | None = None  # state of the answer format (constraint) after the tokens so far
    position: int = -1  # index t of the generated token that is the next decode step's input; -1: no token yet
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # sum of the tokens' log-probabilities in nats
    choice_logprob: float = 0.0  # the same sum, but of log-probabilities among the allowed tokens
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None  # why the row has ended; None while it runs
    slot: int = -1  # index of the row's cache slot
    has_no_token: bool = False  # whether the row ended because the next token's logits were not numbers

    def completion(self, cumulative_logprob: bool) -> Completion:
        """Return the answer of a row that has ended."""
        assert self.finish is not None
        label = None if self.progress is None else self.progress.label
        return Completion(
            tuple(self.tokens),
            self.finish,
            self.logprob if cumulative_logprob else None,
            tuple(self.logprobs) if self.request.sampling.logprobs is not None else None,
            label,
            None if label is None else math.exp(self.choice_logprob),
            self._error(),
        )

    def _error(self) -> str | None:
        """Return why an ended row has no answer, or why the answer does not complete its format; else None."""
        if self.has_no_token:
            return NOT_NUMBERS
        progress, constraint = self.progress, self.request.constraint
        if progress is None or constraint is None or self.finish == FinishReason.STOP:
            return None
        if progress.error is not None:
            return f"{constraint.name}: {progress.error}"
        if progress.is_complete():
            return None
        is_full = self.limit < self.request.sampling.max_new_tokens  # the context, not the setting, was the limit
        remedy = "the context is full: shorten the prompt" if is_full else "raise max_new_tokens"
        return f"{constraint.name}: the answer was cut off after {len(self.tokens)} tokens: {remedy}"

    def advance(self) -> FinishReason | None:
        """Update the row's state for the newest token. Return why this token ends the row; None: the row continues."""
        request, token, count = self.request, self.tokens[-1], len(self.tokens)
        if self.progress is not None:
            return self._advance_constraint(self.progress)
        if count >= request.sampling.min_new_tokens:
            self.sampling.barred = ()
            if token in self.stop_ids:
                return FinishReason.STOP
            if request.ending is not None and request.ending.ended(self.tokens):
                return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.limit else None

    def _advance_constraint(self, progress: AllowedTokens) -> FinishReason | None:
        """Do the work of `advance` for a row with a constraint, which only the constraint or the limit ends."""
        if progress.advance(self.tokens[-1]):
            finish = FinishReason.STOP
        elif progress.error is not None:
            finish = FinishReason.ERROR
        elif len(self.tokens) >= self.limit:
            finish = FinishReason.LENGTH
        else:
            return None
        self.sampling.allowed = None
        return finish


def begin_row(request: Request, ticket: int, *, context_length: int, vocab_size: int, stop_ids: frozenset[int]) -> Row:
    """Build the row for a request.

    Args:
        vocab_size: Number of logits. Penalties ignore prompt tokens with ids >= vocab_size, which have no logit.
        stop_ids: The model's end tokens.
    """
    have_logits = (token for token in request.prompt_ids if token < vocab_size)  # read only with a repetition penalty
    sampling = RowSampling.begin(request.sampling, request.key, have_logits)
    ends = request.sampling.all_stop_ids(stop_ids)
    limit = request.new_tokens_limit(context_length)
    row = Row(request, ticket, limit, sampling, ends)
    if request.constraint is not None:
        row.progress = sampling.allowed = request.constraint.begin()
    elif request.sampling.min_new_tokens > 0:
        sampling.barred = [token for token in ends if token < vocab_size]
    return row


def record(rows: Sequence[Row], sampled: Drawn) -> None:
    """Append each row's sampled token to the row. Set `finish` if the token ends the row."""
    for index, row in enumerate(rows):
        row.position += 1
        if row.finish is not None:  # the row has ended, but has not been removed yet
            continue
        token, sampling = sampled.tokens[index], row.sampling
        if token == NO_TOKEN:
            row.finish, row.has_no_token, sampling.allowed = FinishReason.ERROR, True, None
            continue
        row.tokens.append(token)
        sampling.add(token)
        row.logprob += sampled.logprobs[index]
        if index in sampled.top:
            row.logprobs.append(sampled.top[index])
        if sampling.allowed is not None and sampling.allowed.scored:
            row.choice_logprob += sampled.choice_logprobs[index]
        row.finish = row.advance()
