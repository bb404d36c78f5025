"""The definition of a cache of 8 bits in its plainest form: one row, a token at a time, by the library's layers.

A prompt's own pass attends to keys and values as they are. Every later token attends to rounded ones, its own included:
each head of each token by one scale, that of its largest number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engine.checkpoint.compressed import LIMITS, Kind
from actors.engine.decoder import Decoder
from actors.engine.sampling.sampler import sample_by_torch
from actors.engine.sampling.state import RowSampling
from actors.engine.schedules.schedule import Schedule
from actors.engine.types import Request


def rounded(numbers: Tensor, kind: Kind) -> Tensor:
    """Numbers [..., D], each head by a scale of its own, in float64."""
    highest = numbers.double().abs().amax(dim=-1, keepdim=True)
    wide = (numbers.double() * (LIMITS[kind] / highest.clamp(min=1e-300))).clamp(-LIMITS[kind], LIMITS[kind])
    codes = wide.round() if kind == "int8" else wide.float().to(torch.float8_e4m3fn)
    return codes.double() * (highest / LIMITS[kind])


class RoundedCache:
    """Keys and values [1, H, K, D] of one row, by layer, unrounded. kind: None rounds nothing."""

    def __init__(self, kind: Kind | None) -> None:
        self.kind, self.of_prompt = kind, True
        self.layers: dict[int, list[Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values [1, H, S, D]; all to which this pass attends."""
        kept = self.layers.get(layer_idx)
        both = [keys, values]
        if kept is not None:
            both = [torch.cat(pair, dim=2) for pair in zip(kept, both, strict=True)]
        self.layers[layer_idx] = both
        if self.of_prompt or self.kind is None:
            return both[0], both[1]
        return rounded(both[0], self.kind).to(keys.dtype), rounded(both[1], self.kind).to(values.dtype)


class RoundedRow:
    """A row under a schedule: `logits` [V] behind its last token, `add` for the next one."""

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, schedule: Schedule, prompt: Sequence[int], kind: Kind | None) -> None:
        self.decoder, self.schedule, self.length, self.generated = decoder, schedule, 0, 0
        self.cache = RoundedCache(kind)
        self._run(prompt, schedule.prompt_layers)
        self.cache.of_prompt = False

    @torch.inference_mode()
    def add(self, token: int) -> None:
        """Run a generated token."""
        self._run([token], self.schedule.layers(self.generated))
        self.generated += 1

    def _run(self, ids: Sequence[int], layers: Iterable[int]) -> None:
        positions = torch.arange(self.length, self.length + len(ids))[None]
        hidden, rotary = self.decoder.embed(torch.tensor([list(ids)]), positions)
        for layer in sorted(layers):
            hidden = self.decoder.run_layer(layer, hidden, rotary[layer], None, self.cache)
        self.length += len(ids)
        self.logits = self.decoder.logits(hidden[:, -1])[0]


def rounded_logits(
    decoder: Decoder, schedule: Schedule, prompt: Sequence[int], response: Sequence[int], kind: Kind | None
) -> Tensor:
    """Logits behind the prompt and behind each token of the response: [1 + len(response), V]."""
    row = RoundedRow(decoder, schedule, prompt, kind)
    found = [row.logits]
    for token in response:
        row.add(token)
        found.append(row.logits)
    return torch.stack(found)


def rounded_answer(
    decoder: Decoder, schedule: Schedule, request: Request, stop_ids: set[int], kind: Kind | None
) -> list[int]:
    """The row's tokens, greedy or sampled, without penalties."""
    params, response = request.sampling, list[int]()
    assert not RowSampling(params, request.key, 0).penalized
    row = RoundedRow(decoder, schedule, request.prompt_ids, kind)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
    while len(response) < min(params.max_new_tokens, decoder.context_length - len(request.prompt_ids)):
        barred = ends if len(response) < params.min_new_tokens else ()
        state = RowSampling(params, request.key, len(response), barred=barred)
        response += sample_by_torch(row.logits[None], [state]).tokens
        if len(response) >= params.min_new_tokens and response[-1] in ends:
            break
        row.add(response[-1])
    return response
