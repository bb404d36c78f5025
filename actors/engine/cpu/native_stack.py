"""All layers of a step as one native call, `run_steps` of layer.h: each over the youngest rows, as many as it runs for.

Shapes: B rows, L layers, E hidden size, H key/value heads, K slots, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engine.cpu.library import kernel
from actors.engine.cpu.native_layer import LayerFields, NativeLayer, StepFields, turns_of


class _Buffers(ctypes.Structure):
    """`Buffers` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("held", "row", "head")),
    ]


def buffer_table(buffers: Sequence[tuple[Tensor, Tensor] | None]) -> Any:
    """Addresses of L layers' keys and values [R, H, K, D], for `NativeStack.step`; they must outlive it."""
    table = (_Buffers * len(buffers))()
    for entry, pair in zip(table, buffers, strict=True):
        if pair is not None:
            keys, values = pair
            assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
            entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
            entry.held, entry.row, entry.head = keys.shape[2], keys.stride(0), keys.stride(1)
    return table


class NativeStack:
    """L layers of one shape, over keys without windows. For one thread at a time."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self._held = list(layers)  # by address alone otherwise
        self._layers = (LayerFields * len(layers))(*(layer.fields for layer in layers))
        names = ("hidden", "heads", "group", "size", "intermediate", "gated")
        assert all(getattr(layer.fields, name) == getattr(layers[0].fields, name) for layer in layers for name in names)
        self._hidden, self._head_dim = layers[0].fields.hidden, layers[0].fields.size
        self._step, self._counts = StepFields(), (ctypes.c_int64 * len(layers))()
        self._run = kernel("layers_step", torch.bfloat16)

    def step(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        rows_per_layer: Sequence[int],
        slots: Tensor,
        seen: Tensor | None,
        width: int,
        table: Any,
    ) -> Tensor:
        """hidden [B, 1, E], bfloat16 -> [B, 1, E], in its place; rotary: cosines and sines [B, 1, D].

        rows_per_layer: [L], of the youngest rows. slots: int64 [B], of the new tokens. seen: bool [B, 1, 1, K], the
        slots a row attends to, without gaps; None: all of K = `width`. table: of the rows' buffers.
        """
        rows, step = len(hidden), self._step
        assert hidden.shape == (rows, 1, self._hidden) and hidden.is_contiguous() and hidden.dtype == torch.bfloat16
        assert slots.dtype == torch.int64 and slots.shape == (rows,) and slots.is_contiguous()
        assert len(rows_per_layer) == len(self._held) == len(table) and max(rows_per_layer) <= rows
        assert not torch.is_grad_enabled()
        self._counts[:] = list(rows_per_layer)
        step.hidden = step.out = hidden.data_ptr()
        step.slots, step.rows, step.width = slots.data_ptr(), rows, width
        turns = turns_of(rotary, hidden, self._head_dim)
        step.cosines, step.sines = (None, None) if turns is None else (turns[0].data_ptr(), turns[1].data_ptr())
        step.seen, step.seen_row = None, 0
        if seen is not None:
            assert seen.dtype == torch.bool and seen.shape == (rows, 1, 1, width) and seen.is_contiguous()
            step.seen, step.seen_row = seen.data_ptr(), width
        held = self._held[0].step_room(rows)
        step.room = held.data_ptr()
        parts = self._layers, table, self._counts, step
        inside = self._run(*(ctypes.addressof(one) for one in parts), len(self._held))
        assert inside, "a slot lies outside the buffers, or there are none"
        return hidden
