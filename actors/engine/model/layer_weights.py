"""Describes a decoder layer of any family. Module `families` creates the description; folder `cpu` computes with it.

Shapes: E hidden size, F feed-forward size, Q query heads, H key/value heads, D head size, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


SILU, GELU = ("silu", "swish"), "gelu_pytorch_tanh"


@dataclass(frozen=True)
class NormWeights:
    """Float32 weights of a LayerNorm (with bias) or RMSNorm: [E]; of a norm of queries or keys: [D] or [heads * D]."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: Any, offset: float = 0.0) -> NormWeights:
        """Return the weights of `norm`, a transformers module that multiplies by (its weight + `offset`)."""
        from torch import nn

        weight = norm.weight.detach().float() + offset
        if isinstance(norm, nn.LayerNorm):
            assert norm.bias is not None
            return cls(weight, norm.bias.detach().float(), norm.eps)
        return cls(weight, None, float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon))


@dataclass(frozen=True)
class Projection:
    """Linear layers with the same input, whose outputs are concatenated."""

    layers: tuple[nn.Linear, ...]

    @classmethod
    def of(cls, *layers: nn.Module) -> Projection:
        from torch import nn

        assert all(type(layer) is nn.Linear for layer in layers), "all layers must be plain nn.Linear"
        return cls(layers)  # type: ignore[arg-type]

    @property
    def outputs(self) -> int:
        """Number of outputs O of all layers together."""
        return sum(layer.out_features for layer in self.layers)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the concatenated weight: [O, I]."""
        return self.outputs, self.layers[0].in_features

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Return the concatenated weight [O, I] and bias ([O] or None). A single layer's tensors are not copied."""
        if len(self.layers) == 1:
            bias = self.layers[0].bias
            return self.layers[0].weight.detach(), None if bias is None else bias.detach()
        import torch

        weight = torch.cat([layer.weight.detach() for layer in self.layers])
        if all(layer.bias is None for layer in self.layers):
            return weight, None
        biases = [
            weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in self.layers
        ]
        return weight, torch.cat(biases)


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer: an attention block and a feed-forward block, each with norms and a residual connection."""

    query_heads: int  # Q
    kv_heads: int  # H
    head_dim: int  # D
    scaling: float  # factor for the attention scores
    qkv: Projection  # [(Q + 2 H) D, E], to queries, keys and values, in this order
    output: Projection  # [E, Q D], after attention
    up: Projection  # [2 F, E], to gate and up, in this order; [F, E] if not gated
    down: Projection  # [E, F]
    activation: str  # name of the activation in transformers' ACT2FN
    gated: bool  # whether the feed-forward block computes activation(gate) * up instead of activation(up)
    # `norm` of each block in x + after(block(norm(x))); None: no such norms (OLMo 2)
    attention_norm: NormWeights | None = None
    mlp_norm: NormWeights | None = None
    # `after` of each block in x + after(block(norm(x))): RMSNorm (OLMo 2, Gemma 3); None: no such norms
    attention_after: NormWeights | None = None
    mlp_after: NormWeights | None = None
    # whether attention_norm and mlp_norm follow the residual connections: norm(x + block(x)), as in OPT-350M
    norms_residual: bool = False
    # RMSNorms of queries and keys before rope: [D] for each head alone, or [Q D] and [H D] for all heads together
    query_norm: NormWeights | None = None
    key_norm: NormWeights | None = None
    # whether queries and keys have rotary embeddings. The width of the cosines is the rotated part of a head
    rope: bool = True
    window: int | None = None  # sliding window: number of keys that a token attends to, with its own; None: all keys

    def __post_init__(self) -> None:
        queries, keys = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        assert self.query_heads % self.kv_heads == 0 and self.qkv.outputs == queries + 2 * keys
        assert not self.gated or self.activation in (*SILU, GELU)
        assert (self.attention_norm is None, self.attention_after is None) == (
            self.mlp_norm is None,
            self.mlp_after is None,
        )
        assert not self.norms_residual or (self.attention_norm is not None and self.attention_after is None)
        for after in (self.attention_after, self.mlp_after):
            assert after is None or after.bias is None
        assert (self.query_norm is None) == (self.key_norm is None)
        if self.query_norm is not None and self.key_norm is not None:
            sizes = len(self.query_norm.weight), len(self.key_norm.weight)
            assert sizes in ((self.head_dim, self.head_dim), (queries, keys))
            assert self.query_norm.eps == self.key_norm.eps
