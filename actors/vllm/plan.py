"""Which tokens of a forward pass run a layer, and the attention metadata of those tokens. Imports no vLLM.

Depth never rises along a row, so the tokens that run a layer are the first ones of those that a pass computes for a
request. This holds for decode steps, for chunks of a prompt, and for generated tokens that are recomputed after
preemption. A token of a prompt runs `prompt_depth` layers, generated token t runs ``depths[t]``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

# fields of CommonAttentionMetadata, by what they have one value of
PER_REQUEST = (
    "seq_lens",
    "block_table_tensor",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "rswa_prefix_lens",
    "req_idx",
)
PER_TOKEN = ("slot_mapping", "positions")


@dataclass(frozen=True)
class Subset:
    """The tokens of a pass that run a layer, if not all of them do.

    Args:
        tokens: their indices in the pass, ascending.
        requests: indices of the requests that have such tokens.
        counts: number of such tokens of each of these requests: its first ones in the pass.
        dropped: number of its other tokens in the pass.
    """

    tokens: Tensor
    requests: Tensor
    counts: np.ndarray
    dropped: np.ndarray


class PassPlan:
    """The subset of tokens for each rank of the keep order, of one forward pass.

    Args:
        depths: d(0), d(1), ...
        prompt_depth: layers that a prompt token runs.
        starts: index of the first token of each request, and the number of all tokens: ``query_start_loc``.
        ends: length of each request's sequence after the pass.
        prompts: length of each request's prompt.
    """

    def __init__(
        self,
        depths: np.ndarray,
        prompt_depth: int,
        starts: np.ndarray,
        ends: np.ndarray,
        prompts: np.ndarray,
        device: torch.device,
    ) -> None:
        self.starts, self.ends, self.device = starts, ends, device
        self.queries = np.diff(starts)
        positions = np.arange(starts[-1]) - np.repeat(starts[1:] - ends, self.queries)
        generated = positions - np.repeat(prompts, self.queries)
        self.depths = np.where(generated < 0, prompt_depth, depths[np.clip(generated, 0, len(depths) - 1)])
        self.levels = np.unique(self.depths)
        self._subsets: dict[int, Subset] = {}

    def runs_all(self, rank: int) -> bool:
        """Whether all tokens run the layer of this rank."""
        return rank < int(self.levels[0])

    def subset(self, rank: int) -> Subset | None:
        """The tokens that run the layer of this rank, if not all of them do; None if there are none."""
        level = int(np.searchsorted(self.levels, rank, side="right"))
        if level == len(self.levels):
            return None
        if level not in self._subsets:
            self._subsets[level] = self._make(self.depths >= self.levels[level])
        return self._subsets[level]

    def holes(self, rank: int) -> Tensor:
        """Indices of the tokens that do not run the layer of this rank."""
        return self._to_device(np.flatnonzero(self.depths <= rank))

    def _make(self, runs: np.ndarray) -> Subset:
        counts = np.diff(np.concatenate(([0], np.cumsum(runs)))[self.starts])
        requests = np.flatnonzero(counts)
        return Subset(
            self._to_device(np.flatnonzero(runs)),
            self._to_device(requests),
            counts[requests].astype(np.int32),
            (self.queries - counts)[requests].astype(np.int32),
        )

    def _to_device(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices).to(self.device, non_blocking=True)


def cut_metadata(common: Any, subset: Subset, ends: np.ndarray) -> Any:
    """The CommonAttentionMetadata of a subset of the tokens.

    Args:
        common: that of all tokens.
        ends: see `PassPlan`.

    Raises NotImplementedError that names a field which holds a value and is not known here.
    """
    device = common.seq_lens.device
    dropped, on_host = torch.from_numpy(subset.dropped), subset.requests.cpu()
    starts = torch.zeros(len(subset.counts) + 1, dtype=torch.int32)
    starts[1:] = torch.from_numpy(np.cumsum(subset.counts, dtype=np.int32))
    cut: dict[str, Any] = {
        "query_start_loc_cpu": starts,
        "query_start_loc": starts.to(device, non_blocking=True),
        "num_reqs": len(subset.counts),
        "num_actual_tokens": int(subset.counts.sum()),
        "max_query_len": int(subset.counts.max()),
        "max_seq_len": int((ends[on_host.numpy()] - subset.dropped).max()),
        "causal": common.causal,
    }
    if not isinstance(common.causal, bool):
        raise NotImplementedError("CommonAttentionMetadata.causal is set by request, which SkipDecode does not support")
    for field in fields(common):
        name, value = field.name, getattr(common, field.name)
        if name in cut:
            continue
        if value is None or name.startswith("_"):  # private fields are caches, which are made anew where needed
            cut[name] = None
        elif name in PER_REQUEST:
            if isinstance(value, np.ndarray):
                cut[name] = value[on_host.numpy()]
                continue
            rows = value[: common.num_reqs]
            cut[name] = rows[subset.requests if rows.device == subset.requests.device else on_host.to(rows.device)]
            if name.startswith("seq_lens"):
                cut[name] = cut[name] - dropped.to(rows.device, rows.dtype)
        elif name in PER_TOKEN:
            cut[name] = value[subset.tokens]
        else:
            raise NotImplementedError(f"CommonAttentionMetadata.{name} is set, which SkipDecode does not know")
    return type(common)(**cut)
