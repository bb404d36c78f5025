"""Runs all layers of a decode step, or one layer over whole prompts, in one native call (see layer.h).

If each matrix product were one call, a small model would spend more time on the calls than on the products. Allocating
memory for every product would take time too, because the system clears new memory page by page.
Shapes: B rows of a call, R rows of the buffers, P prompts, N tokens of all prompts, L layers, E hidden size, Q query
heads, H key/value heads, K slots, C tokens of a prefix, D head size. For rotary tables, R is the rotary size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from actors.engine.cpu import kernels
from actors.engine.cpu.kernels import LARGEST_HEAD, PANEL, kernel, structure
from actors.engine.cpu.products import PanelProduct, QuantizedProduct, give_memory_back, product, to_huge_pages
from actors.engine.model.families import Rotary
from actors.engine.model.layer_weights import GELU, LayerWeights, NormWeights, Projection
from actors.engine.torch import packed_attention
from actors.engine.torch.packed_attention import Attendance

# structures with the same names and fields as in attention.h
_Layer = structure(
    "attention_norm attention_norm_bias mlp_norm mlp_norm_bias query_norm key_norm attention_after mlp_after"
    " qkv qkv_bias output output_bias up up_bias down down_bias",
    "hidden heads group size intermediate gated norms_residual joined_heads rope window quantized",
    "attention_epsilon mlp_epsilon head_epsilon scale",
)
_Buffers = structure("keys values", "places held row head")
_Step = structure("hidden rotations tokens places slots", "rotary rows")
_Inputs = structure("embeddings learned rotations", "embedded positions rotary tables", "scale")
_Prompts = structure(
    "hidden cosines sines keys values starts places sources prefix_keys prefix_values",
    "prefix_tokens rotary prompts rows buffer_row buffer_head",
)


def _address(tensor: Tensor | None) -> int | None:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def buffer_table(buffers: Sequence[Tensor | None]) -> Any:
    """Return the addresses of each layer's keys and values [2, R, H, K, D]. The caller must keep `buffers` alive."""
    table = (_Buffers * len(buffers))()
    for number, both in enumerate(buffers):
        if both is not None:
            _, rows, _, slots, _ = both.shape
            table[number] = _Buffers(*map(_address, both), rows, slots, *both.stride()[1:3])
    return table


def normalize(hidden: Tensor, norm: NormWeights) -> Tensor:
    """Apply LayerNorm to hidden states [N, E], or RMSNorm if `norm` has no bias."""
    hidden, output = hidden.contiguous(), torch.empty(hidden.shape, dtype=hidden.dtype)
    assert norm.weight.dtype == torch.float32
    addresses = map(_address, (hidden, norm.weight, norm.bias, output))
    kernel("normalize", hidden.dtype)(*addresses, *hidden.shape, norm.eps)
    return output


class Embedding(NamedTuple):
    """The tables from which the first layer's input is computed, and the rotary tables."""

    tokens: Tensor  # [V, E], embedding of each token
    learned: Tensor | None  # [positions, E], learned position embeddings, which are added; None: no such embeddings
    scale: float  # factor for the token embeddings
    # number of positions -> each layer's cosines and sines [1, positions, R]; layers with equal tables share them
    rotary: Callable[[int], Sequence[Rotary]]
    context: int  # largest number of positions for `rotary`


class PackedPrefix(NamedTuple):
    """A layer's keys and values [2, H, C, D] for a shared prefix of C tokens, and copies packed for the kernels."""

    states: Tensor
    keys: Tensor
    values: Tensor


