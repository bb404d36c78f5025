"""A row in flight, and the functions over rows that both engines use."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from actors.engine.label_trie import Node
from actors.engine.sampling import RowSampling, sample
from actors.engine.schedule import Schedule
from actors.engine.types import Completion, FinishReason, Request, TokenLogprob


@dataclass
class Row:
    """A request and what has been generated for it.

    Args:
        ticket: Number by which the engine names the row to its caller.
        limit: Most new tokens.
        stop_ids: Tokens that end the row.
        node: Node of the trie that the tokens have reached, for a row with choices.
        position: t of the token that the next step takes as input, -1 before the first token.
        finish: Why the row has ended; None while it runs.
    """

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

    def advance(self) -> FinishReason | None:
        """Account for the last token; returns why it ends the row, or None. A row with choices follows its trie."""
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


def begin_row(request: Request, ticket: int, *, context_length: int, vocab_size: int, stop_ids: frozenset[int]) -> Row:
    """A row before its first token. stop_ids: those of the model."""
    sampling = RowSampling.begin(request.sampling, request.key, request.prompt_ids)
    ends = request.sampling.all_stop_ids(stop_ids)
    row = Row(request, ticket, request.new_tokens_limit(context_length), sampling, ends)
    if request.choices is not None:
        row.node = request.choices.root
        sampling.allowed = request.choices.allowed(row.node)
    elif request.sampling.min_new_tokens > 0:
        sampling.barred = [token for token in ends if token < vocab_size]
    return row


def sample_rows(rows: Sequence[Row], logits: Tensor, *, logprobs: bool) -> None:
    """Sample the next token of each row from logits [B, V] and record it. logprobs: whether to sum their own."""
    sampled = sample(logits, [row.sampling for row in rows], logprobs=logprobs)
    for index, row in enumerate(rows):
        row.position += 1
        if row.finish is not None:  # ended, and not yet retired
            continue
        row.tokens.append(sampled.tokens[index])
        row.sampling.add(sampled.tokens[index])
        row.logprob += sampled.logprobs[index]
        if index in sampled.top:
            row.logprobs.append(sampled.top[index])
        if row.node is not None:
            row.choice_logprob += sampled.choice_logprobs[index]
        row.finish = row.advance()


def input_depths(rows: Sequence[Row], schedule: Schedule) -> list[int]:
    """Depth of each row's next input; rows lie oldest first, so it never falls along them."""
    depths = [schedule.depth(row.position) for row in rows]
    assert depths == sorted(depths), "rows must lie oldest first"
    return depths


def rows_per_layer(depths: Sequence[int], schedule: Schedule) -> list[int]:
    """How many of the youngest rows each layer runs for, from the depths of `input_depths`."""
    return [len(depths) - bisect_right(depths, rank) for rank in schedule.ranks]


def distinct_prompts(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different prompts of requests, and the number of each request's prompt among them."""
    numbers: dict[tuple[int, ...], int] = {}
    sources = [numbers.setdefault(tuple(request.prompt_ids), len(numbers)) for request in requests]
    return list(numbers), sources
