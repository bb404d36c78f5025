"""All layers of a step, or one layer over whole prompts, as one native call: layer.h.

Between two products of a small model, finding the next one takes longer than running it; and memory that is allocated
for every product is cleared page by page before it is written.
Shapes: B rows of a call, R rows of the buffers, P prompts, N tokens of all prompts, L layers, E hidden size, H
key/value heads, K slots, D head size, and of rotary tables R numbers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from actors.engine.cpu import huge_pages, kernels, library
from actors.engine.cpu.kernels import PackedPrefix
from actors.engine.cpu.layers import CpuLayer
from actors.engine.cpu.library import kernel
from actors.engine.cpu.native_buffers import NativeBuffers
from actors.engine.cpu.packing import PanelProduct, Product
from actors.engine.cpu.quantization import QuantizedProduct

KEPT = 2**28  # bytes of workspace that are kept from call to call; more is given back
_local = threading.local()


class _Layer(ctypes.Structure):
    """`Layer` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name, ctypes.c_void_p) for name in ("query_norm", "key_norm")),
        *((name + end, ctypes.c_void_p) for name in ("qkv", "output", "up", "down") for end in ("", "_bias")),
        *((name, ctypes.c_int64) for name in ("hidden", "heads", "group", "size", "intermediate")),
        *((name, ctypes.c_int64) for name in ("gated", "placement", "joined_heads", "rope", "window", "quantized")),
        *((name, ctypes.c_float) for name in ("attention_epsilon", "mlp_epsilon", "head_epsilon", "scale")),
    ]


class _Step(ctypes.Structure):
    """`Step` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("hidden", "cosines", "sines", "keys", "values", "places", "slots")),
        ("workspace", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rotary", "rows", "held", "buffer_row", "buffer_head", "width")),
        ("shared", ctypes.c_int64),
    ]


class _Prompts(ctypes.Structure):
    """`Prompts` of layer.h."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("hidden", "cosines", "sines", "keys", "values", "starts", "places", "sources", "workspace")
        ),
        *((name, ctypes.c_void_p) for name in ("prefix_keys", "prefix_values")),
        *((name, ctypes.c_int64) for name in ("prefix_tokens", "rotary", "prompts", "rows", "buffer_row")),
        ("buffer_head", ctypes.c_int64),
    ]


class SharedPrefix(Protocol):
    """Keys and values [1, H, C, D] by layer, of C tokens that many prompts begin with."""

    layers: dict[int, tuple[Tensor, Tensor]]


