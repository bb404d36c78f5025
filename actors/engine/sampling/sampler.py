"""Samples tokens from logits. Each row has its own parameters, history and random numbers.

A row's random number at a position is a hash of the row's key and the position. So it does not depend on the batch, and
is the same after a retry or in a resumed job. Operations come in the same order as in transformers: penalties, barred
tokens, temperature, top-k, top-p, min-p. On a CPU, module `kernel` does the same in a fraction of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.engine.cpu import kernels
from actors.engine.sampling import kernel as kernel_sampling
from actors.engine.sampling.state import NO_TOKEN, Drawn, RowSampling, allowed_bits, changed_logits
from actors.engine.types import TokenLogprob

DRAWN_NUMBERS = 2**23  # maximum number of logits (rows * vocabulary) that torch samples from at once
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Hash keys and positions (int64 [B]) to float64 [B], uniform in [0, 1). Source: SplitMix64, Steele et al. 2014."""
    bits = keys + (positions + 1) * _GOLDEN
    bits = (bits ^ _shift(bits, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ _shift(bits, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 11).double() * 2.0**-53


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift int64 right by `count` bits, filling with zeros."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def sample(logits: Tensor, rows: Sequence[RowSampling], *, logprobs: bool = True) -> Drawn:
    """Sample the next token of each row from logits [B, V], without changing the rows' states. May change the logits.

    A row gets `NO_TOKEN` if one of its logits is NaN or +inf, or all are -inf. logprobs: whether to compute the tokens'
    log-probabilities. They need an exponential of each logit, which is most of the work for a greedy row.
    """
    if is_greedy(rows, logprobs=logprobs):
        return greedy(argmax(logits).tolist())
    for index, row in enumerate(rows):
        if row.allowed is not None and len(ends := list(row.allowed.ends)) > 1:  # the first stands for all of them
            together = logits[index, ends].float().logsumexp(dim=0).to(logits.dtype)
            logits[index, ends] = -torch.inf
            logits[index, ends[0]] = together
    if kernels.available(logits.dtype, logits.device) and logits.is_contiguous():
        return kernel_sampling.sample(logits, rows, logprobs=logprobs)
    return sample_by_torch(logits, rows, logprobs=logprobs)


def is_greedy(rows: Sequence[RowSampling], *, logprobs: bool) -> bool:
    """Return whether `rows` need only the argmax of their logits: no penalties and no log-probabilities."""
    return not logprobs and all(row.is_argmax for row in rows)


def greedy(tokens: list[int]) -> Drawn:
    """Return a sampling result with these tokens and no log-probabilities."""
    missing = [math.nan] * len(tokens)
    return Drawn(tokens, missing, missing, {})


def sample_by_torch(logits: Tensor, rows: Sequence[RowSampling], *, logprobs: bool = True) -> Drawn:
    """Sample with torch: the reference for the CPU kernel, used on GPUs and on machines without a compiler."""
    chunk = max(1, DRAWN_NUMBERS // logits.shape[1])
    parts = [
        _sample(logits[first : first + chunk], rows[first : first + chunk], logprobs)
        for first in range(0, len(rows), chunk)
    ]
    if len(parts) == 1:
        return parts[0]
    return Drawn(
        [token for part in parts for token in part.tokens],
        [logprob for part in parts for logprob in part.logprobs],
        [logprob for part in parts for logprob in part.choice_logprobs],
        {number * chunk + row: top for number, part in enumerate(parts) for row, top in part.top.items()},
    )


def _sample(logits: Tensor, rows: Sequence[RowSampling], logprobs: bool) -> Drawn:
    """Sample rows that are few enough for their temporary tensors to fit into memory."""
    logits = logits.float()
    finite = logits.amax(dim=-1).isfinite()  # for amax, NaN is greater than any number
    if not finite.all():
        logits = logits.masked_fill(~finite[:, None], 0)
    missing = torch.full_like(logits[:, 0], torch.nan)
    asked = logprobs or any(row.params.logprobs is not None for row in rows)
    normalizer = logits.logsumexp(dim=-1) if asked else missing
    adjusted = _adjust(logits, rows)
    tokens = argmax(adjusted).clamp(min=0)  # 0 if all logits are -inf
    members, excluded = _excluded(rows, tokens, logits)
    choice_normalizer = missing.clone()
    if members:
        at = torch.tensor(members, device=logits.device)
        possible = adjusted[at].masked_fill(excluded, -torch.inf)
        adjusted = adjusted.index_copy(0, at, possible)
        tokens[at] = argmax(possible).clamp(min=0)
        scored = [
            place for place, row in enumerate(members) if (allowed := rows[row].allowed) is not None and allowed.scored
        ]
        if scored:
            own = logits[at[scored]].masked_fill(excluded[scored], -torch.inf)
            choice_normalizer[at[scored]] = own.logsumexp(dim=-1)
    drawn = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    # rows with and without top-k, top-p or min-p are sampled separately, so that a row does not depend on other rows
    for narrowed in (False, True):
        alike = [index for index in drawn if rows[index].narrowed == narrowed]
        if alike:
            of_alike = torch.tensor(alike, device=logits.device)
            chosen = adjusted if len(alike) == len(rows) else adjusted[of_alike]
            tokens[of_alike] = _draw(chosen, [rows[index] for index in alike], narrowed)
    if members:  # if all allowed tokens have the logit -inf, take the first allowed token
        outside = excluded.gather(1, tokens[at, None])[:, 0]
        if outside.any():
            tokens[at] = torch.where(outside, excluded.int().argmin(dim=-1), tokens[at])
    picked = logits.gather(1, tokens[:, None])[:, 0]
    return Drawn(
        tokens.masked_fill(~finite, NO_TOKEN).tolist(),
        (picked - normalizer).tolist(),
        (picked - choice_normalizer).tolist(),
        _top(logits, normalizer, tokens, rows),
    )


def argmax(logits: Tensor) -> Tensor:
    """Return each row's likeliest token [B] (of equally likely ones, the first), or `NO_TOKEN`; see `sample`."""
    if logits.device.type == "cpu":  # numpy's argmax takes a tenth of the time of torch's
        values = logits.float().numpy()
        tokens = values.argmax(axis=-1)  # for argmax, NaN is greater than any number
        return torch.from_numpy(np.where(np.isfinite(values[np.arange(len(tokens)), tokens]), tokens, NO_TOKEN))
    most, tokens = logits.max(dim=-1)
    return tokens.masked_fill(~most.isfinite(), NO_TOKEN)


def _draw(logits: Tensor, rows: Sequence[RowSampling], narrowed: bool) -> Tensor:
    """Draw random tokens [N] from logits [N, V]. All `rows` have a temperature above 0. narrowed: see `RowSampling`."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=dtype)

    params = [row.params for row in rows]
    scaled = logits / column([param.temperature for param in params], torch.float32)[:, None]
    if narrowed:
        probabilities = narrow(
            scaled,
            column([param.top_k for param in params], torch.int64),
            column([param.top_p for param in params], torch.float64),
            column([param.min_p for param in params], torch.float64),
        )
    else:
        probabilities = scaled.double().softmax(dim=-1)
    keys, drawn = (column(values, torch.int64) for values in ([row.key for row in rows], [row.drawn for row in rows]))
    return draw(probabilities, uniforms(keys, drawn))


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Draw a token for each row: the first token at which the cumulated probability exceeds the row's random number.

    probabilities: [N, V] in the order of token ids. Do not sort them: sums in another order round differently, which
    can give another token. numbers: random numbers [N] from `uniforms`.
    """
    cumulative = probabilities.cumsum(dim=-1)
    choice = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
    last = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    return torch.minimum(choice, last)[:, 0]  # because of rounding, `choice` may lie after the last possible token


def narrow(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return probabilities [N, V] after top-k, then top-p, then min-p. Excluded tokens have probability 0.

    scaled: [N, V], logits divided by temperature. top_k: int64 [N]; 0 keeps all tokens. top_p, min_p: float64 [N].
    """
    ordered, vocabulary = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.double().masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    outside = (before >= top_p[:, None]) | (probabilities < min_p[:, None] * probabilities[:, :1])
    return torch.zeros_like(probabilities).scatter(1, vocabulary, probabilities.masked_fill(outside & (rank > 0), 0.0))


def _adjust(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Return logits [B, V] after penalties. Barred tokens get -inf."""
    changes = changed_logits(logits, rows)
    if changes is None:
        return logits
    index, tokens, values = changes
    adjusted = logits.clone()
    adjusted[index, tokens] = values
    return adjusted


def _excluded(rows: Sequence[RowSampling], likeliest: Tensor, logits: Tensor) -> tuple[list[int], Tensor]:
    """Return the indices of rows that need a mask, and their bool masks [rows, V]: true for forbidden tokens.

    A greedy row needs no mask if its likeliest token (from `likeliest` [B]) is allowed, unless its constraint is
    `scored`.
    """
    members = [
        index
        for index, row in enumerate(rows)
        if row.needs_mask or (row.allowed is not None and not row.allowed.allows(int(likeliest[index])))
    ]
    vocabulary = logits.shape[1]
    if not members:
        return members, logits.new_empty((0, vocabulary), dtype=torch.bool)
    bits = allowed_bits([rows[index] for index in members], vocabulary)
    excluded = np.unpackbits(~bits.view(np.uint8), axis=1, count=vocabulary, bitorder="little").view(np.bool_)
    return members, torch.from_numpy(excluded).to(logits.device)


def _top(logits: Tensor, normalizer: Tensor, tokens: Tensor, rows: Sequence[RowSampling]) -> dict[int, TokenLogprob]:
    """Return row index -> log-probabilities of the row's token and likeliest tokens, for rows that set `logprobs`.

    logits, normalizer: before penalties, temperature, top-k and top-p.
    """
    counts = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    top: dict[int, TokenLogprob] = {}
    for most in sorted(set(counts.values())):  # one topk for each count, so that ties do not depend on other rows
        members = [row for row, count in counts.items() if count == most]
        index = torch.tensor(members, device=logits.device)
        logprobs = logits[index] - normalizer[index, None]
        values, ids = logprobs.topk(min(most, logits.shape[1]), dim=-1)
        sampled = logprobs.gather(1, tokens[index, None])[:, 0].tolist()
        for number, row in enumerate(members):
            likeliest = zip(ids[number].tolist(), values[number].tolist(), strict=True)
            top[row] = TokenLogprob(int(tokens[row]), sampled[number], tuple(likeliest))
    return top