def can_stack(weights: LayerWeights, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> bool:
    """Return whether the kernels can compute a layer.

    They support silu(gate) * up, gelu(gate) * up and relu(up). All products must be in `dtype`, or all in int8.
    """
    parts = weights.qkv, weights.output, weights.up, weights.down
    return (
        (weights.gated or weights.activation == "relu")
        and weights.head_dim <= LARGEST_HEAD
        and (kernels.quantizes if int8 else kernels.multiplies)(dtype, device)
        and (dtype == torch.float32 or all(size % 2 == 0 for size in (weights.head_dim, *(p.shape[1] for p in parts))))
    )


class Stack:
    """L decoder layers of equal shape, computed by CPU kernels. Only one thread at a time may use a stack."""

    def __init__(
        self,
        blocks: nn.ModuleList,  # transformers' layers; all of them must satisfy `can_stack`
        describe: Callable[[nn.Module], LayerWeights],  # transformers' layer -> its weights
        embedding: Embedding,
        *,
        int8: bool = False,  # whether to round all weights to 8 bits
    ) -> None:
        """Replace transformers' layers in `blocks` by packed layers. Free each layer before packing the next one."""
        described: list[tuple[dict[str, Any], list[PanelProduct], list[Tensor | None]]] = []
        for number in range(len(blocks)):  # by index, because a loop variable would keep a layer's memory alive
            described.append(_packed(describe(blocks[number]), int8))
            blocks[number] = StackedLayer(self, number)
            give_memory_back()
        every = [one for _, products, _ in described for one in products]
        weights = [one.packed for one in every]
        for one in every:
            del one.packed
        to_huge_pages(weights)
        for one, weight in zip(every, weights, strict=True):
            one.packed = weight
        self._held = described, embedding  # keeps the tensors alive, because the structures hold only their addresses
        self.layers = (_Layer * len(blocks))()
        for number, (fields, products, norms) in enumerate(described):
            parts = [*norms, *(part for one in products for part in (one.packed, one.bias))]
            self.layers[number] = _Layer(*map(_address, parts), **fields)
        first = self.layers[0]
        names = ("hidden", "heads", "group", "size", "intermediate", "gated")
        assert all(getattr(layer, name) == getattr(first, name) for layer in self.layers for name in names)
        self._hidden, self._heads, self._head_dim = first.hidden, first.heads, first.size
        self._dtype = embedding.tokens.dtype
        self._embedding = embedding
        self._inputs: tuple[Any, Tensor | None] | None = None  # result of `_inputs_for`, and its rotary tables

    def step(
        self, tokens: Sequence[int], rows_per_layer: Sequence[int], places: Tensor, slots: Tensor, table: Any
    ) -> Tensor:
        """Run one token of every row through all layers; return hidden states [B, E].

        Args:
            tokens: [B].
            rows_per_layer: [L], number of rows that run each layer: layer i runs the last rows_per_layer[i] rows.
            places: int64 [B], index of each row in the buffers.
            slots: int64 [B], slot (= position) of each new token. The token attends to this and earlier slots.
            table: Result of `buffer_table` for the rows' keys and values.
        """
        assert not torch.is_grad_enabled() and places.dtype == slots.dtype == torch.int64
        assert len(places) == len(slots) == len(tokens) and max(rows_per_layer) <= len(tokens)
        assert len(rows_per_layer) == len(self.layers) == len(table)
        hidden = torch.empty(len(tokens), self._hidden, dtype=self._dtype)
        given = (ctypes.c_int64 * len(tokens))(*tokens)
        counts = (ctypes.c_int64 * len(self.layers))(*rows_per_layer)
        step = _Step(
            hidden=_address(hidden),
            tokens=ctypes.addressof(given),
            places=_address(places),
            slots=_address(slots),
            rows=len(tokens),
        )
        inputs = ctypes.byref(self._inputs_for(int(slots.max()) + 1))
        kernel("step", self._dtype)(self.layers, table, counts, ctypes.byref(step), inputs, len(counts))
        return hidden

    def _inputs_for(self, positions: int) -> Any:
        """Return the kernels' `Inputs` structure. Its rotary tables have at least `positions` positions."""
        embedding = self._embedding
        assert positions <= embedding.context
        if self._inputs is None or self._inputs[0].positions < positions:
            most = min(embedding.context, 1 << positions.bit_length())
            each = embedding.rotary(most)
            tables = {id(both): both for both in each if both is not None}
            numbers = {one: number for number, one in enumerate(tables, 1)}
            for layer, both in zip(self.layers, each, strict=True):
                layer.rope = numbers[id(both)] if layer.rope else 0
            # [tables, 2 (cosines, sines), positions, R]
            rotations = torch.stack([torch.cat(both) for both in tables.values()]) if tables else None
            parts = [embedding.tokens, embedding.learned, rotations]
            assert all(part is None or part.dtype == self._dtype for part in parts)
            assert embedding.learned is None or len(embedding.learned) >= most
            size = 0 if rotations is None else rotations.shape[3]
            sizes = len(embedding.tokens), most, size, len(tables)
            self._inputs = _Inputs(*map(_address, parts), *sizes, embedding.scale), rotations
        return self._inputs[0]

    def prompts(
        self,
        layer: int,  # index of the layer
        hidden: Tensor,  # hidden states [1, N, E]; the layer's output overwrites them
        rotary: Rotary,  # cosines and sines [1, N, R], or None
        starts: Tensor,  # int64 [P + 1], index of each prompt's first token, and N at the end
        places: Tensor,  # int64 [B], index of each row in the buffers
        sources: Tensor,  # int64 [B], index of each row's prompt
        buffers: Tensor | None,  # KV cache of the rows [2, R, H, K, D]; None: do not store keys and values
        prefix: PackedPrefix | None = None,  # prefix of all prompts; it is copied to each row's first slots
    ) -> None:
        """Run one layer over concatenated prompts."""
        tokens = hidden.shape[1]
        assert hidden.shape == (1, tokens, self._hidden) and hidden.dtype == self._dtype and int(starts[-1]) == tokens
        assert places.shape == sources.shape and places.dtype == sources.dtype == starts.dtype == torch.int64
        assert not torch.is_grad_enabled()
        prompts = _Prompts(hidden=_address(hidden), starts=_address(starts), places=_address(places))
        prompts.sources, prompts.prompts, prompts.rows = _address(sources), len(starts) - 1, len(sources)
        tables = self._set_rotary(prompts, rotary, tokens)
        begins = 0
        if prefix is not None:
            begins = prompts.prefix_tokens = prefix.states.shape[2]
            prompts.prefix_keys, prompts.prefix_values = _address(prefix.keys), _address(prefix.values)
        if buffers is not None:
            if prefix is not None:
                buffers[:, places, :, :begins] = prefix.states[:, None]
            assert buffers.shape[2] == self._heads and buffers.dtype == self._dtype and buffers.is_contiguous()
            assert int(places.max()) < buffers.shape[1] and begins + int(starts.diff().max()) <= buffers.shape[3]
            keys, values = buffers[:, :, :, begins:]
            prompts.keys, prompts.values = keys.data_ptr(), values.data_ptr()
            prompts.buffer_row, prompts.buffer_head = keys.stride()[:2]
        kernel("prompts", self._dtype)(ctypes.byref(self.layers[layer]), ctypes.byref(prompts))
        del tables  # kept alive until here, because the structure holds only their addresses

    def packed_prefix(self, states: Tensor) -> PackedPrefix:
        """Pack a prefix's keys and values [2, H, C, D] for the kernels. Return them with the packed copies."""
        _, heads, tokens, size = states.shape
        assert (heads, size) == (self._heads, self._head_dim) and states.dtype == self._dtype and tokens > 0
        width, wide = (-(-count // PANEL) * PANEL for count in (tokens, size))
        made = (torch.zeros(heads, count, width, dtype=self._dtype) for count in (size, wide))
        packed = PackedPrefix(states, *made)
        kernel("pack_prefix", self._dtype)(*map(_address, (*states, *packed[1:])), tokens, heads, size)
        return packed

    def _set_rotary(self, target: Any, rotary: Rotary, tokens: int) -> Rotary:
        """Store addresses of cosines and sines [B, S, R] in `target`. Return tensors to keep alive during the call."""
        if rotary is None:
            assert not any(layer.rope for layer in self.layers)
            return None
        cosines, sines = (table.reshape(-1, table.shape[-1]).contiguous() for table in rotary)
        if len(cosines) < tokens:  # all rows have the same cosines and sines
            cosines, sines = (table.repeat(tokens // len(cosines), 1) for table in (cosines, sines))
        assert cosines.shape == sines.shape and cosines.dtype == sines.dtype == self._dtype
        target.cosines, target.sines, target.rotary = _address(cosines), _address(sines), cosines.shape[1]
        return cosines, sines

    def half(self, layer: int, hidden: Tensor, rotary: Rotary, attended: Tensor | None) -> Tensor:
        """Run the part of a layer that precedes or follows attention. hidden: [N, E]. rotary: tables [1, N, R].

        attended: None: run the first part, and return queries, keys and values [N, Q + 2 H, D]. Otherwise the output of
            attention [N, Q D]: run the last part, overwrite `hidden` with the layer's output, and return `hidden`.
        """
        fields, tokens = self.layers[layer], len(hidden)
        heads = fields.heads * (fields.group + 2)
        target = _Prompts()
        tables = None if attended is not None else self._set_rotary(target, rotary, tokens)
        found = hidden if attended is not None else torch.empty(tokens, heads, fields.size, dtype=self._dtype)
        assert hidden.dtype == self._dtype and not torch.is_grad_enabled()
        kernel("half", self._dtype)(
            ctypes.byref(fields),
            _address(hidden),
            *(target.cosines, target.sines, None if attended is not None else _address(found), _address(attended)),
            *(tokens, target.rotary),
        )
        del tables
        return found


class StackedLayer(nn.Module):
    """One layer of a stack, with the interface of a transformers layer. torch computes its attention."""

    def __init__(self, stack: Stack, number: int) -> None:
        super().__init__()
        self.stack, self.number = stack, number

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | Attendance | None,
        position_embeddings: Rotary,
        past_key_values: Any = None,
        **more: Any,
    ) -> Tensor:
        """Run the layer: [B, S, E] -> [B, S, E]. attention_mask: None for causal attention."""
        stack, fields, (rows, columns, size) = self.stack, self.stack.layers[self.number], hidden.shape
        flat = hidden.reshape(-1, size).clone()
        states = stack.half(self.number, flat, position_embeddings, None).unflatten(0, (rows, columns)).transpose(1, 2)
        heads = fields.heads * fields.group
        query, key, value = states.split([heads, fields.heads, fields.heads], dim=1)
        if isinstance(attention_mask, Attendance):
            attended, _ = packed_attention.attend(self, query, key, value, attention_mask, scaling=fields.scale)
        else:
            if past_key_values is not None:
                key, value = past_key_values.update(key, value, self.number)
            causal = attention_mask is None and columns > 1
            attended = scaled_dot_product_attention(
                query, key, value, attention_mask, is_causal=causal, scale=fields.scale, enable_gqa=fields.group > 1
            ).transpose(1, 2)
        return stack.half(self.number, flat, None, attended.reshape(len(flat), -1)).view(hidden.shape)


def _packed(weights: LayerWeights, int8: bool) -> tuple[dict[str, Any], list[PanelProduct], list[Tensor | None]]:
    """Return the contents of a layer's `_Layer`: numbers by field name, products, and norm weights in field order."""

    def pack(part: Projection) -> PanelProduct:
        made = product(*part.joined(), int8=int8)
        assert isinstance(made, PanelProduct)
        return made

    def epsilon(*norms: NormWeights | None) -> float:
        """Return the common epsilon of the norms; 0 if there are no norms."""
        found = {norm.eps for norm in norms if norm is not None}
        assert len(found) <= 1
        return found.pop() if found else 0.0

    parts: list[Tensor | None] = []
    for norm in (weights.attention_norm, weights.mlp_norm):
        parts += (None, None) if norm is None else (norm.weight, norm.bias)
    others = (weights.query_norm, weights.key_norm, weights.attention_after, weights.mlp_after)
    parts += [None if norm is None else norm.weight for norm in others]
    query_norm, down = weights.query_norm, weights.down.shape[1]
    assert weights.up.outputs == down * (2 if weights.gated else 1)
    fields = {
        "hidden": weights.qkv.shape[1],
        "heads": weights.kv_heads,
        "group": weights.query_heads // weights.kv_heads,
        "size": weights.head_dim,
        "intermediate": down,
        "gated": 2 if weights.activation == GELU else int(weights.gated),
        "norms_residual": weights.norms_residual,
        "joined_heads": query_norm is not None and len(query_norm.weight) != weights.head_dim,
        "rope": weights.rope,
        "window": weights.window or 0,
        "attention_epsilon": epsilon(weights.attention_norm, weights.attention_after),
        "mlp_epsilon": epsilon(weights.mlp_norm, weights.mlp_after),
        "head_epsilon": epsilon(query_norm, weights.key_norm),
        "scale": weights.scaling,
    }
    products = [pack(part) for part in (weights.qkv, weights.output, weights.up, weights.down)]
    fields["quantized"] = isinstance(products[0], QuantizedProduct)
    return fields, products, parts
