"""The kernel of `sampling.h` for torch tensors: next tokens and log-probabilities of rows, each by its own parameters.

Shapes: N rows, C changed logits of all rows, M masks, W words of a mask, V vocabulary size, K most of the likeliest
tokens.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.cpu.library import kernel
from actors.engine.types import SamplingParams

Integers = NDArray[np.int64]
_LAYOUT = struct.Struct("<qqqddd")  # SamplingParameters of sampling.h


def packed(params: SamplingParams, key: int) -> bytes:
    """Parameters of a row and the key of its random numbers, as the kernel reads them."""
    likeliest = -1 if params.logprobs is None else params.logprobs
    return _LAYOUT.pack(key, params.top_k, likeliest, params.temperature, params.top_p, params.min_p)


@dataclass(frozen=True)
class Changes:
    """Logits that are replaced before sampling.

    Args:
        bounds: [N, 2], where the changes of each row begin and end.
        tokens: [C].
        values: float32 [C], in place of the logits.
    """

    bounds: Integers
    tokens: Integers
    values: NDArray[np.float32]


@dataclass(frozen=True)
class Masks:
    """Allowed tokens of some rows.

    Args:
        bits: int32 [M, W], see `constraint.Bits`.
        rows: [N], the mask of each row; -1 for none.
    """

    bits: NDArray[np.int32]
    rows: Integers


@dataclass(frozen=True)
class Sampled:
    """Results [N]; log-probabilities are NaN where they were not computed.

    Args:
        tokens: Ids.
        logprobs: Of the tokens under the model's own distribution, nats.
        choice_logprobs: The same among the allowed tokens, for rows with a mask.
        top_ids: [N, K], the likeliest tokens of rows that ask for them; a row may ask for fewer than K.
        top_logprobs: [N, K].
    """

    tokens: Integers
    logprobs: NDArray[np.float32]
    choice_logprobs: NDArray[np.float32]
    top_ids: Integers
    top_logprobs: NDArray[np.float32]


def sample(
    logits: Tensor,
    places: Integers,
    parameters: bytes,
    drawn: Integers,
    *,
    changes: Changes | None = None,
    masks: Masks | None = None,
    most: int = 0,
    logprobs: bool = True,
) -> Sampled:
    """Sample the next token of N rows from logits [B, V], bfloat16 or float32, contiguous, on the CPU.

    Args:
        logits: Not changed.
        places: [N], the row's index in logits.
        parameters: `packed` of each row, one behind another.
        drawn: [N], tokens that each row has drawn before.
        changes: Logits that are replaced.
        masks: Allowed tokens.
        most: K, at most V.
        logprobs: Whether to compute the tokens' log-probabilities.
    """
    count, width = len(places), logits.shape[1]
    assert logits.device.type == "cpu" and logits.is_contiguous()
    assert len(parameters) == count * _LAYOUT.size and len(drawn) == count and most <= width
    assert places.dtype == drawn.dtype == np.int64
    changes = changes or Changes(np.zeros((count, 2), np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    masks = masks or Masks(np.zeros((0, 0), np.int32), np.full(count, -1))
    result = Sampled(
        np.empty(count, np.int64),
        np.empty(count, np.float32),
        np.empty(count, np.float32),
        np.empty((count, most), np.int64),
        np.empty((count, most), np.float32),
    )
    read = changes.bounds, changes.tokens, changes.values, masks.bits, masks.rows
    written = result.tokens, result.logprobs, result.choice_logprobs, result.top_ids, result.top_logprobs
    kernel("sample", logits.dtype)(
        logits.data_ptr(),
        places.ctypes.data,
        parameters,
        drawn.ctypes.data,
        *(array.ctypes.data for array in (*read, *written)),
        *(count, width, masks.bits.shape[1], most, int(logprobs)),
    )
    return result
