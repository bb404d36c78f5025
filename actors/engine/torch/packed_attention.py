"""Attention for passes over concatenated tokens without padding, in training and evaluation.

Only the attention itself pads the tokens to matrices; all other parts of a layer compute without padding.
Shapes: N tokens, G groups of tokens that attend to each other, Q places in a group for tokens and padding
(N <= G * Q), C keys of a group from earlier passes, A query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "skipdecode_packed"


@dataclass
class Attendance:
    """Defines which keys each of N tokens attends to. Layers get it in place of transformers' attention mask.

    The tokens form G groups, each padded to Q places.

    tokens: [G * Q], index of the token at each place. places: [N], place of each token.
    visible: bool [G, 1, Q, C + Q], whether a token attends to a key.
    earlier: keys and values [G or 1, H, K, D] of each earlier pass; C is the sum of all K.
    states: keys and values [G, H, Q, D] that the latest layer computed.
    """

    tokens: Tensor
    places: Tensor
    visible: Tensor
    earlier: Sequence[tuple[Tensor, Tensor]] = ()
    states: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def padded(self, states: Tensor) -> Tensor:
        """Sort the tokens into groups with padding: [1, heads, N, D] -> [G, heads, Q, D]."""
        groups = len(self.visible)
        padded: Tensor = states[0].index_select(1, self.tokens).unflatten(1, (groups, -1))
        return padded.transpose(0, 1)

    def packed(self, states: Tensor) -> Tensor:
        """Remove the padding of groups, and restore the tokens' order: [G, heads, Q, D] -> [1, N, heads, D]."""
        return states.transpose(1, 2).flatten(0, 1).index_select(0, self.places)[None]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Attendance | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention [1, N, A, D] from query [1, A, N, D], key and value [1, H, N, D], with an `Attendance`."""
    attendance = cast(Attendance, attention_mask)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # cast, because the rotary embedding returns float32; cast before the copy
        query, key, value = (states.to(torch.get_autocast_dtype(device)) for states in (query, key, value))
    queries, keys, values = (attendance.padded(states) for states in (query, key, value))
    attendance.states = keys, values
    if attendance.earlier:
        keys, values = (
            torch.cat([*(one.expand(len(own), -1, -1, -1) for one in before), own], dim=2)
            for *before, own in zip(*attendance.earlier, (keys, values), strict=True)
        )
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    visible = attendance.visible
    if softcap is None:
        output = nn.functional.scaled_dot_product_attention(
            queries, keys, values, visible, dropout, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
        )
    else:
        probabilities = nn.functional.dropout(_probabilities(queries, keys, visible, scale, softcap), dropout)
        output = (probabilities.flatten(2, 3) @ values).view_as(queries)
    return attendance.packed(output), None


def _probabilities(queries: Tensor, keys: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """Return attention weights [G, H, A / H, Q, C + Q]. Query heads with the same key head share a matrix product."""
    heads = keys.shape[1]
    grouped: Tensor = queries.unflatten(1, (heads, -1))
    scores: Tensor = (grouped.flatten(2, 3) @ (keys * scale).transpose(2, 3)).unflatten(2, grouped.shape[2:4])
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible[:, None], -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(queries.dtype)


def register() -> str:
    """Register `attend` as an attention implementation of transformers; return its name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


@contextmanager
def packed(model: Any) -> Iterator[None]:
    """Make a model compute attention with `attend` inside the `with` block."""
    before = model.config._attn_implementation
    model.config._attn_implementation = register()
    try:
        yield
    finally:
        model.config._attn_implementation = before
