"""State from which a row's next token is sampled, and the result of sampling a batch of rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.constraints.constraint import AllowedTokens, words_of
from actors.engine.types import SamplingParams, TokenLogprob

_PACKED = struct.Struct("<qqqddd")  # SamplingParameters of cpu/sampling.h


class TokenCounts:
    """Tokens to which penalties apply, and how often each occurs in the answer.

    Attributes:
        tokens: int64, in the order of their first occurrence.
        times: float32, occurrences in the answer: 0 for a token that is only in the prompt.
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
    """The state of a row that, with its logits, determines its next token."""

    params: SamplingParams  # sampling parameters
    key: int  # key of the row's random numbers
    drawn: int = 0  # number of tokens sampled so far
    # how often each token has occurred so far; counted only if a penalty applies
    counts: TokenCounts = field(default_factory=lambda: TokenCounts(()))
    allowed: AllowedTokens | None = None  # tokens that may come next; None: all. Sampling only reads it
    barred: Collection[int] = ()  # tokens that must not be sampled
    penalized: bool = field(init=False)  # whether a penalty applies to earlier tokens
    packed: bytes = field(init=False, repr=False)  # params and key, for the CPU's kernel

    def __post_init__(self) -> None:
        params = self.params
        self.penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        likeliest = -1 if params.logprobs is None else params.logprobs
        self.packed = _PACKED.pack(self.key, params.top_k, likeliest, params.temperature, params.top_p, params.min_p)

    @classmethod
    def begin(cls, params: SamplingParams, key: int, prompt_ids: Sequence[int]) -> RowSampling:
        """Return the state before the first token."""
        counted = prompt_ids if params.repetition_penalty != 1 else ()
        return cls(params, key, counts=TokenCounts(counted))

    def add(self, token: int) -> None:
        """Record a sampled token."""
        self.drawn += 1
        if self.penalized:
            self.counts.add(token)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the argmax of the unchanged logits, and `logprobs` is not set."""
        params = self.params
        if params.temperature != 0 or params.logprobs is not None or self.allowed is not None or self.barred:
            return False
        return not (self.penalized and self.counts.tokens)

    @property
    def needs_mask(self) -> bool:
        """Whether tokens that are not allowed must be excluded, even if the likeliest token is allowed."""
        return self.allowed is not None and (self.params.temperature > 0 or self.allowed.scored)

    @property
    def narrowed(self) -> bool:
        """Whether top-k, top-p or min-p excludes tokens."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def allowed_bits(rows: Sequence[RowSampling], vocabulary: int) -> NDArray[np.int32]:
    """Return the masks [rows, words_of(V)] of the rows' `allowed` tokens, see `constraint.Bits`."""
    bits = np.zeros((len(rows), words_of(vocabulary)), dtype=np.int32)
    for place, row in enumerate(rows):
        assert row.allowed is not None
        row.allowed.write(bits[place])
    return bits


def changed_logits(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return how penalties and barred tokens change logits [B, V], as in transformers and OpenAI's interface.

    The result holds the row, the token and the new logit (float32) of each change, in the order of rows. It is None if
    nothing changes. A barred token is changed once, to -inf.
    """
    counts = [len(row.counts.tokens) if row.penalized else 0 for row in rows]
    barred = [len(row.barred) for row in rows]
    if not any(counts) and not any(barred):
        return None
    tokens = torch.from_numpy(_joined([row.counts.tokens if row.penalized else b"" for row in rows], np.int64))
    times = torch.from_numpy(_joined([row.counts.times if row.penalized else b"" for row in rows], np.float32))
    index = torch.from_numpy(np.repeat(np.arange(len(rows)), counts))
    values = torch.tensor(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (row.params for row in rows)]
    )[index]
    if logits.device.type != "cpu":
        tokens, times, index, values = (part.to(logits.device) for part in (tokens, times, index, values))
    old = logits[index, tokens].float()
    new = torch.where(old < 0, old * values[:, 0], old / values[:, 0])
    new = new - values[:, 1] * (times > 0) - values[:, 2] * times
    if not any(barred):
        return index, tokens, new
    pairs = [(number, token) for number, row in enumerate(rows) for token in row.barred]
    rows_barred, tokens_barred = torch.tensor(pairs, device=logits.device).T
    vocabulary = logits.shape[1]
    is_barred = torch.isin(index * vocabulary + tokens, rows_barred * vocabulary + tokens_barred)
    index, tokens, new = index[~is_barred], tokens[~is_barred], new[~is_barred]
    index, tokens = torch.cat((index, rows_barred)), torch.cat((tokens, tokens_barred))
    new = torch.cat((new, new.new_full((len(pairs),), -torch.inf)))
    order = index.argsort(stable=True)
    return index[order], tokens[order], new[order]


def _joined(parts: Sequence[object], dtype: type[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Concatenate buffers into a new array of `dtype`."""
    return np.frombuffer(bytearray().join(parts), dtype=dtype)  # type: ignore[arg-type]


NO_TOKEN = -1  # in place of a token if a row's logits are not numbers; sampling.h and screen.h use the same value


@dataclass(frozen=True)
class Drawn:
    """The tokens sampled for a batch of rows."""

    tokens: list[int]  # one token id per row, or `NO_TOKEN`
    # the tokens' log-probabilities under the model's own distribution, nats; NaN if they were not computed
    logprobs: list[float]
    # the tokens' log-probabilities under the distribution restricted to the allowed tokens, nats; NaN for rows without
    # a constraint, or whose constraint is not `scored`
    choice_logprobs: list[float]
    top: dict[int, TokenLogprob]  # row -> its token and likeliest tokens, if `logprobs` is set
