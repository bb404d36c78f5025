"""Steps of greedy rows in one native call: greedy.h. Embeddings, layers, the last norm and the screened head.

The calls of each part take longer than the few layers of a draft, and a fifth of a step of a small model.
Shapes: B rows, V vocabulary size, P positions, E hidden size, R rotary size, L layers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.engine.cpu.layers import Norm
from actors.engine.cpu.native_buffers import NativeBuffers
from actors.engine.cpu.native_stack import NativeStack
from actors.engine.cpu.screen import Screen

Tables = tuple[Tensor, Tensor] | None  # cosines and sines [P, R] by position


class Announced(Protocol):
    """A cache that has announced a step."""

    @property
    def kernels(self) -> object:
        """`NativeBuffers`."""
        ...

    def step_slots(self) -> tuple[Tensor, Tensor, int]:
        """Each token's place and slot [B], and how many slots all attend to at most."""
        ...


class _Ends(ctypes.Structure):
    """`Ends` of greedy.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("embeddings", "learned", "cosines", "sines", "norm", "norm_bias")),
        *((name, ctypes.c_void_p) for name in ("head", "packed", "norms")),
        *((name, ctypes.c_int64) for name in ("embedded", "positions", "rotary", "outputs", "most")),
        ("epsilon", ctypes.c_float),
    ]


class Ends:
    """What lies before a model's first layer and behind its last, in bfloat16.

    Attributes:
        positions: P; a further position is taken for the last one.
        fields: a ctypes structure with the parts' addresses, which must not outlive this object.
    """

    fields: Any

    def __init__(self, tokens: Tensor, learned: Tensor | None, rotary: Tables, norm: Norm, screen: Screen) -> None:
        """
        Args:
            tokens: embeddings [V, E].
            learned: embeddings [P or more, E] that are added by position, or None.
            rotary: cosines and sines [P, R] by position, or None.
            norm: between the last layer and the head.
            screen: of the head.
        """
        tables = (None, None) if rotary is None else rotary
        self._held = parts = tokens, learned, *tables, norm.weight, norm.bias
        for part in parts:
            assert part is None or (part.dtype == torch.bfloat16 and part.is_contiguous())
        size = tokens.shape[1]
        assert norm.weight.shape == (size,) and (learned is None or learned.shape[1] == size)
        lengths = [len(part) for part in (learned, *tables) if part is not None]
        assert rotary is None or rotary[0].shape == rotary[1].shape
        self.positions, self._screen = min(lengths, default=sys.maxsize), screen
        self.fields = _Ends(
            *(None if part is None else part.data_ptr() for part in parts),
            *screen.addresses,
            *(len(tokens), self.positions, 0 if rotary is None else rotary[0].shape[1], screen.outputs, screen.most),
            norm.eps,
        )


class GreedySteps:
    """Of one model; for one thread at a time.

    Args:
        stack: all layers.
        embeddings: by token [V, E], and by position [P or more, E] or None; the sum enters the first layer.
        rotary: number of positions -> their tables.
        norm: between the last layer and the head.
        screen: of the head.
        decide: hidden states [N, E] behind the norm -> tokens [N], where the screen decides nothing.
        context_length: a position behind it is taken for its last.
    """

    def __init__(
        self,
        stack: NativeStack,
        embeddings: tuple[Tensor, Tensor | None],
        rotary: Callable[[int], Tables],
        norm: Norm,
        screen: Screen,
        decide: Callable[[Tensor], Tensor],
        context_length: int,
    ) -> None:
        self._stack, self._rotary, self._norm, self._screen, self._decide = stack, rotary, norm, screen, decide
        self._embeddings = [None if part is None else part.detach() for part in embeddings]
        self._context_length = context_length
        self._ends = self._with(1)

    def __call__(
        self,
        tokens: Sequence[int],
        rows_per_layer: Sequence[int],
        cache: Announced,
        *,
        count: int = 1,
        shared: bool = False,
    ) -> list[list[int]]:
        """`count` steps: tokens [count][B], each the likeliest one behind the last, as `Decoder.step` and
        `Decoder.likeliest` find them; -1 in all but the last step where the head's screen decides nothing, and in the
        last where logits are not numbers.

        Args:
            tokens: [B], input of the first step, which the cache has announced.
            rows_per_layer: [L], of each step, see `Decoder.step`.
            shared: whether rows may share a place: several tokens of one row, as in `Decoder.steps`; for one step.
        """
        buffers, (places, slots, width) = cache.kernels, cache.step_slots()
        assert isinstance(buffers, NativeBuffers) and not (shared and count > 1)
        last = min(width + count - 1, self._context_length)
        if self._ends.positions < last:
            self._ends = self._with(min(self._context_length, 1 << last.bit_length()))
        parts = self._ends.fields, tokens, rows_per_layer, places, slots, width, buffers
        found, candidates, normed = self._stack.greedy_steps(*parts, count=count, shared=shared)
        self._screen.count(found[-1], candidates)
        undecided = [row for row, token in enumerate(found[-1]) if token < 0]
        if undecided:
            for row, token in zip(undecided, self._decide(normed[undecided]).tolist(), strict=True):
                found[-1][row] = token
        return found

    def _with(self, positions: int) -> Ends:
        tokens, learned = self._embeddings
        assert tokens is not None
        return Ends(tokens, learned, self._rotary(positions), self._norm, self._screen)
