"""Finds which tokens of a forward pass run a layer, and makes attention metadata of these tokens. Imports no vLLM.

A prompt token runs `prompt_depth` layers, and generated token t runs ``depths[t]`` layers. Depth never rises along a
row. So among a request's tokens in a pass, those that run a layer come first. This is true for decode steps, for chunks
of a prompt, and for generated tokens that are recomputed after preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

# fields of CommonAttentionMetadata
PER_REQUEST = {"block_table_tensor", "is_prefilling", "rswa_prefix_lens", "req_idx"}  # one value for each request
LENGTHS = {"seq_lens", "seq_lens_cpu_upper_bound"}  # length of each request's sequence after the pass
PER_TOKEN = {"slot_mapping", "positions"}  # one value for each token


@dataclass(frozen=True)
class Subset:
    """The tokens of a forward pass that run a certain layer. Some other tokens skip this layer.

    Args:
        tokens: indices of these tokens in the pass, ascending; a tensor on the device.
        requests: indices of the requests that have such tokens.
        on_device: `requests` as a tensor on the device.
        counts: for each of `requests`, how many of its tokens in the pass run the layer. These tokens come first.
        dropped: for each of `requests`, how many of its tokens in the pass skip the layer.
    """

    tokens: Tensor
    requests: np.ndarray
    on_device: Tensor
    counts: np.ndarray
    dropped: np.ndarray


class PassPlan:
    """Finds which tokens of a forward pass run a layer. `rank`: place of the layer in the keep order; 0: never skipped.

    Args:
        depths: d(0), d(1), ...: number of layers that each generated token runs.
        prompt_depth: number of layers that a prompt token runs.
        starts: index of each request's first token, and then the number of all tokens (vLLM's ``query_start_loc``).
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
        self.starts, self.ends, self.prompts, self.device = starts, ends, prompts, device
        self.owners = np.repeat(np.arange(len(ends)), np.diff(starts))  # index of each token's request
        self.positions = np.arange(starts[-1]) - (starts[1:] - ends)[self.owners]
        generated = self.positions - prompts[self.owners]
        self.depths = np.where(generated < 0, prompt_depth, depths[np.clip(generated, 0, len(depths) - 1)])
        self.levels = np.unique(self.depths)  # the different depths, ascending
        # name of attention layer -> vLLM's builder of its metadata, CommonAttentionMetadata of the pass
        self.built: dict[str, tuple[Any, Any]] = {}
        self.by_graphs = False  # whether `DecodeGraphs` runs the pass
        self._subsets: dict[int, Subset] = {}

    def runs_all(self, rank: int) -> bool:
        """Return whether all tokens run the layer with this rank."""
        return rank < int(self.levels[0])

    def subset(self, rank: int) -> Subset | None:
        """Return the tokens that run the layer with this rank; None if there are none. `runs_all` must be false."""
        level = int(np.searchsorted(self.levels, rank, side="right"))
        if level == len(self.levels):
            return None
        if level not in self._subsets:
            runs = self.depths >= self.levels[level]
            counts = np.diff(np.concatenate(([0], np.cumsum(runs)))[self.starts])
            requests = np.flatnonzero(counts)
            dropped = (np.diff(self.starts) - counts)[requests]
            tokens, on_device = to_device(np.flatnonzero(runs), self.device), to_device(requests, self.device)
            self._subsets[level] = Subset(tokens, requests, on_device, counts[requests], dropped)
        return self._subsets[level]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device. Pin its memory first for a GPU: else the copy would wait until the GPU is idle."""
    tensor = torch.from_numpy(values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def cut_metadata(common: Any, subset: Subset, ends: np.ndarray) -> Any:
    """Return a CommonAttentionMetadata for a subset of the tokens.

    Args:
        common: the CommonAttentionMetadata of all tokens.
        ends: see `PassPlan`.

    Raises NotImplementedError if a field is set that this function does not know. The message names the field.
    """
    if not isinstance(common.causal, bool):
        raise NotImplementedError("CommonAttentionMetadata.causal is set for each request, which is not supported")
    device = common.seq_lens.device
    starts = np.concatenate(([0], np.cumsum(subset.counts))).astype(np.int32)
    cut: dict[str, Any] = {
        "query_start_loc_cpu": torch.from_numpy(starts),
        "query_start_loc": to_device(starts, device),
        "num_reqs": len(subset.counts),
        "num_actual_tokens": int(subset.counts.sum()),
        "max_query_len": int(subset.counts.max()),
        "max_seq_len": int((ends[subset.requests] - subset.dropped).max()),
        "causal": common.causal,
    }
    for name in [field.name for field in fields(common) if field.name not in cut]:
        value = getattr(common, name)
        if value is None or name.startswith("_"):  # private fields are caches, which vLLM fills when needed
            cut[name] = None
        elif name in PER_TOKEN:
            cut[name] = value[subset.tokens]
        elif name in PER_REQUEST | LENGTHS:
            there = isinstance(value, Tensor) and value.device == device
            rows = value[: common.num_reqs][subset.on_device if there else subset.requests]
            if name in LENGTHS:
                rows = rows - to_device(subset.dropped, rows.device).to(rows.dtype)
            cut[name] = rows
        else:
            raise NotImplementedError(f"CommonAttentionMetadata.{name} is set, which SkipDecode does not support")
    return type(common)(**cut)
