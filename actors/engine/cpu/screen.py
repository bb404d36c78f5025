"""The likeliest token of a vocabulary head without all of its logits.

The head is never skipped, and at high speeds it is half of a step. A product in 8 bits, of half the time, bounds every
logit; only those that may be the highest are computed in bfloat16, to the same bits as the whole product has: screen.h.
Shapes: N rows, V vocabulary size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engine.cpu import huge_pages, library
from actors.engine.cpu.kernels import PANEL
from actors.engine.cpu.quantization import pack, quantize_weight

PANELS_AT_ONCE = 64  # whose numbers exist in float64
UNDECIDED = 8  # a row with more candidates than 1/8 of the vocabulary takes the whole head


class Screen:
    """Hidden states -> their likeliest tokens.

    Attributes:
        outputs: V.
        most: candidates of a row that is decided.
        addresses: of the weight, its packed panels and their norms, for the kernel.
        rows: that were screened since the start.
        candidates: logits that were computed for them.
        undecided: rows that need the whole head.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight [V, E] bfloat16, of the head; it is shared. Requires `can_screen`."""
        self._weight = weight.detach()
        packed, norms = zip(*map(_bounded, self._weight.split(PANEL * PANELS_AT_ONCE)), strict=True)
        self._packed, self._norms = huge_pages.moved(torch.cat(packed)), torch.cat(norms)
        self.outputs, self.most = len(self._weight), len(self._weight) // UNDECIDED
        self.addresses = self._weight.data_ptr(), self._packed.data_ptr(), self._norms.data_ptr()
        self.rows = self.candidates = self.undecided = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, E] behind the final norm -> tokens [N], the first of equally likely ones; -1: not decided."""
        hidden = hidden.contiguous()
        rows, size = hidden.shape
        assert hidden.dtype == torch.bfloat16 and size == self._weight.shape[1]
        tokens, candidates = (torch.empty(rows, dtype=torch.int64) for _ in range(2))
        addresses = hidden.data_ptr(), *self.addresses, tokens.data_ptr(), candidates.data_ptr()
        library.kernel("likeliest", hidden.dtype)(*addresses, rows, size, self.outputs, self.most)
        self.count(tokens.tolist(), candidates.tolist())
        return tokens

    def count(self, tokens: Sequence[int], candidates: Sequence[int]) -> None:
        """Count screened rows; both [N], as the kernel has returned them."""
        self.rows += len(tokens)
        self.candidates += sum(candidates)
        self.undecided += sum(token < 0 for token in tokens)


def _bounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of weight [v, E]: its packed panels, and |w| and |w - w'| of each output [panels, 2, 48] in float32, at least."""
    codes, scales = quantize_weight(weight)
    whole = weight.double()
    rounded = codes[:, : weight.shape[1]].double() * scales.double()[:, None]
    norms = torch.stack([whole.norm(dim=1), (whole - rounded).norm(dim=1)], dim=1) * (1 + 1e-6)
    padded = torch.nn.functional.pad(norms, (0, 0, 0, -len(norms) % PANEL))
    return pack(codes, scales), padded.view(-1, PANEL, 2).transpose(1, 2).float()


def can_screen(weight: Tensor) -> bool:
    """Whether the CPU has the kernel for a head's weight [V, E]: finite and contiguous."""
    return (
        library.quantizes(weight.dtype, weight.device)
        and weight.is_contiguous()
        and weight.shape[1] % 2 == 0
        and bool(weight.isfinite().all())
    )
