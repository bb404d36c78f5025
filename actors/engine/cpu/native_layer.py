"""A decoder layer as one native call, `layer.h`, over one new token a row or over whole prompts.

Between two products of a small model, finding the next one takes longer than running it; and memory that is new at
every product is cleared page by page before it is written.
Shapes: B rows, P prompts, N tokens of all prompts, E hidden size, H key/value heads, K slots, D head size.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.cpu import kernels
from actors.engine.cpu.library import kernel
from actors.engine.cpu.packing import PanelProduct


class LayerFields(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name + end, ctypes.c_void_p) for name in ("qkv", "output", "up", "down") for end in ("", "_bias")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "group", "size", "intermediate")),
        *((name, ctypes.c_int64) for name in ("gated", "norm_first")),
        *((name, ctypes.c_float) for name in ("attention_epsilon", "mlp_epsilon", "scale")),
    ]


class StepFields(ctypes.Structure):
    """`Step` of layer.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "out", "cosines", "sines", "keys", "values", "slots", "seen", "room")
        ),
        *((name, ctypes.c_int64) for name in ("rows", "held", "buffer_row", "buffer_head", "first", "width")),
        ("seen_row", ctypes.c_int64),
    ]


class _Prompts(ctypes.Structure):
    """`Prompts` of layer.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "cosines", "sines", "keys", "values", "starts", "sources", "room")
        ),
        *((name, ctypes.c_void_p) for name in ("prefix_keys", "prefix_values")),
        *((name, ctypes.c_int64) for name in ("prefix_tokens", "prompts", "rows", "buffer_row", "buffer_head")),
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
class PromptPlace:
    """Prompts one behind another, the first token of each and N in starts [P + 1], and where their keys and values are
    written: buffers [B, H, K, D] of one layout, or None; sources [B]: the prompt of each row; both int64. prefix: what
    lies before all of them, in the buffers too already: these begin behind it."""

    starts: Tensor
    sources: Tensor
    buffers: tuple[Tensor, Tensor] | None
    prefix: kernels.PackedPrefix | None = None

    def __post_init__(self) -> None:
        for one in (self.starts, self.sources):
            assert one.dtype == torch.int64 and one.is_contiguous()
        assert self.buffers is None or len(self.buffers[0]) == len(self.sources)


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm where there is no bias; both [E]."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, E] -> [N, E]."""
        return kernels.normalize(hidden, self.weight, self.bias, self.epsilon)


KEPT = 2**28  # bytes of room that is kept from call to call; more is given back
_local = threading.local()


def room(numbers: int) -> Tensor:
    """Memory for what lies between products [numbers], the same for all layers that a thread runs."""
    kept: Tensor | None = getattr(_local, "kept", None)
    if kept is None or len(kept) < numbers:
        _local.kept = kept = None  # what is too small goes before the new comes
        kept = torch.empty(numbers, dtype=torch.bfloat16)
        if kept.nbytes <= KEPT:
            _local.kept = kept
    return kept


