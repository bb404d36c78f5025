"""Logits -> tokens: greedy, temperature, top-k, top-p, each row with parameters and random numbers of its own.

A row's random number for a position is a hash of its key and that position and of nothing else, so batch
composition, retries and resumed jobs draw the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.types import SamplingParams

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def row_key(seed: int, source: str, row: int, sample: int = 0) -> int:
    """64-bit key of one row's random numbers, from job seed, file, row number and sample index."""
    digest = hashlib.blake2b(f"{seed}\0{source}\0{row}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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


def sample(
    logits: Tensor, params: Sequence[SamplingParams], keys: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Logits [B, V] -> token ids [B] and their log-probabilities [B], nats, under the distribution drawn from.

    positions: index of the token drawn, counted from 0 in its row's response. A greedy row's log-probability
    is that of the untouched distribution.
    """
    logits = logits.float()
    tokens = logits.argmax(dim=-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
    drawn = [row for row, one in enumerate(params) if one.temperature > 0]
    # per row, not per batch: the way a row is drawn must not hang on its neighbours
    for rows in (
        [row for row in drawn if params[row].top_k == 0 and params[row].top_p == 1.0],
        [row for row in drawn if params[row].top_k > 0 or params[row].top_p < 1.0],
    ):
        if not rows:
            continue
        index = torch.tensor(rows, device=logits.device)
        temperature = torch.tensor([params[row].temperature for row in rows], device=logits.device)
        u = uniforms(
            torch.tensor([keys[row] for row in rows], device=logits.device),
            torch.tensor([positions[row] for row in rows], device=logits.device),
        )
        scaled = logits[index] / temperature[:, None]
        narrowed = params[rows[0]].top_k > 0 or params[rows[0]].top_p < 1.0
        if narrowed:
            top_k = torch.tensor([params[row].top_k or logits.shape[1] for row in rows], device=logits.device)
            top_p = torch.tensor([params[row].top_p for row in rows], device=logits.device, dtype=torch.float64)
            probabilities, vocabulary = _narrow(scaled, top_k, top_p)
        else:
            probabilities, vocabulary = scaled.double().softmax(dim=-1), None
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1:]
        choice = torch.searchsorted(cumulative, u[:, None] * total, right=True)
        last = (probabilities > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
        choice = torch.minimum(choice, last)  # rounding must not reach past the last possible token
        logprobs[index] = (probabilities.gather(1, choice) / total).log()[:, 0].float()
        tokens[index] = (choice if vocabulary is None else vocabulary.gather(1, choice))[:, 0]
    return tokens, logprobs


def _narrow(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, V], highest first and 0 outside top-k and then top-p, and the tokens they belong to."""
    ordered, vocabulary = scaled.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return probabilities.masked_fill((before >= top_p[:, None]) & (rank > 0), 0.0), vocabulary
