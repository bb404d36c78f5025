"""Decoder layers of the families that are run most, as few large products and a few kernels of fixed shapes.

Queries, keys and values are one product, and so are gate and up. A layer runs over one token of each lane, or over
whole prompts one behind another, which are never padded; what it computes is the library's layer, which the tests hold
it against.
Shapes: B lanes, N tokens of all prompts, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from actors.engine.gpu import reference
from actors.engine.gpu.pages import PagedCache
from actors.engine.gpu.prompts import Prompts
from actors.engine.layer_weights import LayerWeights, NormPlacement, NormWeights, Projection

Rotary = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Lanes:
    """The youngest B lanes of a step. slots, places: int64 [B], whose row a lane is and the place of its token in it;
    depths [B]: a layer of a rank below it runs for the lane, 0 for one that has ended. rotary: [B, D]."""

    slots: Tensor
    places: Tensor
    depths: Tensor
    rotary: Rotary

    def youngest(self, count: int) -> Lanes:
        """The last ones."""
        turns = None if self.rotary is None else (self.rotary[0][-count:], self.rotary[1][-count:])
        return Lanes(self.slots[-count:], self.places[-count:], self.depths[-count:], turns)


class Product:
    """x [N, I] -> x W^T + b [N, O]; relu: whether the product itself ends with it."""

    def __init__(self, projection: Projection, relu: bool = False) -> None:
        self.weight, self.bias = projection.joined()
        self.relu = relu

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        if not self.relu:
            return linear(hidden, self.weight, self.bias)
        if self.bias is None:
            return torch.relu(linear(hidden, self.weight))
        return torch._addmm_activation(self.bias, hidden, self.weight.t())  # what torch's own compiler uses


class FusedNorm(nn.Module):
    """The norm behind the last layer, in one kernel."""

    def __init__(self, norm: NormWeights, operations: Any = reference) -> None:
        super().__init__()
        self.norm, self.operations = norm, operations

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        normed: Tensor = self.operations.norm(flat, self.norm.weight, self.norm.bias, self.norm.eps)
        return normed.view(hidden.shape)


class FusedLayer(nn.Module):
    """One decoder layer. operations: `kernels`, or `reference` where there is no Triton."""

    def __init__(self, weights: LayerWeights, operations: Any = reference) -> None:
        """weights: of a layer without a window; they are copied, or shared where their layout stays."""
        super().__init__()
        assert weights.window is None
        self.operations = operations
        self.number, self.scaling, self.rope = weights.number, weights.scaling, weights.rope
        self.query_heads, self.kv_heads, self.head_dim = weights.query_heads, weights.kv_heads, weights.head_dim
        self.qkv, self.output = Product(weights.qkv), Product(weights.output)
        self.query_norm, self.key_norm = weights.query_norm, weights.key_norm
        self.up, self.down = Product(weights.up, weights.relu), Product(weights.down)
        self.activate: Callable[[Tensor], Tensor] | None = None  # None: part of the product before it
        if not weights.relu:
            self.activate = operations.gate if weights.gated else weights.activate()
        self.placement = weights.placement
        self.norms = weights.attention_norm, weights.mlp_norm

    def _heads(self, hidden: Tensor) -> Tensor:
        """[N, E] -> queries, keys and values [N, Q + 2 H, D], before rope."""
        states = self.qkv(self._norm(0, hidden) if self.placement == NormPlacement.INPUT else hidden)
        states = states.view(len(hidden), -1, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            norms = self.query_norm.weight, self.key_norm.weight, self.query_norm.eps
            self.operations.norm_heads(states, self.query_heads, *norms)
        return states

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, E], between its norm and its residual."""
        wide = self.up(hidden)
        return self.down(wide if self.activate is None else self.activate(wide))

    def _norm(self, number: int, hidden: Tensor) -> Tensor:
        norm = self.norms[number]
        normed: Tensor = self.operations.norm(hidden, norm.weight, norm.bias, norm.eps)
        return normed

    def step(self, hidden: Tensor, lanes: Lanes, cache: PagedCache, rank: int, splits: int) -> None:
        """hidden [B, E], in its place, of the lanes whose depth is above rank. splits: see `attend`."""
        operations, table = self.operations, cache.table[self.number]
        where = cache.keys, cache.values, table, lanes.slots, lanes.places, lanes.depths, rank
        rotary = lanes.rotary if self.rope else None
        queries = operations.append(self._heads(hidden), rotary, self.query_heads, *where)
        attended = operations.attend(queries, *where, self.scaling, splits)
        change, runs = self.output(attended.view(len(hidden), -1)), (lanes.depths, rank)
        if self.placement == NormPlacement.INPUT:
            between = self.norms[1]
            normed = operations.add_norm(hidden, change, *runs, between.weight, between.bias, between.eps)
            operations.add(hidden, self._feed_forward(normed), *runs)
        else:
            self._join(0, hidden, change, *runs)
            self._join(1, hidden, self._feed_forward(hidden), *runs)

    def _join(self, number: int, hidden: Tensor, change: Tensor, depths: Tensor, rank: int) -> None:
        """Add the output [B, E] of attention or feed-forward to hidden [B, E], with the norm behind either."""
        if self.placement == NormPlacement.OUTPUT:
            self.operations.add(hidden, self._norm(number, change), depths, rank)
        else:
            hidden.copy_(torch.where((depths > rank)[:, None], self._norm(number, hidden + change), hidden))

    def prompts(self, hidden: Tensor, rotary: Rotary, prompts: Prompts, cache: PagedCache | None) -> None:
        """hidden [N, E] of prompts one behind another, in its place; their keys and values go to the rows' pages."""
        keys, values = (hidden.new_empty(len(hidden), self.kv_heads, self.head_dim) for _ in range(2))
        for piece in prompts.pieces:
            part = hidden[piece.tokens]
            queries, key, value = self._heads(part).split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
            if self.rope and rotary is not None:
                turns = rotary[0][piece.tokens], rotary[1][piece.tokens]
                queries, key = reference.rotated(queries, *turns), reference.rotated(key, *turns)
            keys[piece.tokens], values[piece.tokens] = key, value
            attended = prompts.attend(self.number, piece, queries, keys, values, self.scaling)
            hidden[piece.tokens] = self._behind_attention(part, attended)
        prompts.keep(cache, self.number, keys, values)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotary = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Tensor:
        """[B, S, E] -> [B, S, E], called as the library's layer: for what is neither a step nor a pass over prompts."""
        flat = hidden.flatten(0, 1)
        states = self._heads(flat).unflatten(0, hidden.shape[:2]).transpose(1, 2)
        query, key, value = states.split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rope and position_embeddings is not None:
            query, key = (reference.rotated(one, *position_embeddings) for one in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        causal = attention_mask is None and hidden.shape[1] > 1
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=self.scaling, enable_gqa=True
        )
        return self._behind_attention(flat, attended.transpose(1, 2)).view(hidden.shape)

    def _behind_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [N, E] before the layer, attended [N, Q, D] -> [N, E] behind the layer."""
        hidden = self._joined(0, hidden, self.output(attended.reshape(len(hidden), -1)))
        normed = self._norm(1, hidden) if self.placement == NormPlacement.INPUT else hidden
        return self._joined(1, hidden, self._feed_forward(normed))

    def _joined(self, number: int, hidden: Tensor, change: Tensor) -> Tensor:
        """The sum of hidden [N, E] and the output [N, E] of attention or feed-forward, with the norm behind either."""
        if self.placement == NormPlacement.INPUT:
            return hidden + change
        if self.placement == NormPlacement.OUTPUT:
            return hidden + self._norm(number, change)
        return self._norm(number, hidden + change)
