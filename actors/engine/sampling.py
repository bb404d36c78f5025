"""Logits -> tokens: each row with parameters, history and random numbers of its own.

A row's random number for a position is a hash of its key and that position and of nothing else, so batch
composition, retries and resumed jobs draw the same. Order of the steps, as in transformers: penalties, tokens
that may not come, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from actors.engine.types import SamplingParams, TokenLogprob
from actors.engine.working_memory import DRAWN_NUMBERS

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """keys, positions [B] int64 -> uniform float64 [B] in [0, 1): SplitMix64 (Steele et al., 2014)."""
    bits = keys + (positions + 1) * _GOLDEN
    bits = (bits ^ _shift(bits, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ _shift(bits, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53


def _shift(bits: Tensor, places: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


@dataclass
class RowSampling:
    """What the next token of one row hangs on, beside its logits.

    key: of its random numbers. drawn: tokens so far. counts: token -> times it came in the answer, 0 for a
    token of the prompt alone; kept only where a penalty asks for it. allowed: the only tokens that may come,
    None: all. barred: tokens that may not.
    """

    params: SamplingParams
    key: int
    drawn: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    allowed: Collection[int] | None = None
    barred: Collection[int] = ()

    @classmethod
    def begin(cls, params: SamplingParams, key: int, prompt_ids: Sequence[int]) -> RowSampling:
        """The state before the first token."""
        seen = prompt_ids if params.repetition_penalty != 1 else ()
        return cls(params, key, counts=dict.fromkeys(seen, 0))

    def add(self, token: int) -> None:
        """A token was drawn."""
        self.drawn += 1
        if self.penalized:
            self.counts[token] = self.counts.get(token, 0) + 1

    @property
    def penalized(self) -> bool:
        """Whether tokens that came before are treated otherwise than new ones."""
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @property
    def likeliest_alone(self) -> bool:
        """Whether the next token is the likeliest one, and that is all there is to know of it."""
        bound = self.allowed is not None or self.barred or (self.penalized and self.counts)
        return self.params.temperature == 0 and self.params.logprobs is None and not bound

    @property
    def narrowed(self) -> bool:
        """Whether only the likelier tokens can be drawn."""
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


@dataclass(frozen=True)
class Drawn:
    """tokens: ids, one a row. logprobs: of these under the model's own distribution, nats; NaN if nobody asked.
    choice_logprobs: under the same, narrowed to the allowed tokens. top: of the rows that ask for it."""

    tokens: list[int]
    logprobs: list[float]
    choice_logprobs: list[float]
    top: dict[int, TokenLogprob]


def sample(logits: Tensor, rows: Sequence[RowSampling], *, logprobs: bool = True) -> Drawn:
    """Draw the next token of each row from logits [B, V]. The rows' states are read, not changed.

    logprobs: whether the drawn tokens' own are wanted. They take a pass over the vocabulary with an exponential for
    each number, longer than all else together for a greedy row.
    """
    if not logprobs and all(row.likeliest_alone for row in rows):
        untold = [math.nan] * len(rows)
        return Drawn(_likeliest(logits).tolist(), untold, untold, {})
    at_once = max(1, DRAWN_NUMBERS // logits.shape[1])
    parts = [
        _sample(logits[first : first + at_once], rows[first : first + at_once], logprobs)
        for first in range(0, len(rows), at_once)
    ]
    if len(parts) == 1:
        return parts[0]
    return Drawn(
        [token for part in parts for token in part.tokens],
        [one for part in parts for one in part.logprobs],
        [one for part in parts for one in part.choice_logprobs],
        {number * at_once + row: told for number, part in enumerate(parts) for row, told in part.top.items()},
    )


def _sample(logits: Tensor, rows: Sequence[RowSampling], logprobs: bool) -> Drawn:
    """Of so many rows that memory has room for all that is computed of their logits."""
    logits = logits.float()
    if logprobs or any(row.allowed is not None or row.params.logprobs is not None for row in rows):
        normalizer = logits.logsumexp(dim=-1)
    else:
        normalizer = torch.full_like(logits[:, 0], torch.nan)
    adjusted, choice_normalizer = _adjust(logits, normalizer, rows)
    tokens = _likeliest(adjusted)
    drawn = [row for row, one in enumerate(rows) if one.params.temperature > 0]
    # per row, not per batch: the way a row is drawn must not hang on its neighbours
    for narrowed in (False, True):
        chosen = [row for row in drawn if rows[row].narrowed == narrowed]
        if chosen:
            index = torch.tensor(chosen, device=logits.device)
            tokens[index] = _draw(adjusted[index], [rows[row] for row in chosen], narrowed)
    for row, one in enumerate(rows):
        if one.allowed is not None and int(tokens[row]) not in one.allowed:
            tokens[row] = min(one.allowed)  # logits that are no numbers: whatever comes must still be allowed
    picked = logits.gather(1, tokens[:, None])[:, 0]
    return Drawn(
        tokens.tolist(),
        (picked - normalizer).tolist(),
        (picked - choice_normalizer).tolist(),
        _top(logits, normalizer, tokens, rows),
    )


def _likeliest(logits: Tensor) -> Tensor:
    """argmax over [B, V]: [B], the first of equals. On a CPU numpy's, which takes a tenth of torch's time."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    if logits.dtype != torch.bfloat16:
        return torch.from_numpy(logits.float().numpy().argmax(axis=-1))
    bits = logits.view(
        torch.int16
    )  # which order positive numbers as they are, above all negative ones (and above a NaN with a sign)
    found = torch.from_numpy(bits.numpy().argmax(axis=-1))
    for row in (bits.gather(1, found[:, None])[:, 0] <= 0).nonzero()[:, 0].tolist():
        found[row] = int(logits[row].float().numpy().argmax())
    return found


