"""Tokens between host and GPU, for rows that the host samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from actors.engine.gpu.state import DeviceRows
from actors.engine.row import Row


def fetch_tokens(rows: Sequence[Row], slots: Mapping[int, int], state: DeviceRows) -> None:
    """Wait for the GPU and give rows in flight the tokens that it has sampled. slots: of the rows, by ticket."""
    if not rows:
        return
    counts = state.counts.tolist()
    longest = max(counts[slots[row.ticket]] for row in rows)
    tokens, logprobs = state.tokens[:, :longest].tolist(), state.logprobs.tolist()
    for row in rows:
        slot = slots[row.ticket]
        row.logprob, row.position = logprobs[slot], counts[slot] - 1
        for token in tokens[slot][: counts[slot]]:
            row.tokens.append(token)
            row.sampling.add(token)
            row.finish = row.finish or row.advance()


def write_tokens(rows: Sequence[Row], slots: Tensor, state: DeviceRows) -> None:
    """Upload the last tokens of rows, which the host has sampled. slots: int64 [B], of the rows."""
    device = slots.device
    state.last[slots] = torch.tensor([row.tokens[-1] for row in rows], device=device)
    positions = torch.tensor([row.position for row in rows], device=device)
    state.generated[slots] = positions
    state.positions[slots] = positions + torch.tensor([len(row.request.prompt_ids) for row in rows], device=device)
    state.ended[slots] = torch.tensor([row.finish is not None for row in rows], device=device)
