"""Decoder layers of the families that are run most, with fewer and larger products and one pass for what lies between.

Queries, keys and values are one product, and so are gate and up; norms, turns and gates are kernels; a residual is
added by the product before it. The parts are plain objects: calling a module takes longer than some of them do. A pass
is one native call where there is one. What a layer computes is the library's layer, which the engine's tests hold it
against.
Shapes: B rows, S new tokens, N = B S, E hidden size, Q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from actors.engine.cache import SkipCache
from actors.engine.cpu import kernels
from actors.engine.cpu.attention import attend
from actors.engine.cpu.native_layer import NativeLayer, Norm, Place
from actors.engine.cpu.packing import PanelProduct, joined
from actors.engine.layer_parts import is_llama, is_opt


class _Attention:
    """Self-attention between its norm and its residual."""

    def __init__(self, attention: Any, output: nn.Linear, query_heads: int, kv_heads: int) -> None:
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.output = joined([output])
        self.layer: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self.query_heads, self.kv_heads, self.head_dim = query_heads, kv_heads, attention.head_dim
        self.is_causal = True
        self.num_key_value_groups = query_heads // kv_heads  # read by the library's attention

    def __call__(
        self, hidden: Tensor, residual: Tensor, rows: int, rotary: Any, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """hidden, residual [N, E] -> [N, E]; rotary: cosines and sines [B, S, D], or None."""
        queries, keys = self.query_heads, self.query_heads + self.kv_heads
        states = self.qkv(hidden).view(len(hidden), keys + self.kv_heads, self.head_dim)
        if rotary is not None:
            cosines, sines = (one.reshape(len(hidden), self.head_dim) for one in rotary)
            kernels.rotate(states[:, :keys], cosines, sines)
        by_row = states.view(rows, -1, keys + self.kv_heads, self.head_dim).transpose(1, 2)
        query, key, value = by_row[:, :queries], by_row[:, queries:keys], by_row[:, keys:]
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        attended, _ = attend(self, query, key, value, mask, scaling=self.scaling)
        return self.output(attended.reshape(len(hidden), -1), residual=residual)


def _native(
    attention: _Attention, norms: tuple[Norm, Norm], up: Any, down: Any, *, gated: bool, norm_first: bool
) -> NativeLayer | None:
    """The layer as one call; None where its products are not by the kernel."""
    qkv, output = attention.qkv, attention.output
    products = [one for one in (qkv, output, up, down) if isinstance(one, PanelProduct)]
    if len(products) < 4 or attention.head_dim % 2:
        return None
    return NativeLayer(
        norms,
        (products[0], products[1], products[2], products[3]),
        heads=(attention.query_heads, attention.kv_heads),
        head_dim=attention.head_dim,
        scaling=attention.scaling,
        gated=gated,
        norm_first=norm_first,
    )


def _in_one_call(
    native: NativeLayer | None, layer: int, hidden: Tensor, rotary: Any, mask: Tensor | None, cache: Any
) -> Tensor | None:
    """[B, S, E] -> [B, S, E], of a step, or in its place of prompts one behind another; None where there is no such
    call."""
    if native is None or not isinstance(cache, SkipCache):
        return None
    place = cache.place(layer, len(hidden))
    if isinstance(place, Place):
        return native.step(hidden, rotary, mask, place)
    return None if place is None else native.prompts(hidden, rotary, place)


class LlamaLayer(nn.Module):
    """Norm, attention, norm, gated feed-forward: Llama, Mistral, Qwen2."""

    def __init__(self, layer: Any) -> None:
        """layer: a LlamaDecoderLayer or one of the same parts."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        heads = (
            attention.q_proj.out_features // attention.head_dim,
            attention.k_proj.out_features // attention.head_dim,
        )
        self.attention = _Attention(attention, attention.o_proj, *heads)
        self.up = joined([mlp.gate_proj, mlp.up_proj])
        self.down = joined([mlp.down_proj])
        before, between = layer.input_layernorm, layer.post_attention_layernorm
        self.attention_norm = Norm(before.weight.detach(), None, before.variance_epsilon)
        self.mlp_norm = Norm(between.weight.detach(), None, between.variance_epsilon)
        norms = self.attention_norm, self.mlp_norm
        self.native = _native(self.attention, norms, self.up, self.down, gated=True, norm_first=True)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: Any, past_key_values: Any, **more: Any
    ) -> Tensor:
        """[B, S, E] -> [B, S, E], called as the library's layer."""
        number = self.attention.layer
        done = _in_one_call(self.native, number, hidden, position_embeddings, attention_mask, past_key_values)
        if done is not None:
            return done
        flat: Tensor = hidden.reshape(-1, hidden.shape[-1])
        normed = self.attention_norm(flat)
        flat = self.attention(normed, flat, len(hidden), position_embeddings, attention_mask, past_key_values)
        flat = self.down(kernels.gate(self.up(self.mlp_norm(flat))), residual=flat)
        return flat.view(hidden.shape)


class OptLayer(nn.Module):
    """LayerNorm before or behind, attention, feed-forward: OPT."""

    def __init__(self, layer: Any) -> None:
        """layer: an OPTDecoderLayer."""
        super().__init__()
        attention = layer.self_attn
        self.attention = _Attention(attention, attention.out_proj, attention.num_heads, attention.num_heads)
        self.up, self.down = joined([layer.fc1]), joined([layer.fc2])
        relu = isinstance(layer.activation_fn, nn.ReLU)
        self.activation = "relu" if relu else "none"  # of the product itself
        self.then = nn.Identity() if relu else layer.activation_fn
        self.norm_first: bool = layer.do_layer_norm_before
        first, second = layer.self_attn_layer_norm, layer.final_layer_norm
        self.attention_norm = Norm(first.weight.detach(), first.bias.detach(), first.eps)
        self.mlp_norm = Norm(second.weight.detach(), second.bias.detach(), second.eps)
        norms = self.attention_norm, self.mlp_norm
        self.native = None
        if relu:
            self.native = _native(self.attention, norms, self.up, self.down, gated=False, norm_first=self.norm_first)

    def forward(
        self, hidden: Tensor, attention_mask: Tensor | None, position_embeddings: Any, past_key_values: Any, **more: Any
    ) -> Tensor:
        """[B, S, E] -> [B, S, E], called as the library's layer."""
        done = _in_one_call(self.native, self.attention.layer, hidden, None, attention_mask, past_key_values)
        if done is not None:
            return done
        flat: Tensor = hidden.reshape(-1, hidden.shape[-1])
        normed = self.attention_norm(flat) if self.norm_first else flat
        flat = self.attention(normed, flat, len(hidden), None, attention_mask, past_key_values)
        if not self.norm_first:
            flat = self.attention_norm(flat)
        normed = self.mlp_norm(flat) if self.norm_first else flat
        wide = self.then(self.up(normed, activation=self.activation))
        flat = self.down(wide, residual=flat)
        if not self.norm_first:
            flat = self.mlp_norm(flat)
        return flat.view(hidden.shape)


def faster(layer: nn.Module) -> LlamaLayer | OptLayer | None:
    """The same layer as one of these; None where there is none for it. Its weights are copied, or shared."""
    if is_opt(layer):
        return OptLayer(layer)
    return LlamaLayer(layer) if is_llama(layer) else None
