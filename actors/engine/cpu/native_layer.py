"""A decoder layer over one new token a row as one native call, `layer.h`: what its parts compute, without their calls.

Between two products of a small model, finding the next one takes longer than running it.
Shapes: B rows, E hidden size, H key/value heads, K slots, D head size.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.cpu import kernels
from actors.engine.cpu.library import kernel
from actors.engine.cpu.packing import PanelProduct


class _Layer(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name + end, ctypes.c_void_p) for name in ("qkv", "output", "up", "down") for end in ("", "_bias")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "group", "size", "intermediate")),
        *((name, ctypes.c_int64) for name in ("gated", "norm_first")),
        *((name, ctypes.c_float) for name in ("attention_epsilon", "mlp_epsilon", "scale")),
    ]


class _Step(ctypes.Structure):
    """`Step` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "out", "cosines", "sines", "keys", "values", "slots", "seen")),
        *((name, ctypes.c_int64) for name in ("rows", "held", "buffer_row", "buffer_head", "first", "width")),
        ("seen_row", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Place:
    """Where a step's tokens are written and what they attend to: buffers [B, H, K, D] of one layout, slots [B] int64
    of the new tokens, and slots first ... width - 1 to attend to."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    first: int
    width: int


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm where there is no bias; both [E]."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, E]."""
        return kernels.normalize(hidden, self.weight, self.bias, self.epsilon)


class NativeLayer:
    """Weights of a layer, in bfloat16, where a step finds them; norm_first: before the products, not behind the
    residual; gated: silu(gate) * up, else relu(up)."""

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        products: tuple[PanelProduct, PanelProduct, PanelProduct, PanelProduct],
        *,
        heads: tuple[int, int],
        head_dim: int,
        scaling: float,
        gated: bool,
        norm_first: bool,
    ) -> None:
        """norms: of attention and feed-forward. products: queries with keys with values, output, up, down.

        heads: of queries, of keys.
        """
        self._held = norms, products  # by address alone otherwise
        parts = [part for norm in norms for part in (norm.weight, norm.bias)]
        parts += [part for product in products for part in (product.packed, product.bias)]
        assert all(part is None or (part.dtype == torch.bfloat16 and part.is_contiguous()) for part in parts)
        hidden, (queries, keys) = len(norms[0].weight), heads
        qkv, output, up, down = products
        assert qkv.outputs == (queries + 2 * keys) * head_dim and output.outputs == down.outputs == hidden
        assert qkv.inputs == up.inputs == hidden and output.inputs == queries * head_dim and queries % keys == 0
        assert up.outputs == down.inputs * (2 if gated else 1)
        self._layer = _Layer(
            *(None if part is None else part.data_ptr() for part in parts),
            *(hidden, keys, queries // keys, head_dim, down.inputs, gated, norm_first),
            *(norms[0].epsilon, norms[1].epsilon, scaling),
        )
        self._step = _Step()
        self._run = kernel("layer", torch.bfloat16)
        self._shape = hidden, keys, head_dim

    def __call__(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, seen: Tensor | None, place: Place
    ) -> Tensor:
        """hidden [B, 1, E] -> [B, 1, E]; rotary: cosines and sines [B, 1, D]; seen: bool [B, 1, 1, K - first]."""
        rows, step, keys = len(hidden), self._step, place.keys
        size, heads, head_dim = self._shape
        assert (
            hidden.shape == (rows, 1, size) and hidden.is_contiguous() and hidden.dtype == keys.dtype == torch.bfloat16
        )
        assert keys.shape == place.values.shape == (rows, heads, keys.shape[2], head_dim)
        assert keys.stride() == place.values.stride() and keys.stride()[2:] == (head_dim, 1)
        assert place.slots.dtype == torch.int64 and len(place.slots) == rows and place.slots.is_contiguous()
        assert 0 <= place.first < place.width <= keys.shape[2] and not torch.is_grad_enabled()
        output = torch.empty_like(hidden)
        step.hidden, step.out = hidden.data_ptr(), output.data_ptr()
        if rotary is not None:
            rotary = rotary[0].expand(rows, 1, head_dim).contiguous(), rotary[1].expand(rows, 1, head_dim).contiguous()
            assert rotary[0].dtype == rotary[1].dtype == torch.bfloat16
            step.cosines, step.sines = rotary[0].data_ptr(), rotary[1].data_ptr()
        step.keys, step.values, step.slots = keys.data_ptr(), place.values.data_ptr(), place.slots.data_ptr()
        step.rows, step.held, step.buffer_row, step.buffer_head = rows, keys.shape[2], keys.stride(0), keys.stride(1)
        step.first, step.width = place.first, place.width
        step.seen, step.seen_row = None, 0
        if seen is not None:
            assert seen.dtype == torch.bool and seen.shape == (rows, 1, 1, place.width - place.first)
            step.seen, step.seen_row = seen.data_ptr(), seen.stride(0)
            assert seen.stride(3) == 1 or seen.shape[3] == 1
        inside = self._run(ctypes.addressof(self._layer), ctypes.addressof(step))
        assert inside, "a slot lies outside the buffers"
        return output
