"""Decoder and executor for the CPU kernels. A decode step is one native call. Prompts run without padding.

Shapes: R rows of a prefill, P prompts, B rows of a decode step, N tokens or hidden states, H key/value heads, K slots,
D head size, E hidden size, V vocabulary size.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.engine.cache import SlotShape
from actors.engine.cpu.kernels import PANEL, kernel, quantizes, structure
from actors.engine.cpu.products import (
    PackedLinear,
    PanelProduct,
    give_memory_back,
    pack_codes,
    pack_linears,
    packed_linear,
    quantize_weight,
    to_huge_pages,
)
from actors.engine.cpu.stack import Embedding, PackedPrefix, Stack, buffer_table, can_stack, normalize
from actors.engine.decoder import Decoder
from actors.engine.model.families import Rotary, context_length, family_of, has_weights, layer_weights
from actors.engine.model.layer_weights import NormWeights
from actors.engine.sampling.sampler import argmax
from actors.engine.torch.executor import LibraryExecutor

PANELS_AT_ONCE = 64  # number of the head's panels (48 outputs each) that are converted to float64 at a time
UNDECIDED = 8  # a row with more than V / 8 candidates for its likeliest token is undecided: it needs all logits

_Screen = structure("norm norm_bias weight packed norms", "inputs outputs most", "epsilon")


def fastest_decoder(model: PreTrainedModel, tokens: int | None = None, *, int8: bool = False) -> Decoder:
    """Return the fastest decoder for a model on the model's device, for inference only.

    Args:
        model: The model. Do not use it afterwards, because its layers and head may be replaced.
        tokens: Compute logits only for token ids below this number; None: for all ids.
        int8: Whether to round linear layers and head to 8 bits (see `cpu.products`), which needs bfloat16 on a CPU.
    """
    weight = next(model.parameters())
    assert not int8 or (weight.device.type == "cpu" and weight.dtype == torch.bfloat16)
    config, kind = model.config, (weight.dtype, weight.device)
    blocks = family_of(config).layers(model)
    if has_weights(config) and all(can_stack(layer_weights(config, block), *kind, int8=int8) for block in blocks):
        return StackDecoder(model, tokens, int8=int8)
    if kind != (torch.bfloat16, torch.device("cpu")):
        return Decoder(model, tokens)
    for block in blocks:
        pack_linears(block, int8=int8)
        give_memory_back()
    decoder = Decoder(model, tokens)
    _pack_head(decoder, int8)
    return decoder


def _pack_head(decoder: Decoder, int8: bool) -> Tensor:
    """Pack a decoder's head. Return the old weight [V, E]; the model keeps it only if the input embedding uses it."""
    weight: Tensor = decoder.head.weight.detach()  # type: ignore[operator]
    shared = decoder.head.weight is decoder.model.get_input_embeddings().weight
    decoder.head = packed_linear(decoder.head, int8=int8)
    if not shared:
        decoder.model.set_output_embeddings(decoder.head)
    return weight


