"""A pass over prompts: one behind another without padding, their attention, and where their keys and values go.

Shapes: P prompts, N tokens of all of them, Q query heads, H key/value heads, D head size, C tokens of a prefix.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.gpu.pages import PAGE_TOKENS, PagedCache, upload

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]
# what this torch's can be told
_TOLD = set() if varlen_attn is None else set(inspect.signature(varlen_attn).parameters)


class PrefixPages:
    """Keys and values [C, H, D] of a beginning that prompts share, layer by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}


class Prompts:
    """Prompts of one pass, and the rows that have them: several rows may share one.

    lengths: tokens of each prompt in this pass, at least one. rows, sources: places of the rows, and the prompt of
    each. prefix, before: what lies before all prompts, and its tokens C; held_in: where this pass's own keys and values
    are kept, if it is the pass over a prefix.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        sources: Sequence[int],
        device: torch.device,
        *,
        prefix: PrefixPages | None = None,
        before: int = 0,
        held_in: PrefixPages | None = None,
    ) -> None:
        self.lengths = list(lengths)
        self.starts = [0, *itertools.accumulate(lengths)]
        self.prefix, self.before, self.held_in = prefix, before, held_in
        positions = [torch.arange(before, before + length) for length in lengths]
        self.positions = upload(torch.cat(positions), device)
        self.last = upload(torch.tensor(self.starts[1:]) - 1, device)
        # of each token that is kept, row by row: from where in prefix + pass, to which row and place
        picked, owners, places = [], [], []
        for row, source in zip(rows, sources, strict=True):
            own = torch.arange(self.starts[source], self.starts[source + 1]) + before
            picked.append(torch.cat((torch.arange(before), own)))
            owners.append(torch.full((before + lengths[source],), row))
            places.append(torch.arange(before + lengths[source]))
        self._kept = len(rows) > 0
        if self._kept:
            self._picked, self._owners, self._places = (
                upload(torch.cat(one), device) for one in (picked, owners, places)
            )
        self._ends = upload(torch.tensor(self.starts, dtype=torch.int32), device)
        reach = [0, *itertools.accumulate(before + length for length in lengths)]
        self._reach = upload(torch.tensor(reach, dtype=torch.int32), device)
        seen = [
            torch.cat((torch.arange(before), torch.arange(*pair) + before)) for pair in itertools.pairwise(self.starts)
        ]
        self._seen = upload(torch.cat(seen), device) if before else None

    def keep(self, cache: PagedCache | None, layer: int, keys: Tensor, values: Tensor) -> None:
        """keys and values [N, H, D] of this pass into the pages of its rows, behind those of the prefix."""
        if self.held_in is not None:
            self.held_in.layers[layer] = keys.contiguous(), values.contiguous()
        if not self._kept or cache is None or not cache.uses[layer]:
            return
        pages = cache.table[layer][self._owners, self._places // PAGE_TOKENS].long()
        for pool, new, number in ((cache.keys, keys, 0), (cache.values, values, 1)):
            if self.prefix is not None:
                new = torch.cat((self.prefix.layers[layer][number], new))
            pool[pages, :, self._places % PAGE_TOKENS] = new[self._picked]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """queries [N, Q, D] over the keys and values [N, H, D] before them and their own -> [N, Q, D]."""
        if self.prefix is not None:
            shared = self.prefix.layers[layer]
            keys, values = (torch.cat((one, new))[self._seen] for one, new in zip(shared, (keys, values), strict=True))
        if queries.device.type == "cuda" and varlen_attn is not None and queries.dtype != torch.float32:
            return self._by_varlen(queries, keys, values, scaling)
        done = []
        for place, length in enumerate(self.lengths):
            end = self.starts[place + 1] + self.before * (place + 1)
            key, value = (one[end - length - self.before : end].transpose(0, 1)[None] for one in (keys, values))
            asked = queries[self.starts[place] : self.starts[place + 1]].transpose(0, 1)[None]
            mask = None
            if self.before:
                seen = torch.arange(length + self.before, device=queries.device)
                mask = seen <= seen[self.before :, None]
            out = scaled_dot_product_attention(
                asked, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            done.append(out[0].transpose(0, 1))
        return torch.cat(done)

    def _by_varlen(self, queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """By torch's own attention over sequences one behind another; a query sees what lies before it from the end."""
        settings: dict[str, Any] = {"is_causal": True} if "is_causal" in _TOLD else {"window_size": (-1, 0)}
        if "scale" in _TOLD:
            settings["scale"] = scaling
        else:
            queries = queries * (scaling * queries.shape[2] ** 0.5)
        if queries.shape[1] != keys.shape[1]:
            if "enable_gqa" in _TOLD:
                settings["enable_gqa"] = True
            else:
                groups = queries.shape[1] // keys.shape[1]
                keys, values = (one.repeat_interleave(groups, dim=1) for one in (keys, values))
        longest = max(self.lengths)
        out = varlen_attn(queries, keys, values, self._ends, self._reach, longest, longest + self.before, **settings)
        assert isinstance(out, Tensor)
        return out
