"""One description of a decoder layer for all families: `families` builds it, `cpu` computes with it.

Shapes: E hidden size, F feed-forward size, Q query heads, H key/value heads, D head size, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

from actors.engine.model.compressed import Codes, codes_of

SILU, GELU = ("silu", "swish"), "gelu_pytorch_tanh"


@dataclass(frozen=True)
class NormWeights:
    """LayerNorm if there is a bias, else RMSNorm. Both are float32 [E]; for queries and keys, [D] or [heads D]."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: Any, offset: float = 0.0) -> NormWeights:
        """Return the weights of transformers' `norm`, which multiplies by (its weight + offset)."""
        from torch import nn

        weight = norm.weight.detach().float() + offset
        if isinstance(norm, nn.LayerNorm):
            assert norm.bias is not None
            return cls(weight, norm.bias.detach().float(), norm.eps)
        return cls(weight, None, float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon))


@dataclass(frozen=True)
class Projection:
    """Linear layers with a common input, whose outputs are concatenated."""

    layers: tuple[nn.Linear, ...]

    @classmethod
    def of(cls, *layers: nn.Module) -> Projection:
        from torch import nn

        assert all(type(layer) is nn.Linear for layer in layers), "only plain linear layers have one weight"
        return cls(layers)  # type: ignore[arg-type]

    @property
    def outputs(self) -> int:
        """Number of outputs O of all layers."""
        return sum(layer.out_features for layer in self.layers)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the joined weight: [O, I]."""
        return self.outputs, self.layers[0].in_features

    def joined(self) -> tuple[Tensor, Tensor | None]:
        """Return the joined weight [O, I] and bias [O] or None. They are copies unless there is only one layer."""
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

    def codes(self) -> Codes | None:
        """Return the scales [O] of the joined weight's codes; None unless all layers have scales."""
        found = [codes for layer in self.layers if (codes := codes_of(layer)) is not None]
        if len(found) < len(self.layers):
            return None
        import torch

        return Codes(found[0].kind, torch.cat([codes.scales for codes in found]))


@dataclass(frozen=True)
class LayerWeights:
    """A decoder layer: self-attention and feed-forward, each with a norm and a residual connection."""

    number: int  # index of the layer in the model
    query_heads: int  # Q
    kv_heads: int  # H
    head_dim: int  # D
    scaling: float  # factor of the attention scores
    qkv: Projection  # queries, keys and values, in this order: [(Q + 2 H) D, E]
    output: Projection  # projection after attention: [E, Q D]
    up: Projection  # gate and up, in this order, [2 F, E] if gated, else [F, E]
    down: Projection  # [E, F]
    activation: str  # a name of transformers' ACT2FN
    gated: bool  # whether the feed-forward computes activation(gate) * up
    # norms before attention and feed-forward, x + after(block(norm(x))); None: there are none (OLMo 2)
    attention_norm: NormWeights | None = None
    mlp_norm: NormWeights | None = None
    # RMSNorm of the outputs of attention and feed-forward (OLMo 2, Gemma 3); None: there are none
    attention_after: NormWeights | None = None
    mlp_after: NormWeights | None = None
    # whether attention_norm and mlp_norm come after the residual connections, norm(x + block(x)), as in OPT-350M
    norms_residual: bool = False
    # RMSNorm of queries before rope: [D] for each head, or [Q D] for all heads together
    query_norm: NormWeights | None = None
    key_norm: NormWeights | None = None  # norm of keys: [D] or [H D]
    # whether queries and keys are rotated by their positions. How many numbers of a head are rotated follows from
    # the width of the cosines
    rope: bool = True
    window: int | None = None  # how many keys a token attends to, its own included; None is all

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

    @property
    def relu(self) -> bool:
        """Whether the activation is ReLU without a gate: then the matrix product before it can apply it."""
        return not self.gated and self.activation == "relu"