def turns_of(rotary: tuple[Tensor, Tensor] | None, hidden: Tensor, head_dim: int) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [B, S, D] without strides, of hidden states [B, S, E]."""
    if rotary is None:
        return None
    cosines, sines = (one.expand(*hidden.shape[:2], head_dim).contiguous() for one in rotary)
    assert cosines.dtype == sines.dtype == torch.bfloat16
    return cosines, sines


class NativeLayer:
    """Weights of a layer, in bfloat16, where a step finds them; norm_first: before the products, not behind the
    residual; gated: silu(gate) * up, else relu(up). For one thread at a time."""

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
        self.fields = LayerFields(
            *(None if part is None else part.data_ptr() for part in parts),
            *(hidden, keys, queries // keys, head_dim, down.inputs, gated, norm_first),
            *(norms[0].epsilon, norms[1].epsilon, scaling),
        )
        self._step, self._prompts = StepFields(), _Prompts()
        self._run_step = kernel("layer_step", torch.bfloat16)
        self._run_prompts = kernel("layer_prompts", torch.bfloat16)
        self._step_room = kernel("step_room", torch.bfloat16)
        self._prompts_room = kernel("prompts_room", torch.bfloat16)
        self._shape = hidden, keys, head_dim
        assert head_dim <= kernels.LARGEST_HEAD

    def step(self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, seen: Tensor | None, place: Place) -> Tensor:
        """hidden [B, 1, E] -> [B, 1, E]; rotary: cosines and sines [B, 1, D]; seen: bool [B, 1, 1, K - first]."""
        rows, step = len(hidden), self._step
        assert hidden.shape[1] == 1 and 0 <= place.first < place.width <= place.keys.shape[2]
        assert place.slots.dtype == torch.int64 and len(place.slots) == rows and place.slots.is_contiguous()
        turns = self._check(hidden, rotary, (place.keys, place.values), rows)
        output = torch.empty_like(hidden)
        step.hidden, step.out = hidden.data_ptr(), output.data_ptr()
        step.cosines, step.sines = (None, None) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
        step.keys, step.values, step.slots = place.keys.data_ptr(), place.values.data_ptr(), place.slots.data_ptr()
        step.rows, step.held, step.first, step.width = rows, place.keys.shape[2], place.first, place.width
        step.buffer_row, step.buffer_head = place.keys.stride()[:2]
        step.seen, step.seen_row = None, 0
        if seen is not None:
            assert seen.dtype == torch.bool and seen.shape == (rows, 1, 1, place.width - place.first)
            assert seen.stride(3) == 1 or seen.shape[3] == 1
            step.seen, step.seen_row = seen.data_ptr(), seen.stride(0)
        held = self.step_room(rows)
        step.room = held.data_ptr()
        inside = self._run_step(ctypes.addressof(self.fields), ctypes.addressof(step))
        assert inside, "a slot lies outside the buffers"
        return output

    def step_room(self, rows: int) -> Tensor:
        """Room for a step of so many rows."""
        return room(self._step_room(ctypes.addressof(self.fields), rows))

    def prompts(self, hidden: Tensor, rotary: tuple[Tensor, Tensor] | None, place: PromptPlace) -> Tensor:
        """hidden [1, N, E] -> [1, N, E], in its place; rotary: cosines and sines [1, N, D]."""
        prompts = self._prompts
        assert len(hidden) == 1 and int(place.starts[-1]) == hidden.shape[1]
        turns = self._check(hidden, rotary, place.buffers, len(place.sources))
        prompts.hidden = hidden.data_ptr()
        prompts.cosines, prompts.sines = (None, None) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
        prompts.starts, prompts.sources = place.starts.data_ptr(), place.sources.data_ptr()
        prompts.prompts, prompts.rows = len(place.starts) - 1, len(place.sources)
        prompts.keys = prompts.values = None
        if place.buffers is not None:
            prompts.keys, prompts.values = (buffer.data_ptr() for buffer in place.buffers)
            prompts.buffer_row, prompts.buffer_head = place.buffers[0].stride()[:2]
        prompts.prefix_keys, prompts.prefix_values, prompts.prefix_tokens = None, None, 0
        if place.prefix is not None:
            assert place.prefix.keys.shape[:2] == (self._shape[1], self._shape[2])
            prompts.prefix_keys, prompts.prefix_values = place.prefix.keys.data_ptr(), place.prefix.values.data_ptr()
            prompts.prefix_tokens = place.prefix.tokens
        held = room(self._prompts_room(ctypes.addressof(self.fields), ctypes.addressof(prompts)))
        prompts.room = held.data_ptr()
        self._run_prompts(ctypes.addressof(self.fields), ctypes.addressof(prompts))
        return hidden

    def _check(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        buffers: tuple[Tensor, Tensor] | None,
        rows: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines [B, S, D] without strides, of hidden states [B, S, E]."""
        size, heads, head_dim = self._shape
        assert hidden.shape[2] == size and hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        assert not torch.is_grad_enabled()
        if buffers is not None:
            keys, values = buffers
            assert keys.shape == values.shape == (rows, heads, keys.shape[2], head_dim) and keys.dtype == values.dtype
            assert keys.stride() == values.stride() and keys.stride()[2:] == (head_dim, 1)
            assert keys.dtype == hidden.dtype
        return turns_of(rotary, hidden, head_dim)
