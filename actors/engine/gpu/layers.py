"""A decoder layer of any described family as few large products and a few kernels of fixed shapes.

Queries, keys and values are one product, and so are gate and up. A layer runs over one token of each lane, or over
whole prompts one behind another, which are never padded. The tests hold it against the library's layer.
Shapes: B lanes, N tokens of all prompts, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.checkpoint.layer_weights import LayerWeights, NormPlacement, NormWeights
from actors.engine.gpu import reference
from actors.engine.gpu.operations import Lanes, Operations, Rotary
from actors.engine.gpu.pages import PagedCache
from actors.engine.gpu.products import EightBits, product_of
from actors.engine.gpu.prompts import Prompts
from actors.engine.gpu.splits import Splits
from actors.engine.library import packed_attention
from actors.engine.library.packed_attention import Attendance


class FusedNorm(nn.Module):
    """The norm behind the last layer, in one kernel."""

    def __init__(self, norm: NormWeights, operations: Operations = reference) -> None:
        super().__init__()
        self.norm, self.operations = norm, operations

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return self.operations.norm(flat, self.norm).view(hidden.shape)


class FusedLayer(nn.Module):
    """One decoder layer."""

    def __init__(
        self, weights: LayerWeights, operations: Operations = reference, eight_bits: EightBits | None = None
    ) -> None:
        """
        Args:
            weights: of a layer without a window; they are copied, or shared where their layout stays.
            operations: `kernels`, or `reference` where there is no Triton.
            eight_bits: products with 8 bits; None: all in 16.
        """
        super().__init__()
        assert weights.window is None
        self.operations = operations
        self.number, self.scaling, self.rope = weights.number, weights.scaling, weights.rope
        self.query_heads, self.kv_heads, self.head_dim = weights.query_heads, weights.kv_heads, weights.head_dim
        self.qkv, self.output, self.down = (
            product_of(part, eight_bits, operations) for part in (weights.qkv, weights.output, weights.down)
        )
        self.up = product_of(weights.up, eight_bits, operations, weights.relu)
        self.query_norm, self.key_norm = weights.query_norm, weights.key_norm
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
            self.operations.norm_heads(states, self.query_heads, self.query_norm, self.key_norm)
        return states

    def _feed_forward(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, E], between its norm and its residual."""
        wide = self.up(hidden)
        return self.down(wide if self.activate is None else self.activate(wide))

    def _norm(self, number: int, hidden: Tensor) -> Tensor:
        return self.operations.norm(hidden, self.norms[number])

    def step(self, hidden: Tensor, lanes: Lanes, cache: PagedCache, rank: int, splits: Splits) -> None:
        """One token of each lane.

        Args:
            hidden: [B, E], overwritten by the result in lanes whose depth is above `rank`.
            lanes: B of them.
            cache: its pages hold the rows' keys and values.
            rank: of the layer in the schedule's order.
            splits: see `Operations.attend`.
        """
        self._after_attention(hidden, self._attended(self._heads(hidden), lanes, cache, rank, splits), lanes, rank)

    def _attended(self, states: Tensor, lanes: Lanes, cache: PagedCache, rank: int, splits: Splits) -> Tensor:
        """Heads [B, Q + 2 H, D] of one token of each lane -> [B, Q, D]; keys and values are written to the pages."""
        pages = cache.layer(self.number)
        rotary = lanes.rotary if self.rope else None
        queries = self.operations.append(states, self.query_heads, rotary, pages, lanes, rank)
        return self.operations.attend(queries, pages, lanes, rank, self.scaling, splits)

    def _after_attention(self, hidden: Tensor, attended: Tensor, lanes: Lanes, rank: int) -> None:
        """Attended [B, Q, D] through the rest of the layer, into hidden [B, E] of lanes that run it."""
        operations = self.operations
        change = self.output(attended.reshape(len(hidden), -1))
        if self.placement == NormPlacement.INPUT:
            normed = operations.add_norm(hidden, change, lanes, rank, self.norms[1])
            operations.add(hidden, self._feed_forward(normed), lanes, rank)
        else:
            self._join(0, hidden, change, lanes, rank)
            self._join(1, hidden, self._feed_forward(hidden), lanes, rank)

    def _join(self, number: int, hidden: Tensor, change: Tensor, lanes: Lanes, rank: int) -> None:
        """Add the output [B, E] of attention or feed-forward to hidden [B, E], with the norm behind either."""
        if self.placement == NormPlacement.OUTPUT:
            self.operations.add(hidden, self._norm(number, change), lanes, rank)
        else:
            normed = self._norm(number, hidden + change)
            hidden.copy_(torch.where((lanes.depths > rank)[:, None], normed, hidden))

    def prompts(self, hidden: Tensor, rotary: Rotary, prompts: Prompts, cache: PagedCache | None, rank: int) -> None:
        """Whole prompts, one behind another, and before them one token of each riding lane.

        Args:
            hidden: [B + N, E], overwritten by the result.
            rotary: cosines and sines [N, R], or None.
            prompts: their attention, the rows that have them, and the riders.
            cache: its pages receive the rows' keys and values; None: they are not kept there.
            rank: of the layer in the schedule's order.
        """
        riders = prompts.riders
        riding, count = (0, 0) if riders is None else (len(riders), riders.counts[self.number])
        prompt_tokens = len(hidden) - riding
        keys, values = (hidden.new_empty(prompt_tokens, self.kv_heads, self.head_dim) for _ in range(2))
        pages = None
        if cache is not None and prompts.unshared and cache.uses[self.number]:
            pages = cache.layer(self.number)
        for chunk in prompts.chunks:
            tokens = chunk.tokens
            before = 0 if chunk.first else count  # the riders that run this layer share the first chunk's products
            both = slice(riding + chunk.first - before, riding + chunk.end)
            part, lanes, own_lanes = hidden[both], prompts.lanes.at(both), prompts.own_lanes.at(tokens)
            turn = (rotary[0][tokens], rotary[1][tokens]) if self.rope and rotary is not None else None
            states, dense = self._heads(part), (keys[tokens], values[tokens])
            queries = self.operations.append(states[before:], self.query_heads, turn, pages, own_lanes, rank, dense)
            attended = prompts.attend(self.number, chunk, queries, keys, values, self.scaling)
            if before:
                assert riders is not None and cache is not None
                step = states[:before], riders.lanes.youngest(before), cache, rank, riders.splits[self.number]
                attended = torch.cat((self._attended(*step), attended))
            self._after_attention(part, attended, lanes, rank)
        prompts.keep(cache, self.number, keys, values, self.operations)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | Attendance | None = None,
        position_embeddings: Rotary = None,
        past_key_values: Any = None,
        **more: Any,
    ) -> Tensor:
        """[B, S, E] -> [B, S, E], called as the library's layer: for passes over other caches, or none."""
        flat = hidden.flatten(0, 1)
        states = self._heads(flat).unflatten(0, hidden.shape[:2]).transpose(1, 2)
        query, key, value = states.split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
        if self.rope and position_embeddings is not None:
            cosines, sines = position_embeddings
            query, key = reference.rotated(query, cosines, sines), reference.rotated(key, cosines, sines)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        if isinstance(attention_mask, Attendance):
            attended, _ = packed_attention.attend(self, query, key, value, attention_mask, scaling=self.scaling)
        else:
            causal = attention_mask is None and hidden.shape[1] > 1
            attended = scaled_dot_product_attention(
                query, key, value, attn_mask=attention_mask, is_causal=causal, scale=self.scaling, enable_gqa=True
            ).transpose(1, 2)
        return self._behind_attention(flat, attended).view(hidden.shape)

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
