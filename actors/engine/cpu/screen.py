"""The likeliest token of a vocabulary head without all of its logits.

The head is never skipped, and at high speeds it is half of a step. A product in 8 bits, of half the time, bounds every
logit; only those that may be the highest are computed in bfloat16, to the same bits as the whole product has: screen.h.
Shapes: N rows, V vocabulary size, E hidden size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from actors.engine.cpu import huge_pages
from actors.engine.cpu.library import PANEL, kernel, quantizes
from actors.engine.cpu.products import pack_codes, quantize_weight
from actors.engine.cpu.stack import structure
from actors.engine.model.layer_weights import NormWeights

PANELS_AT_ONCE = 64  # whose numbers exist in float64
UNDECIDED = 8  # a row with more candidates than 1/8 of the vocabulary takes the whole head

_Screen = structure("norm norm_bias weight packed norms", "inputs outputs most", "epsilon")


class Screen:
    """Hidden states -> their likeliest tokens.

    Attributes:
        rows: Rows that were screened since the start.
        candidates: Logits that were computed for them.
        undecided: Rows that need the whole head.
    """

    def __init__(self, weight: Tensor, norm: NormWeights) -> None:
        """weight: [V, E] bfloat16, of the head; it is shared. norm: before the head. Requires `can_screen`."""
        weight = weight.detach()
        packed, norms = zip(*map(_bounded, weight.split(PANEL * PANELS_AT_ONCE)), strict=True)
        self._held = norm.weight, norm.bias, weight, huge_pages.moved(torch.cat(packed)), torch.cat(norms)
        assert all(part is None or part.is_contiguous() for part in self._held)
        addresses = (None if part is None else part.data_ptr() for part in self._held)
        self._fields = _Screen(*addresses, weight.shape[1], len(weight), len(weight) // UNDECIDED, norm.eps)
        self.rows = self.candidates = self.undecided = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, E] before the norm -> tokens [N], the first of equally likely ones; -1: not decided."""
        hidden = hidden.contiguous()
        rows, size = hidden.shape
        assert hidden.dtype == torch.bfloat16 and size == self._fields.inputs
        found = torch.empty(2, rows, dtype=torch.int64)  # tokens, candidates
        addresses = hidden.data_ptr(), found[0].data_ptr(), found[1].data_ptr()
        kernel("likeliest", hidden.dtype)(ctypes.byref(self._fields), *addresses, rows)
        self.rows += rows
        self.candidates += int(found[1].sum())
        self.undecided += int((found[0] < 0).sum())
        return found[0]


def _bounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the packed panels of weight [v, E], and upper bounds of |w| and |w - w'| [panels, 2, 48] in float32."""
    codes, scales = quantize_weight(weight)
    whole = weight.double()
    rounded = codes[:, : weight.shape[1]].double() * scales.double()[:, None]
    norms = torch.stack([whole.norm(dim=1), (whole - rounded).norm(dim=1)], dim=1) * (1 + 1e-6)
    padded = torch.nn.functional.pad(norms, (0, 0, 0, -len(norms) % PANEL))
    return pack_codes(codes, scales), padded.view(-1, PANEL, 2).transpose(1, 2).float()


def can_screen(weight: Tensor) -> bool:
    """Return whether the CPU has the kernel for a head's weight [V, E]: finite and contiguous."""
    return (
        quantizes(weight.dtype, weight.device)
        and weight.is_contiguous()
        and weight.shape[1] % 2 == 0
        and bool(weight.isfinite().all())
    )