class NativeStack:
    """L layers of one shape. For one thread at a time."""

    def __init__(self, layers: Sequence[CpuLayer]) -> None:
        """layers: all that `can_stack`; their weights are shared, and moved to huge pages."""
        huge_pages.move(_packed(product) for layer in layers for product in _products(layer))
        self._held = list(layers)  # the structures hold addresses alone
        self._layers = (_Layer * len(layers))(*map(_fields, layers))
        first = self._layers[0]
        names = ("hidden", "heads", "group", "size", "intermediate", "gated")
        assert all(getattr(fields, name) == getattr(first, name) for fields in self._layers for name in names)
        self._hidden, self._heads, self._head_dim = first.hidden, first.heads, first.size
        self.joins_prompts = all(layer.window is None for layer in layers)  # prompts' attention knows no windows
        self._step, self._prompts = _Step(), _Prompts()
        self._counts = (ctypes.c_int64 * len(layers))()
        self._packed: WeakKeyDictionary[SharedPrefix, dict[int, PackedPrefix]] = WeakKeyDictionary()
        self._run_step = kernel("layers_step", torch.bfloat16)
        self._run_prompts = kernel("layer_prompts", torch.bfloat16)
        can_screen = library.quantizes(torch.bfloat16, torch.device("cpu"))
        self._run_greedy = kernel("greedy_steps", torch.bfloat16) if can_screen else None
        self._step_workspace = kernel("step_workspace", torch.bfloat16)
        self._prompts_workspace = kernel("prompts_workspace", torch.bfloat16)

    def step(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows_per_layer: Sequence[int],
        places: Tensor,
        slots: Tensor,
        width: int,
        buffers: NativeBuffers,
        *,
        shared: bool = False,
    ) -> Tensor:
        """One token of every row through all layers.

        Args:
            hidden: bfloat16 [B, 1, E], overwritten by the result.
            rotary: cosines and sines [B, 1, R], or None.
            rows_per_layer: [L], how many of the youngest rows run each layer.
            places: int64 [B], of the rows in the buffers.
            slots: int64 [B], of the new tokens, the last that they attend to.
            width: the highest of the slots, plus 1.
            buffers: of the rows' keys and values.
            shared: whether rows may have the same place: several tokens of one row.
        """
        rows, step = len(hidden), self._step
        assert hidden.shape == (rows, 1, self._hidden) and hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        self._describe(rows, rows_per_layer, places, slots, width, buffers, shared)
        step.hidden = hidden.data_ptr()
        tables = self._rotary(step, rotary, hidden)
        workspace = _workspace(self._step_workspace(ctypes.addressof(self._layers), rows))
        step.workspace = workspace.data_ptr()
        parts = self._layers, buffers.table, self._counts, step
        inside = self._run_step(*(ctypes.addressof(part) for part in parts), len(self._held))
        assert inside, "a place or a slot lies outside the buffers, or there are none"
        del tables  # alive until here: the structure holds addresses alone
        return hidden

    def greedy_steps(
        self,
        ends: Any,
        tokens: Sequence[int],
        rows_per_layer: Sequence[int],
        places: Tensor,
        slots: Tensor,
        width: int,
        buffers: NativeBuffers,
        *,
        count: int = 1,
        shared: bool = False,
    ) -> tuple[list[list[int]], Sequence[int], Tensor]:
        """Steps of every row, each token the likeliest one behind the last; bit by bit those of `step`.

        Args:
            ends: `Ends` of greedy.h, with all positions up to the last slot's, but those behind the model's context.
            tokens: [B], the first step's input.
            rows_per_layer, places, buffers, shared: see `step`.
            slots, width: of the first step. Slots are positions.
            count: of steps.

        Returns:
            Tokens [count][B], -1 where the head's screen decides nothing; a step behind such a token is of no use. Of
            the last step [B] how many logits were computed, and the hidden states [B, E] behind the norm.
        """
        rows, step = len(tokens), self._step
        self._describe(rows, rows_per_layer, places, slots, width, buffers, shared)
        workspace = _workspace(self._step_workspace(ctypes.addressof(self._layers), rows))
        step.workspace = workspace.data_ptr()
        normed = torch.empty(rows, self._hidden, dtype=torch.bfloat16)
        found = (ctypes.c_int64 * ((count + 1) * rows))(*tokens)
        candidates = (ctypes.c_int64 * rows)()
        parts = self._layers, buffers.table, self._counts, step, ends
        addresses = [ctypes.addressof(part) for part in parts]
        addresses += normed.data_ptr(), ctypes.addressof(found), ctypes.addressof(candidates)
        assert self._run_greedy is not None, "no kernel screens a head"
        inside = self._run_greedy(*addresses, len(self._held), count)
        assert inside, "a token, a place or a slot lies outside the tables and buffers, or there are none"
        return [found[first : first + rows] for first in range(rows, len(found), rows)], candidates[:], normed

    def _describe(
        self,
        rows: int,
        rows_per_layer: Sequence[int],
        places: Tensor,
        slots: Tensor,
        width: int,
        buffers: NativeBuffers,
        shared: bool,
    ) -> None:
        """Write what both kinds of steps share; arguments as in `step`."""
        for one in (places, slots):
            assert one.dtype == torch.int64 and one.shape == (rows,) and one.is_contiguous()
        assert len(rows_per_layer) == len(self._held) == len(buffers.table) and max(rows_per_layer) <= rows
        assert not torch.is_grad_enabled()
        self._counts[:] = list(rows_per_layer)
        step = self._step
        step.places, step.slots = places.data_ptr(), slots.data_ptr()
        step.rows, step.width, step.shared = rows, width, shared

    def prompts(
        self,
        layer: int,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        starts: Tensor,
        places: Tensor,
        sources: Tensor,
        buffers: tuple[Tensor, Tensor] | None,
        prefix: SharedPrefix | None = None,
    ) -> Tensor:
        """One layer over prompts one behind another.

        Args:
            layer: its index.
            hidden: bfloat16 [1, N, E], overwritten by the result.
            rotary: cosines and sines [1, N, R], or None.
            starts: int64 [P + 1], the first token of each prompt, and N.
            places: int64 [B], of the rows in the buffers.
            sources: int64 [B], the prompt of each row.
            buffers: [R, H, K, D] of one layout, for the rows' keys and values behind those of the prefix; None: they
                are not kept.
            prefix: what all prompts begin with; the buffers hold it already.
        """
        prompts, fields = self._prompts, self._layers[layer]
        assert self.joins_prompts and len(hidden) == 1 and int(starts[-1]) == hidden.shape[1]
        assert hidden.shape[2] == self._hidden and hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        assert all(one.dtype == torch.int64 and one.is_contiguous() for one in (starts, places, sources))
        assert places.shape == sources.shape
        assert not torch.is_grad_enabled()
        prompts.hidden, prompts.starts = hidden.data_ptr(), starts.data_ptr()
        prompts.places, prompts.sources = places.data_ptr(), sources.data_ptr()
        prompts.prompts, prompts.rows = len(starts) - 1, len(sources)
        tables = self._rotary(prompts, rotary, hidden)
        prompts.keys = prompts.values = None
        if buffers is not None:
            keys, values = buffers
            assert keys.shape == values.shape == (len(keys), self._heads, keys.shape[2], self._head_dim)
            assert int(places.max()) < len(keys)
            assert keys.stride() == values.stride() and keys.stride()[2:] == (self._head_dim, 1)
            assert keys.dtype == values.dtype == hidden.dtype
            prompts.keys, prompts.values = keys.data_ptr(), values.data_ptr()
            prompts.buffer_row, prompts.buffer_head = keys.stride()[:2]
        prompts.prefix_keys, prompts.prefix_values, prompts.prefix_tokens = None, None, 0
        if prefix is not None:
            packed = self._packed_prefix(prefix, layer)
            assert packed.keys.shape[:2] == (self._heads, self._head_dim)
            prompts.prefix_keys, prompts.prefix_values = packed.keys.data_ptr(), packed.values.data_ptr()
            prompts.prefix_tokens = packed.tokens
        parts = ctypes.addressof(fields), ctypes.addressof(prompts)
        workspace = _workspace(self._prompts_workspace(*parts))
        prompts.workspace = workspace.data_ptr()
        self._run_prompts(*parts)
        del tables  # alive until here: the structure holds addresses alone
        return hidden

    def _packed_prefix(self, prefix: SharedPrefix, layer: int) -> PackedPrefix:
        """A layer's prefix in the kernels' order; packed once, and kept as long as the prefix."""
        layers = self._packed.setdefault(prefix, {})
        if layer not in layers:
            layers[layer] = PackedPrefix.of(*prefix.layers[layer])
        return layers[layer]

    def _rotary(self, target: Any, rotary: tuple[Tensor, Tensor] | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """Write the addresses of cosines and sines, for hidden states [B, S, E]; the tensors that must stay alive."""
        if rotary is None:
            assert not any(layer.attention.rope for layer in self._held)
            target.cosines = target.sines = None
            target.rotary = 0
            return ()
        size = rotary[0].shape[-1]
        assert size <= self._head_dim and size % 2 == 0 and rotary[1].shape == rotary[0].shape
        cosines, sines = (table.expand(*hidden.shape[:2], size).contiguous() for table in rotary)
        assert cosines.dtype == sines.dtype == torch.bfloat16
        target.cosines, target.sines, target.rotary = cosines.data_ptr(), sines.data_ptr(), size
        return cosines, sines


def can_stack(layer: object) -> bool:
    """Whether layer.h can compute a layer: by packed products, with the activations that it knows."""
    if not isinstance(layer, CpuLayer):
        return False
    attention, mlp, products = layer.attention, layer.feed_forward, _products(layer)
    packed = all(isinstance(one, PanelProduct) for one in products)
    quantized = all(isinstance(one, QuantizedProduct) and one.native for one in products)
    return (packed or quantized) and (mlp.gated or mlp.relu) and attention.head_dim % 2 == 0


def _fields(layer: CpuLayer) -> _Layer:
    attention, mlp = layer.attention, layer.feed_forward
    qkv, output, up, down = map(_packed, _products(layer))
    norms = layer.attention_norm, layer.mlp_norm
    head_norms = attention.query_norm, attention.key_norm
    parts = [part for norm in norms for part in (norm.weight, norm.bias)]
    parts += [None if norm is None else norm.weight for norm in head_norms]
    for product in (qkv, output, up, down):
        assert type(product) is type(qkv)
        parts += [product.packed, product.bias]
    assert all(part is None or part.is_contiguous() for part in parts)
    assert all(part is None or part.dtype in (torch.bfloat16, torch.uint8) for part in parts)
    hidden, queries, keys, size = len(norms[0].weight), attention.query_heads, attention.kv_heads, attention.head_dim
    assert qkv.outputs == (queries + 2 * keys) * size and output.outputs == down.outputs == hidden
    assert qkv.inputs == up.inputs == hidden and output.inputs == queries * size and queries % keys == 0
    assert up.outputs == down.inputs * (2 if mlp.gated else 1) and size <= kernels.LARGEST_HEAD
    query_norm = attention.query_norm
    return _Layer(
        *(None if part is None else part.data_ptr() for part in parts),
        *(hidden, keys, queries // keys, size, down.inputs, mlp.gated, int(layer.placement)),
        query_norm is not None and len(query_norm.weight) != size,
        *(attention.rope, layer.window or 0, isinstance(qkv, QuantizedProduct)),
        *(norms[0].eps, norms[1].eps, 0.0 if query_norm is None else query_norm.eps, attention.scaling),
    )


def _products(layer: CpuLayer) -> tuple[Product, ...]:
    return layer.attention.qkv, layer.attention.output, layer.feed_forward.up, layer.feed_forward.down


def _packed(product: Product) -> PanelProduct | QuantizedProduct:
    """A product that `can_stack` has found packed."""
    assert isinstance(product, PanelProduct | QuantizedProduct)
    return product


def _workspace(numbers: int) -> Tensor:
    """Memory for intermediate results [numbers], the same for all layers that a thread runs."""
    kept: Tensor | None = getattr(_local, "kept", None)
    if kept is None or len(kept) < numbers:
        _local.kept = kept = None  # free the smaller one before the allocation
        kept = torch.empty(numbers, dtype=torch.bfloat16)
        if kept.nbytes <= KEPT:
            _local.kept = kept
    return kept
