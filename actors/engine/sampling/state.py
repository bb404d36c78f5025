"""The state of a row that sampling reads, and the result of sampling a batch of rows."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.constraints.constraint import AllowedTokens, words_of
from actors.engine.types import SamplingParams, TokenLogprob

_PACKED = struct.Struct("<qqqddd")  # memory layout of `SamplingParameters` in cpu/sampling.h


class TokenCounts:
    """Tokens to which penalties apply, and how often each token occurs in the answer.

    Attributes:
        tokens: the tokens in order of first occurrence, int64.
        times: for each token, number of occurrences in the answer, float32; 0 if it occurs only in the prompt.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        distinct = dict.fromkeys(prompt_ids)
        self.tokens, self.times = array("q", distinct), array("f", bytes(4 * len(distinct)))
        self._places = {token: place for place, token in enumerate(distinct)}

    def add(self, token: int) -> None:
        """Count one more occurrence of `token` in the answer."""
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.times.append(0.0)
        self.times[place] += 1


@dataclass
class RowSampling:
    """The state of a row. Together with the logits, it determines the row's next token."""

    params: SamplingParams
    key: int  # key of the row's random numbers
    drawn: int = 0  # number of tokens sampled so far
    # how often each token has occurred so far; counted only if a penalty is set
    counts: TokenCounts = field(default_factory=lambda: TokenCounts(()))
    allowed: AllowedTokens | None = None  # which tokens may come next (sampling only reads it); None: all tokens
    barred: Collection[int] = ()  # tokens that must not be sampled
    penalized: bool = field(init=False)  # whether a penalty is set
    packed: bytes = field(init=False, repr=False)  # `params` and `key` in the layout of the CPU kernel

    def __post_init__(self) -> None:
        params = self.params
        self.penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        likeliest = -1 if params.logprobs is None else params.logprobs
        self.packed = _PACKED.pack(self.key, params.top_k, likeliest, params.temperature, params.top_p, params.min_p)

    @classmethod
    def begin(cls, params: SamplingParams, key: int, prompt_ids: Iterable[int]) -> RowSampling:
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
        """Whether the next token is the argmax of the model's logits, and no log-probabilities are asked for."""
        params = self.params
        if params.temperature != 0 or params.logprobs is not None or self.allowed is not None or self.barred:
            return False
        return not (self.penalized and self.counts.tokens)

    @property
    def needs_mask(self) -> bool:
        """Whether sampling needs a mask of the allowed tokens even if the likeliest token is allowed."""
        return self.allowed is not None and (self.params.temperature > 0 or self.allowed.scored)

    @property
    def narrowed(self) -> bool:
        """Whether top-k, top-p or min-p is set."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


def allowed_bits(rows: Sequence[RowSampling], vocabulary: int) -> NDArray[np.int32]:
    """Return bit masks [rows, words_of(V)] of the tokens that each row allows; layout: see `constraint.Bits`."""
    bits = np.zeros((len(rows), words_of(vocabulary)), dtype=np.int32)
    for place, row in enumerate(rows):
        assert row.allowed is not None
        row.allowed.write(bits[place])
    return bits


def changed_logits(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return how penalties and barred tokens change logits [B, V]. The rules are those of transformers and OpenAI.

    The result has three tensors: row index, token and new logit (float32) of each change, in order of rows. It is None
    if nothing changes. A barred token has one change, to -inf.
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


NO_TOKEN = -1  # replaces the token id if a row's logits are not numbers; sampling.h and screen.h use the same value


@dataclass(frozen=True)
class Drawn:
    """The tokens sampled for a batch of rows."""

    tokens: list[int]  # one token id per row, or `NO_TOKEN`
    # log-probability of each sampled token in nats, over the whole vocabulary, before penalties and temperature; NaN:
    # not computed
    logprobs: list[float]
    # log-probability of each token among the allowed tokens, in nats; valid only for rows with a `scored` constraint
    choice_logprobs: list[float]
    top: dict[int, TokenLogprob]  # row index -> the row's token and likeliest tokens, for rows that set `logprobs`