def _draw(logits: Tensor, rows: Sequence[RowSampling], narrowed: bool) -> Tensor:
    """Tokens [N] at each row's own random number; logits [N, V]."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=dtype)

    params = [row.params for row in rows]
    scaled = logits / column([one.temperature for one in params], torch.float32)[:, None]
    if narrowed:
        probabilities = narrow(
            scaled,
            column([one.top_k for one in params], torch.int64),
            column([one.top_p for one in params], torch.float64),
            column([one.min_p for one in params], torch.float64),
        )
    else:
        probabilities = scaled.double().softmax(dim=-1)
    keys, drawn = (column(values, torch.int64) for values in ([row.key for row in rows], [row.drawn for row in rows]))
    return draw(probabilities, keys, drawn)


def draw(probabilities: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Tokens [N] by inverse distribution function at each row's own random number. probabilities: [N, V], in the
    vocabulary's order: in their own, rounding would trade places of tokens. keys, positions [N]: see `uniforms`."""
    u = uniforms(keys, positions)
    cumulative = probabilities.cumsum(dim=-1)
    choice = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)
    last = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(choice, last)[:, 0]  # rounding must not reach past the last possible token


def narrow(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities [N, V], 0 outside top-k, then top-p, then min-p.

    scaled: logits over temperature [N, V]. top_k [N]: 0 is all; top_p, min_p: float64 [N].
    """
    ordered, vocabulary = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.double().masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = (before >= top_p[:, None]) | (probabilities < min_p[:, None] * probabilities[:, :1])
    return torch.zeros_like(probabilities).scatter(1, vocabulary, probabilities.masked_fill(outside & (rank > 0), 0.0))


def _adjust(logits: Tensor, normalizer: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Logits [B, V] after penalties and with -inf where a token may not come; and the normalizer [B] of the
    model's own distribution narrowed to each row's allowed tokens."""
    device = logits.device
    adjusted = logits
    penalized = [row for row, one in enumerate(rows) if one.penalized and one.counts]
    if penalized:
        adjusted = logits.clone()
        index = torch.tensor([row for row in penalized for _ in rows[row].counts], device=device)
        token = torch.tensor([token for row in penalized for token in rows[row].counts], device=device)
        times = torch.tensor([float(n) for row in penalized for n in rows[row].counts.values()], device=device)
        values = torch.tensor(
            [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (one.params for one in rows)],
            device=device,
        )[index]
        old = adjusted[index, token]
        new = torch.where(old < 0, old * values[:, 0], old / values[:, 0])
        adjusted[index, token] = new - values[:, 1] * (times > 0) - values[:, 2] * times
    barred = [(row, token) for row, one in enumerate(rows) for token in one.barred]
    if barred:
        adjusted = adjusted.clone() if adjusted is logits else adjusted
        adjusted[tuple(torch.tensor(barred, device=device).T)] = -torch.inf
    bound = [(row, token) for row, one in enumerate(rows) if one.allowed is not None for token in one.allowed]
    if not bound:
        return adjusted, normalizer
    index, token = torch.tensor(bound, device=device).T
    may = torch.ones_like(logits, dtype=torch.bool)
    may[index] = False
    may[index, token] = True
    return adjusted.masked_fill(~may, -torch.inf), logits.masked_fill(~may, -torch.inf).logsumexp(dim=-1)


def _top(logits: Tensor, normalizer: Tensor, tokens: Tensor, rows: Sequence[RowSampling]) -> dict[int, TokenLogprob]:
    """The drawn token and the likeliest ones, by the model's own distribution, of rows that ask for them."""
    asked = {row: one.params.logprobs for row, one in enumerate(rows) if one.params.logprobs is not None}
    if not asked:
        return {}
    found: dict[int, TokenLogprob] = {}
    for most in sorted(set(asked.values())):  # each by itself: ties must not fall as a neighbour's number has it
        chosen = [row for row, wanted in asked.items() if wanted == most]
        index = torch.tensor(chosen, device=logits.device)
        logprobs = logits[index] - normalizer[index, None]
        values, ids = logprobs.topk(min(most, logits.shape[1]), dim=-1)
        own = logprobs.gather(1, tokens[index, None])[:, 0].tolist()
        for place, row in enumerate(chosen):
            top = zip(ids[place].tolist(), values[place].tolist(), strict=True)
            found[row] = TokenLogprob(int(tokens[row]), own[place], tuple(top))
    return found
