"""Logits that penalties and barred tokens replace, as in transformers and OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.engine.sampling.state import RowSampling


def changed_logits(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The changes to logits [B, V]: row, token and new value, float32, of each, in the order of rows; None without any.

    A barred token, whose value is -inf, has one change.
    """
    counts = [len(row.counts.tokens) if row.penalized else 0 for row in rows]
    barred = [len(row.barred) for row in rows]
    if not any(counts) and not any(barred):
        return None
    tokens = torch.from_numpy(_joined([row.counts.tokens if row.penalized else b"" for row in rows], np.int64))
    times = torch.from_numpy(_joined([row.counts.times if row.penalized else b"" for row in rows], np.float32))
    index = torch.from_numpy(np.repeat(np.arange(len(rows)), counts))
    values = torch.tensor(
        [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (row.params for row in rows)]
    )[index]
    if logits.device.type != "cpu":
        tokens, times, index, values = (part.to(logits.device) for part in (tokens, times, index, values))
    old = logits[index, tokens].float()
    new = torch.where(old < 0, old * values[:, 0], old / values[:, 0])
    new = new - values[:, 1] * (times > 0) - values[:, 2] * times
    if not any(barred):
        return index, tokens, new
    pairs = [(number, token) for number, row in enumerate(rows) for token in row.barred]
    rows_barred, tokens_barred = torch.tensor(pairs, device=logits.device).T
    vocabulary = logits.shape[1]
    is_barred = torch.isin(index * vocabulary + tokens, rows_barred * vocabulary + tokens_barred)
    index, tokens, new = index[~is_barred], tokens[~is_barred], new[~is_barred]
    index, tokens = torch.cat((index, rows_barred)), torch.cat((tokens, tokens_barred))
    new = torch.cat((new, new.new_full((len(pairs),), -torch.inf)))
    order = index.argsort(stable=True)
    return index[order], tokens[order], new[order]


def _joined(parts: Sequence[object], dtype: type[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """Buffers one behind another, as an array of its own."""
    return np.frombuffer(bytearray().join(parts), dtype=dtype)  # type: ignore[arg-type]
