"""A cache's buffers as native calls read and write them.

Shapes: R rows, B rows of a pass, L layers, H key/value heads, K slots, D head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from actors.engine.cpu import kernels


class _Buffers(ctypes.Structure):
    """`Buffers` of layer.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("rows", "held", "row", "head")),
    ]


class NativeBuffers:
    """Addresses of the buffers of one cache, which must outlive it."""

    table: Any  # ctypes array [L]

    def attach(self, buffers: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """buffers: each layer's keys and values [R, H, K, D]; None: the layer has none."""
        self.table = (_Buffers * len(buffers))()
        for entry, pair in zip(self.table, buffers, strict=True):
            if pair is not None:
                keys, values = pair
                assert keys.shape == values.shape and keys.is_contiguous() and values.is_contiguous()
                entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
                entry.rows, entry.held, entry.row, entry.head = len(keys), keys.shape[2], keys.stride(0), keys.stride(1)

    def detach(self, layer: int) -> None:
        """A native call that runs this layer fails from here on."""
        self.table[layer].keys = None

    def append(self, keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, slots: Tensor) -> None:
        """Write one token a row, keys and values [B, H, D], to slots [B] int64 of buffers [B, H, K, D]."""
        kernels.append(keys, values, key_buffer, value_buffer, slots)