class Screen:
    """Finds the likeliest token for each hidden state without computing all logits; see screen.h.

    An 8-bit product gives bounds for all logits, in half the time of the bfloat16 product. Then only logits that may be
    the highest are computed in bfloat16, with the same bits as in the full product. For 64 rows of SmolLM2-135M, this
    takes 3.2 ms instead of 5.3 ms on two Zen 5 cores. A greedy job takes 4% less time at 1x, and 10% less at 3x.
    """

    def __init__(self, weight: Tensor, norm: NormWeights) -> None:
        """Quantize a head's `weight` [V, E], see `can_screen`; keep `weight` too. norm: the norm before the head."""
        weight = weight.detach()
        packed, norms = zip(*map(_bounded, weight.split(PANEL * PANELS_AT_ONCE)), strict=True)
        panels = [torch.cat(packed)]
        to_huge_pages(panels)
        self._held = norm.weight, norm.bias, weight, panels[0], torch.cat(norms)
        assert all(part is None or part.is_contiguous() for part in self._held)
        addresses = (None if part is None else part.data_ptr() for part in self._held)
        self._fields = _Screen(*addresses, weight.shape[1], len(weight), len(weight) // UNDECIDED, norm.eps)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token [N] for each hidden state [N, E] before the final norm; -1 if undecided."""
        hidden = hidden.contiguous()
        rows, size = hidden.shape
        assert hidden.dtype == torch.bfloat16 and size == self._fields.inputs
        tokens = torch.empty(rows, dtype=torch.int64)
        kernel("likeliest", hidden.dtype)(ctypes.byref(self._fields), hidden.data_ptr(), tokens.data_ptr(), rows)
        return tokens


def _bounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [v, E] packed in 8 bits, and [panels, 2, 48]: |w| and |w - rounded w| of each row w, rounded up."""
    codes, scales = quantize_weight(weight)
    whole = weight.double()
    rounded = codes[:, : weight.shape[1]].double() * scales.double()[:, None]
    norms = torch.stack([whole.norm(dim=1), (whole - rounded).norm(dim=1)], dim=1) * (1 + 1e-6)
    padded = torch.nn.functional.pad(norms, (0, 0, 0, -len(norms) % PANEL))
    return pack_codes(codes, scales), padded.view(-1, PANEL, 2).transpose(1, 2).float()


def can_screen(weight: Tensor) -> bool:
    """Return whether `Screen` works on this CPU, and for this head's weight [V, E]: contiguous, finite, even E."""
    return (
        quantizes(weight.dtype, weight.device)
        and weight.is_contiguous()
        and weight.shape[1] % 2 == 0
        and bool(weight.isfinite().all())
    )


class StackDecoder(Decoder):
    """A decoder whose layers and final norm run as CPU kernels."""

    def __init__(self, model: PreTrainedModel, tokens: int | None = None, *, int8: bool = False) -> None:
        family = family_of(model.config)
        tokens_table, learned, scale = family.embeddings(model)
        learned = None if learned is None else learned.detach()
        context = context_length(model.config)
        embedding = Embedding(tokens_table.detach(), learned, scale, self._rotary_tables, context)
        self.stack = Stack(family.layers(model), functools.partial(layer_weights, model.config), embedding, int8=int8)
        super().__init__(model, tokens)
        self._last_norm = family.last_norm(model)
        plain = self.logit_cap is None and self.head.bias is None
        weight = _pack_head(self, int8)
        # the bounds are valid only for logits that the kernel of `PanelProduct` computes
        own = isinstance(self.head, PackedLinear) and type(self.head.product) is PanelProduct
        self._screened = weight if plain and own and self._last_norm is not None and can_screen(weight) else None

    @functools.cached_property
    def screen(self) -> Screen | None:
        """The head's `Screen`, created at first use; None if the model or the CPU does not support one."""
        if self._screened is None or self._last_norm is None:
            return None
        return Screen(self._screened, self._last_norm)

    def _rotary_tables(self, positions: int) -> Sequence[Rotary]:
        """Return each layer's rotary cosines and sines [1, positions, R] for positions 0 ... `positions` - 1."""
        return self.rotary(torch.empty(1, 1, 1, dtype=self.dtype), torch.arange(positions)[None])

    def rotary(self, hidden: Tensor, positions: Tensor) -> Sequence[Rotary]:
        rotary = super().rotary(hidden, positions)
        if rotary[0] is None or rotary[0][0].dtype == hidden.dtype:
            return rotary
        # cast: OLMo 2 and 3 compute rotary tables in float32, but all tensors of a stack have the same dtype
        tables = {id(both): both for both in rotary if both is not None}
        cast = {key: (both[0].to(hidden.dtype), both[1].to(hidden.dtype)) for key, both in tables.items()}
        return [cast[id(both)] for both in rotary]

    def finish(self, hidden: Tensor) -> Tensor:
        return super().finish(hidden) if self._last_norm is None else normalize(hidden, self._last_norm)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token [N] for each hidden state [N, E]; the lowest id if several are equally likely."""
        if self.screen is None:
            return argmax(self.logits(hidden))
        tokens = self.screen(hidden)
        undecided = (tokens < 0).nonzero()[:, 0]
        if len(undecided):
            tokens[undecided] = argmax(self.logits(hidden[undecided]))
        return tokens


class _Slots:
    """Holds all layers' keys and values in `memory`, which need not be cleared: kernels read only written slots."""

    def __init__(self, shape: SlotShape, decoder: Decoder, memory: Tensor) -> None:
        sizes = [(2, shape.rows, decoder.kv_heads, slots, decoder.head_dim) for slots in shape.slots]
        parts = memory.split([math.prod(size) for size in sizes])
        self.layers = [part.view(size) if len(part) else None for part, size in zip(parts, sizes, strict=True)]
        self.table = buffer_table(self.layers)


class CpuExecutor(LibraryExecutor):
    """Runs the CPU kernels of a `StackDecoder`. All slots of the KV cache are in one allocation.

    A new cache reuses the allocation if it is large enough, but less than twice as large as needed. With a new
    allocation for each cache, a job with the demo's model takes 5% longer: the system clears new memory page by page.
    """

    decoder: StackDecoder
    _memory = torch.empty(0)

    def _allocated(self, shape: SlotShape) -> _Slots:
        total = shape.bytes(self.decoder.token_bytes) // self.decoder.dtype.itemsize
        if not total <= len(self._memory) < 2 * total:
            self._memory = torch.empty(0)  # free the old memory before new memory is allocated
            self._memory = torch.empty(total, dtype=self.decoder.dtype)
        return _Slots(shape, self.decoder, self._memory[:total])

    def prefill(
        self,
        prompts: Sequence[tuple[int, ...]],
        sources: Sequence[int],
        slots: Sequence[int],
        prefix: tuple[int, ...],
        layers: Sequence[int],
    ) -> tuple[Tensor, int, int]:
        shared, new = self._shared(prefix, tuple(layers))
        for slot in slots:
            self._rows[slot] = slot
        own = [prompt[len(prefix) :] for prompt in prompts]
        logits = self._prompts(own, len(prefix), sources, slots, layers, self._cache.layers, shared)
        return logits[torch.tensor(sources)], sum(map(len, own)), new

    def _run_prefix(self, prefix: tuple[int, ...], layers: tuple[int, ...]) -> dict[int, PackedPrefix]:
        decoder = self.decoder
        size = (2, 1, decoder.kv_heads, len(prefix), decoder.head_dim)
        kept = [torch.empty(size, dtype=decoder.dtype) for _ in range(decoder.num_layers)]
        self._prompts([prefix], 0, [0], [0], layers, kept, {})
        return {layer: decoder.stack.packed_prefix(kept[layer][:, 0]) for layer in layers}

    def _prompts(
        self,
        prompts: Sequence[tuple[int, ...]],
        begins: int,  # position of each prompt's first token; `prompts` do not contain the prefix
        sources: Sequence[int],  # for each row, the index of its prompt
        slots: Sequence[int],  # for each row, its index in the buffers
        layers: Sequence[int],
        buffers: Sequence[Tensor | None],  # for each layer, the cache for keys and values [2, R, H, K, D]
        prefix: dict[int, PackedPrefix] | None,
    ) -> Tensor:
        """Run `layers` over concatenated prompts; return logits [P, V] after each prompt's last token."""
        starts = torch.tensor([0, *itertools.accumulate(map(len, prompts))])
        ids = torch.tensor([list(itertools.chain.from_iterable(prompts))])
        positions = torch.cat([torch.arange(begins, begins + len(prompt)) for prompt in prompts])[None]
        hidden, rotary = self.decoder.embed(ids, positions)
        places, owners = torch.tensor(slots), torch.tensor(sources)
        for layer in layers:
            before = prefix[layer] if prefix else None
            self.decoder.stack.prompts(layer, hidden, rotary[layer], starts, places, owners, buffers[layer], before)
        return self.decoder.logits(hidden[0, starts[1:] - 1])

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        rows_per_layer: Sequence[int],
        *,
        greedy: bool = False,
    ) -> Tensor:
        places, at = torch.tensor(slots), torch.tensor(positions)
        hidden = self.decoder.stack.step(tokens, rows_per_layer, places, at, self._cache.table)
        return self.decoder.likeliest(hidden) if greedy else self.decoder.logits(hidden)
