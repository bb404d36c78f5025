"""Decoder layers of the families that are run most, as few large products and a few kernels of fixed shapes.

Queries, keys and values are one product, and so are gate and up. A layer runs over one token of each lane, or over
whole prompts one behind another, which are never padded; what it computes is the library's layer, which the tests hold
it against.
Shapes: B lanes, N tokens of all prompts, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from actors.engine.gpu import reference
from actors.engine.gpu.pages import PagedCache
from actors.engine.gpu.prompts import Prompts
from actors.engine.layer_parts import is_llama, is_opt, side_by_side

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


@dataclass(frozen=True)
class Weights:
    """Of a product: weight [O, I], bias [O] or None. relu: whether the product itself ends with it."""

    weight: Tensor
    bias: Tensor | None
    relu: bool = False

    @classmethod
    def of(cls, layers: Sequence[nn.Linear], relu: bool = False) -> Weights:
        """Layers over one input as one product, whose outputs lie side by side."""
        return cls(*side_by_side(layers), relu)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, I] -> [N, O]."""
        if not self.relu:
            return linear(hidden, self.weight, self.bias)
        if self.bias is None:
            return torch.relu(linear(hidden, self.weight))
        return torch._addmm_activation(self.bias, hidden, self.weight.t())  # what torch's own compiler uses


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm where there is no bias; both [E]."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class FusedNorm(nn.Module):
    """The library's RMSNorm behind the last layer, in one kernel."""

    def __init__(self, norm: Any, operations: Any = reference) -> None:
        super().__init__()
        self.norm, self.operations = Norm(norm.weight.detach(), None, norm.variance_epsilon), operations

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        normed: Tensor = self.operations.norm(flat, self.norm.weight, None, self.norm.eps)
        return normed.view(hidden.shape)


class FusedLayer(nn.Module):
    """One decoder layer. operations: `kernels`, or `reference` where there is no Triton."""

    def __init__(self, layer: Any, operations: Any = reference) -> None:
        """layer: of a model that `has_pages`; its weights are copied, or shared where they stay as they are."""
        super().__init__()
        assert is_opt(layer) or is_llama(layer)
        self.operations = operations
        attention = layer.self_attn
        self.number: int = attention.layer_idx
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.query_heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        self.qkv = Weights.of([attention.q_proj, attention.k_proj, attention.v_proj])
        self.norm_first = True
        if is_opt(layer):
            self.output = Weights.of([attention.out_proj])
            relu = isinstance(layer.activation_fn, nn.ReLU)
            self.up, self.down = Weights.of([layer.fc1], relu), Weights.of([layer.fc2])
            self.activate: Callable[[Tensor], Tensor] = nn.Identity() if relu else layer.activation_fn
            self.norm_first = bool(layer.do_layer_norm_before)
            norms = layer.self_attn_layer_norm, layer.final_layer_norm
            self.norms = [Norm(one.weight.detach(), one.bias.detach(), one.eps) for one in norms]
        else:
            mlp = layer.mlp
            self.output = Weights.of([attention.o_proj])
            self.up, self.down = Weights.of([mlp.gate_proj, mlp.up_proj]), Weights.of([mlp.down_proj])
            self.activate = operations.gate
            rms = layer.input_layernorm, layer.post_attention_layernorm
            self.norms = [Norm(one.weight.detach(), None, one.variance_epsilon) for one in rms]

    def _heads(self, hidden: Tensor) -> Tensor:
        """[N, E] -> queries, keys and values [N, Q + 2 H, D]."""
        return self.qkv(self._norm(0, hidden) if self.norm_first else hidden).view(len(hidden), -1, self.head_dim)

    def _norm(self, number: int, hidden: Tensor) -> Tensor:
        norm = self.norms[number]
        normed: Tensor = self.operations.norm(hidden, norm.weight, norm.bias, norm.eps)
        return normed

    def step(self, hidden: Tensor, lanes: Lanes, cache: PagedCache, rank: int, splits: int) -> None:
        """hidden [B, E], in its place, of the lanes whose depth is above rank. splits: see `attend`."""
        operations, table = self.operations, cache.table[self.number]
        where = cache.keys, cache.values, table, lanes.slots, lanes.places, lanes.depths, rank
        queries = operations.append(self._heads(hidden), lanes.rotary, self.query_heads, *where)
        attended = operations.attend(queries, *where, self.scaling, splits)
        change, runs = self.output(attended.view(len(hidden), -1)), (lanes.depths, rank)
        if self.norm_first:
            between = self.norms[1]
            normed = operations.add_norm(hidden, change, *runs, between.weight, between.bias, between.eps)
            operations.add(hidden, self.down(self.activate(self.up(normed))), *runs)
        else:
            self._join(0, hidden, change, *runs)
            self._join(1, hidden, self.down(self.activate(self.up(hidden))), *runs)

    def _join(self, number: int, hidden: Tensor, change: Tensor, depths: Tensor, rank: int) -> None:
        """The residual, and the norm behind it."""
        hidden.copy_(torch.where((depths > rank)[:, None], self._norm(number, hidden + change), hidden))

    def prompts(self, hidden: Tensor, rotary: Rotary, prompts: Prompts, cache: PagedCache | None) -> None:
        """hidden [N, E] of prompts one behind another, in its place; their keys and values go to the rows' pages."""
        keys, values = (hidden.new_empty(len(hidden), self.kv_heads, self.head_dim) for _ in range(2))
        for piece in prompts.pieces:
            part = hidden[piece.tokens]
            queries, key, value = self._heads(part).split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
            if rotary is not None:
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
        if position_embeddings is not None:
            query, key = (reference.rotated(one, *position_embeddings) for one in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        causal = attention_mask is None and hidden.shape[1] > 1
        attended = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=self.scaling, enable_gqa=True
        )
        return self._behind_attention(flat, attended.transpose(1, 2)).view(hidden.shape)

    def _behind_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [N, E] before the layer, and what its heads have seen, N of [Q, D] -> [N, E] behind it."""
        hidden = hidden + self.output(attended.reshape(len(hidden), -1))
        if not self.norm_first:
            hidden = self._norm(0, hidden)
        wide = self.activate(self.up(self._norm(1, hidden) if self.norm_first else hidden))
        hidden = hidden + self.down(wide)
        return hidden if self.norm_first else self._norm(1, hidden)
