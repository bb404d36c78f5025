"""A decoder layer of any described family on a CPU: few large products, and one kernel for each operation between them.

Queries, keys and values are one product, and so are gate and up; norms, rope and gates are kernels; a residual is
added by the product before it. The parts are plain objects, because the call of a module takes longer than some of
them. The tests hold the layer against the library's.
Shapes: B rows, S new tokens, N = B S, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from actors.engine.cpu import kernels
from actors.engine.cpu.attention import attend
from actors.engine.cpu.packing import Product, product
from actors.engine.model.layer_weights import LayerWeights, NormPlacement, NormWeights, Projection


class Norm:
    """LayerNorm, or RMSNorm where there is no bias; both [E]."""

    def __init__(self, weights: NormWeights) -> None:
        self.weight, self.bias, self.eps = weights.weight, weights.bias, weights.eps

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, E]."""
        return kernels.normalize(hidden, self.weight, self.bias, self.eps)


def _product(projection: Projection, int8: bool) -> Product:
    return product(*projection.joined(), int8=int8, codes=projection.codes())


class _Attention:
    """Self-attention between its norm and its residual."""

    def __init__(self, weights: LayerWeights, int8: bool) -> None:
        self.qkv, self.output = (_product(part, int8) for part in (weights.qkv, weights.output))
        self.query_norm, self.key_norm = weights.query_norm, weights.key_norm
        self.layer, self.rope, self.scaling = weights.number, weights.rope, weights.scaling
        self.query_heads, self.kv_heads, self.head_dim = weights.query_heads, weights.kv_heads, weights.head_dim
        self.is_causal = True
        self.num_key_value_groups = weights.query_heads // weights.kv_heads  # read by the library's attention

    def __call__(
        self, hidden: Tensor, residual: Tensor | None, rows: int, rotary: Any, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """hidden, residual [N, E] -> [N, E]; rotary: cosines and sines [B, S, R] of R numbers of a head, or None."""
        queries, keys = self.query_heads, self.query_heads + self.kv_heads
        states = self.qkv(hidden).view(len(hidden), keys + self.kv_heads, self.head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            kernels.normalize_heads(states[:, :queries], self.query_norm.weight, self.query_norm.eps)
            kernels.normalize_heads(states[:, queries:keys], self.key_norm.weight, self.key_norm.eps)
        if self.rope:
            cosines, sines = (table.reshape(len(hidden), -1).contiguous() for table in rotary)
            kernels.rotate(states[:, :keys], cosines, sines)
        by_row = states.view(rows, -1, keys + self.kv_heads, self.head_dim).transpose(1, 2)
        query, key, value = by_row[:, :queries], by_row[:, queries:keys], by_row[:, keys:]
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        attended, _ = attend(self, query, key, value, mask, scaling=self.scaling)
        return self.output(attended.reshape(len(hidden), -1), residual=residual)


class _FeedForward:
    """The feed-forward between its norm and its residual."""

    def __init__(self, weights: LayerWeights, int8: bool) -> None:
        self.up, self.down = (_product(part, int8) for part in (weights.up, weights.down))
        self.gated, self.relu = weights.gated, weights.relu
        self.then = None if weights.gated or weights.relu else weights.activate()

    def __call__(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """hidden, residual [N, E] -> [N, E]."""
        if self.gated:
            return self.down(kernels.gate(self.up(hidden)), residual=residual)
        wide = self.up(hidden, activation="relu" if self.relu else "none")
        return self.down(wide if self.then is None else self.then(wide), residual=residual)


class CpuLayer(nn.Module):
    """A decoder layer, called as the library's."""

    def __init__(self, weights: LayerWeights, *, int8: bool = False) -> None:
        """Weights are copied, or shared where their layout stays. int8: see `packing.product`."""
        super().__init__()
        self.attention = _Attention(weights, int8)
        self.feed_forward = _FeedForward(weights, int8)
        self.attention_norm, self.mlp_norm = Norm(weights.attention_norm), Norm(weights.mlp_norm)
        self.placement, self.window = weights.placement, weights.window

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: Any, past_key_values: Any, **more: Any
    ) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        flat: Tensor = hidden.reshape(-1, hidden.shape[-1])
        how = len(hidden), position_embeddings, attention_mask, past_key_values
        if self.placement == NormPlacement.INPUT:
            flat = self.attention(self.attention_norm(flat), flat, *how)
            flat = self.feed_forward(self.mlp_norm(flat), flat)
        elif self.placement == NormPlacement.RESIDUAL:
            flat = self.attention_norm(self.attention(flat, flat, *how))
            flat = self.mlp_norm(self.feed_forward(flat, flat))
        else:
            flat = flat + self.attention_norm(self.attention(flat, None, *how))
            flat = flat + self.mlp_norm(self.feed_forward(flat, None))
        return flat.view(hidden.shape)
