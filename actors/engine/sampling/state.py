"""State from which a row's next token is sampled, and the result of sampling a batch of rows. Plain values."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.engine.constraints.constraint import AllowedTokens, words_of
from actors.engine.cpu.sampling import packed
from actors.engine.types import SamplingParams, TokenLogprob


class TokenCounts:
    """Tokens to which penalties apply, and how often each occurs in the answer.

    Attributes:
        tokens: int64, in the order of their first occurrence.
        times: float32, 0 for a token of the prompt alone.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = dict.fromkeys(prompt_ids)
        self.tokens, self.times = array("q", distinct), array("f", bytes(4 * len(distinct)))
        self._places = {token: place for place, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        """Count a token of the answer."""
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.times.append(0.0)
        self.times[place] += 1


@dataclass
class RowSampling:
    """State from which the next token of a row is sampled, with its logits.

    Args:
        params: Sampling parameters.
        key: Key of the row's random numbers.
        drawn: Number of tokens so far.
        counts: Of the tokens so far; kept only for penalties.
        allowed: The only possible tokens; None for all. Not changed by sampling.
        barred: Tokens that are not possible.

    Attributes:
        penalized: Whether a penalty applies to earlier tokens.
        packed: params and key, for the CPU's kernel.
    """

    params: SamplingParams
    key: int
    drawn: int = 0
    counts: TokenCounts = field(default_factory=lambda: TokenCounts(()))
    allowed: AllowedTokens | None = None
    barred: Collection[int] = ()
    penalized: bool = field(init=False)
    packed: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        params = self.params
        self.penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self.packed = packed(params, self.key)

    @classmethod
    def begin(cls, params: SamplingParams, key: int, prompt_ids: Sequence[int]) -> RowSampling:
        """The state before the first token."""
        counted = prompt_ids if params.repetition_penalty != 1 else ()
        return cls(params, key, counts=TokenCounts(counted))

    def add(self, token: int) -> None:
        """Record a sampled token."""
        self.drawn += 1
        if self.penalized:
            self.counts.add(token)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the unchanged logits, without log-probabilities of others."""
        params = self.params
        if params.temperature != 0 or params.logprobs is not None or self.allowed is not None or self.barred:
            return False
        return not (self.penalized and self.counts.tokens)

    @property
    def needs_mask(self) -> bool:
        """Whether tokens that are not allowed must be excluded, even if the likeliest one is allowed."""
        return self.allowed is not None and (self.params.temperature > 0 or self.allowed.scored)

    @property
    def narrowed(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def allowed_bits(rows: Sequence[RowSampling], vocabulary: int) -> NDArray[np.int32]:
    """Masks [rows, words_of(V)] of rows that have allowed tokens, see `constraint.Bits`."""
    bits = np.zeros((len(rows), words_of(vocabulary)), dtype=np.int32)
    for place, row in enumerate(rows):
        assert row.allowed is not None
        row.allowed.write(bits[place])
    return bits


NO_TOKEN = -1  # of a row whose logits are not numbers; the value in sampling.h and screen.h


@dataclass(frozen=True)
class Drawn:
    """Sampled tokens of rows.

    Args:
        tokens: One id a row, or `NO_TOKEN`.
        logprobs: Their log-probabilities under the model's own distribution, nats; NaN if they were not computed.
        choice_logprobs: The same under the distribution restricted to the allowed tokens; NaN for rows without them,
            or that do not want it.
        top: Row -> its likeliest tokens, for rows with `logprobs`.
    """

    tokens: list[int]
    logprobs: list[float]
    choice_logprobs: list[float]
    top: dict[int, TokenLogprob]
