"""The kernels of `kernels.cpp` for torch tensors; `library` builds them.

Shapes: B rows, N tokens of all prompts, P prompts, C tokens of a prefix, Q query heads, H key/value heads, K slots, D
head size, R rotary size, E hidden size, I intermediate size or inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.cpu.library import kernel

LARGEST_HEAD = 256  # numbers
PANEL = 48  # outputs of a product that lie together in its packed weight


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One token a row: query [B, Q, D] over keys and values [B, H, K, D] -> [B, Q, D].

    mask: bool [B or 1, K], the slots that a row attends to, without gaps; None: all. Other slots are not read.
    """
    rows, heads, width, size = keys.shape
    if query.stride(2) != 1 or query.stride(1) != size:
        query = query.contiguous()
    assert query.dtype == keys.dtype == values.dtype and values.shape == keys.shape and len(query) == rows
    assert size <= LARGEST_HEAD and keys.stride(3) == values.stride(3) == 1
    assert mask is None or (mask.dtype == torch.bool and mask.shape[1] == width and (width == 1 or mask.stride(1) == 1))
    output = torch.empty(rows, query.shape[1], size, dtype=query.dtype)
    kernel("attend", query.dtype)(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        None if mask is None else mask.data_ptr(),
        output.data_ptr(),
        *(rows, heads, query.shape[1] // heads, width, size, query.stride(0)),
        *keys.stride()[:3],
        *values.stride()[:3],
        0 if mask is None or len(mask) == 1 else mask.stride(0),
        scale,
    )
    return output


@dataclass(frozen=True)
class PackedPrefix:
    """Keys and values of C tokens that precede all prompts of a pass, in the order of the kernels' products."""

    keys: Tensor
    values: Tensor
    tokens: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> PackedPrefix:
        """keys, values: bfloat16 [1, H, C, D], D even."""
        _, heads, tokens, size = keys.shape
        assert keys.dtype == values.dtype == torch.bfloat16 and keys.shape == values.shape and size % 2 == 0
        assert keys.is_contiguous() and values.is_contiguous() and len(keys) == 1 and tokens > 0
        width, wide = (-(-count // PANEL) * PANEL for count in (tokens, size))
        packed = [torch.zeros(heads, numbers, width, dtype=keys.dtype) for numbers in (size, wide)]
        pointers = (tensor.data_ptr() for tensor in (keys, values, *packed))
        kernel("pack_prefix", keys.dtype)(*pointers, tokens, heads, size)
        return cls(packed[0], packed[1], tokens)


def attend_prompts(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, scale: float, prefix: PackedPrefix | None = None
) -> Tensor:
    """Causal attention of prompts one behind another, in bfloat16, D even.

    Args:
        query: [N, Q, D].
        keys, values: [N, H, D].
        starts: int64 [P + 1], the first token of each prompt, and N.
        scale: factor of the scores.
        prefix: precedes every prompt.

    Returns:
        [N, Q, D].
    """
    tokens, heads, size = keys.shape
    assert query.dtype == keys.dtype == values.dtype == torch.bfloat16 and keys.shape == values.shape
    assert query.shape == (tokens, query.shape[1] // heads * heads, size) and size % 2 == 0
    assert starts.dtype == torch.int64 and starts.is_contiguous()
    assert int(starts[0]) == 0 and int(starts[-1]) == tokens and bool((starts.diff() > 0).all())
    query, keys, values = (_with_whole_rows(states) for states in (query, keys, values))
    output = torch.empty(query.shape, dtype=query.dtype)
    kernel("attend_prompts", query.dtype)(
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        starts.data_ptr(),
        output.data_ptr(),
        *((None, None, 0) if prefix is None else (prefix.keys.data_ptr(), prefix.values.data_ptr(), prefix.tokens)),
        *(len(starts) - 1, heads, query.shape[1] // heads, size),
        *(query.stride(0), keys.stride(0), values.stride(0), scale),
    )
    return output


def _with_whole_rows(states: Tensor) -> Tensor:
    """States [B, heads, D] whose rows have no strides; a copy if they had."""
    return states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()


def append(keys: Tensor, values: Tensor, key_buffer: Tensor, value_buffer: Tensor, slots: Tensor) -> None:
    """Write one token a row, keys and values [B, H, D], to slots [B] int64 of buffers [B, H, K, D] of one layout."""
    rows, heads, size = keys.shape
    assert key_buffer.stride() == value_buffer.stride() and key_buffer.stride()[2:] == (size, 1)
    assert keys.dtype == values.dtype == key_buffer.dtype == value_buffer.dtype
    assert slots.dtype == torch.int64 and slots.shape == (rows,) and slots.is_contiguous()
    keys, values = _with_whole_rows(keys), _with_whole_rows(values)
    inside = kernel("append", keys.dtype)(
        keys.data_ptr(),
        values.data_ptr(),
        key_buffer.data_ptr(),
        value_buffer.data_ptr(),
        slots.data_ptr(),
        *(rows, heads, size, key_buffer.shape[2], keys.stride(0), values.stride(0), *key_buffer.stride()[:2]),
    )
    assert inside, "a slot lies outside the buffers"


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Rotate the first R numbers of states [B, heads, D] in place by cosines and sines [B, R], as transformers'
    `apply_rotary_pos_emb` does."""
    rows, heads, size = states.shape
    rotary = cosines.shape[1]
    assert states.stride()[1:] == (size, 1) and states.dtype == cosines.dtype == sines.dtype
    assert cosines.shape == sines.shape == (rows, rotary) and cosines.stride() == sines.stride() == (rotary, 1)
    assert rotary <= size and rotary % 2 == 0
    pointers = states.data_ptr(), cosines.data_ptr(), sines.data_ptr()
    kernel("rotate", states.dtype)(*pointers, rows, heads, size, rotary, states.stride(0))


def normalize(hidden: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of hidden [..., E] with a bias [E], RMSNorm without one."""
    size = hidden.shape[-1]
    hidden = hidden.contiguous()
    assert hidden.dtype == weight.dtype and weight.is_contiguous() and (bias is None or bias.is_contiguous())
    output = torch.empty_like(hidden)
    kernel("normalize", hidden.dtype)(
        hidden.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        output.data_ptr(),
        *(hidden.numel() // size, size, epsilon),
    )
    return output


def normalize_heads(states: Tensor, weight: Tensor, epsilon: float) -> None:
    """RMSNorm of states [B, heads, D] in place: of each head by a weight [D], or of all together by one [heads D]."""
    rows, heads, size = states.shape
    assert states.stride()[1:] == (size, 1) and states.dtype == weight.dtype and weight.is_contiguous()
    assert len(weight) in (size, heads * size)
    groups = heads * size // len(weight)
    pointers = states.data_ptr(), weight.data_ptr()
    kernel("normalize_groups", states.dtype)(*pointers, rows, groups, len(weight), states.stride(0), epsilon)


def gate(both: Tensor) -> Tensor:
    """[gate, up] of [..., 2 I], contiguous -> silu(gate) * up of [..., I]."""
    size = both.shape[-1] // 2
    assert both.is_contiguous()
    output = torch.empty(*both.shape[:-1], size, dtype=both.dtype)
    kernel("gate", both.dtype)(both.data_ptr(), output.data_ptr(), output.numel() // size, size)
    return output


def pack(weight: Tensor) -> Tensor:
    """Weight [O, I], I even -> [O / 48 rounded up, I / 2, 48, 2], for `multiply`."""
    outputs, inputs = weight.shape
    panels = -(-outputs // PANEL)
    packed = torch.zeros(panels, inputs // 2, PANEL, 2, dtype=weight.dtype)
    for number, panel in enumerate(weight.detach().split(PANEL)):
        packed[number, :, : len(panel)] = panel.view(-1, inputs // 2, 2).transpose(0, 1)
    return packed


def multiply(
    hidden: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    """hidden [..., I] -> relu(hidden W^T + bias) + residual [..., O] by the packed weight of W [O, I]."""
    inputs = packed.shape[1] * 2
    hidden = hidden.contiguous()
    rows = hidden.numel() // inputs
    output = torch.empty(*hidden.shape[:-1], outputs, dtype=hidden.dtype)
    assert hidden.dtype == packed.dtype == torch.bfloat16 and hidden.shape[-1] == inputs
    assert packed.shape[0] == -(-outputs // PANEL) and packed.is_contiguous() and packed.data_ptr() % 64 == 0
    assert bias is None or (bias.dtype == hidden.dtype and bias.shape == (outputs,) and bias.is_contiguous())
    if residual is not None:
        residual = residual.contiguous()
        assert residual.dtype == hidden.dtype and residual.shape == output.shape
    kernel("multiply", hidden.dtype)(
        hidden.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        output.data_ptr(),
        *(rows, inputs, outputs, relu),
    )
    return output
