"""Runs chosen layers of a Hugging Face decoder-only model, of any family in `families`.

It does not know schedules, sampling or requests: callers say which layer runs over which rows and columns.
Shapes: B rows, S columns (tokens of a row in this pass), N tokens of a pass without padding, P prompts, K keys attended
to, E hidden size, H key/value heads, D head size, R rotary size, V vocabulary size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.cache import CacheKernels, SkipCache, SlotShape
from actors.engine.cpu.products import PackedLinear, PanelProduct, give_memory_back, pack_linears, packed_linear
from actors.engine.cpu.screen import Screen, can_screen
from actors.engine.cpu.stack import Embedding, Stack, can_stack, normalize
from actors.engine.library.packed_attention import Attendance
from actors.engine.model.compressed import codes_of, set_codes
from actors.engine.model.families import ModelShape, Rotary, context_length, family_of, has_weights, layer_weights
from actors.engine.model.layer_weights import NormWeights
from actors.engine.sampling.sampler import argmax


class KeyValueStore(Protocol):
    """The interface of a cache to the library's attention layers, and the masks of the keys that it returns."""

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Bool [rows, 1, 1, K] for a step of the `rows` youngest rows; None: they attend to all keys."""
        ...

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this pass's keys and values [B, H, S, D]; return those to attend to [B, H, K, D]."""
        ...


def part(rotary: Rotary, rows: Any = slice(None), columns: Any = slice(None)) -> Rotary:
    """A layer's cosines and sines [B, S, R] for some rows and columns."""
    return None if rotary is None else (rotary[0][rows, columns], rotary[1][rows, columns])


def causal_mask(columns: int, prefix: int, window: int | None, device: torch.device) -> Tensor:
    """Bool [1, 1, S, prefix + S]: which keys the tokens at positions prefix ... prefix + S - 1 of their rows attend to.

    Keys lie at their positions. window: how many of the latest keys, a token's own included; None is all.
    """
    keys = torch.arange(prefix + columns, device=device)
    queries = keys[prefix:, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask[None, None]


class Decoder:
    """The parts of a causal language model, run one layer at a time.

    Raises UserError for a family that is not supported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.family = family_of(config)
        self.model = model
        self.blocks = list(self.family.layers(model))
        self.num_layers = len(self.blocks)
        shape = ModelShape.of(config)
        self.kv_heads, self.head_dim, self.vocab_size = shape.kv_heads, shape.head_dim, shape.vocab
        self.windows = self.family.windows(config)
        self.context_length = context_length(config)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.head = model.get_output_embeddings()
        self.stack: Stack | None = None  # the CPU's layers, in place of the library's
        self.screen: Screen | None = None  # made at its first use: a job that samples does without
        self._screened: Tensor | None = None  # the head's weight [V, E], where the CPU can screen it
        self._last_norm: NormWeights | None = None  # of the CPU, in place of the library's
        self._adds_masks = config._attn_implementation == "eager"
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype

    @property
    def rows_independent(self) -> bool:
        """Whether the numbers of a row are the same bits, whatever rows share its passes and steps.

        They are where kernels run whole layers; the library's products round by the number of rows.
        """
        return self.stack is not None

    def _rotary_table(self, positions: int) -> Rotary:
        """Return cosines and sines [positions, R] of the first positions; all layers of a stack have these."""
        hidden = torch.empty(1, 1, 1, dtype=self.dtype, device=self.device)
        table = self._rotary(hidden, torch.arange(positions, device=self.device)[None])[0]
        return None if table is None else (table[0][0].contiguous(), table[1][0].contiguous())

    @property
    def token_bytes(self) -> int:
        """Cache bytes of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def slots(self, shape: SlotShape, kernels: CacheKernels | None = None, memory: Tensor | None = None) -> SkipCache:
        """Return a cache for this model; see `SkipCache`."""
        return SkipCache(
            *shape,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
            windows=self.windows,
            kernels=kernels,
            memory=memory,
        )

    def keep_tokens(self, count: int) -> None:
        """Compute no logits of tokens from `count` on: a padded vocabulary has them, the tokenizer does not."""
        if count >= self.vocab_size:
            return
        whole, codes = self.head, codes_of(self.head)
        self.vocab_size = count
        self.head = nn.Linear(whole.in_features, count, bias=whole.bias is not None, device="meta")
        self.head.weight = nn.Parameter(whole.weight.detach()[:count], requires_grad=False)
        if whole.bias is not None:
            self.head.bias = nn.Parameter(whole.bias.detach()[:count], requires_grad=False)
        if codes is not None:
            set_codes(self.head, replace(codes, scales=codes.scales[:count]))

    def prepare_for_cpu(self, *, int8: bool = False) -> None:
        """Replace layers and head by ones that are faster on CPUs, for inference alone; not reversible.

        Args:
            int8: All linear layers and the head with 8 bits, see `cpu.products`; requires bfloat16 on a CPU, as layers
                with codes (`compressed.codes_of`) do, which have 8 bits in any case.
        """
        assert not int8 or (self.device.type == "cpu" and self.dtype == torch.bfloat16)
        if self.device.type != "cpu":
            return
        config, blocks = self.model.config, self.family.layers(self.model)
        describe = functools.partial(layer_weights, config)
        kind = self.dtype, self.device
        self.blocks = []  # nothing may refer to a layer when its memory is given back
        if has_weights(config) and all(can_stack(describe(block), *kind, int8=int8) for block in blocks):
            tables, last = self.family.embeddings(self.model), self.family.last_norm(self.model)
            embedding = None
            if tables is not None:
                tokens, learned = (None if table is None else table.detach() for table in tables)
                assert tokens is not None
                embedding = Embedding(tokens, learned, self._rotary_table, self.context_length)
            self.stack = Stack(blocks, describe, embedding, int8=int8)
            self._last_norm = None if last is None else NormWeights.of(last)
        elif self.dtype == torch.bfloat16:
            for block in blocks:
                pack_linears(block, int8=int8)
                give_memory_back()
        self.blocks = list(blocks)
        if self.stack is None and self.dtype != torch.bfloat16:
            return
        shared = self.head.weight is self.model.get_input_embeddings().weight
        weight, plain = self.head.weight.detach(), self.logit_cap is None and self.head.bias is None
        self.head = packed_linear(self.head, int8=int8)
        # the screen's bound holds for the kernel's product
        own = isinstance(self.head, PackedLinear) and type(self.head.product) is PanelProduct
        if plain and own and self._last_norm is not None and can_screen(weight):
            self._screened = weight
        if not shared:
            self.model.set_output_embeddings(self.head)  # frees the weight itself

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Sequence[Rotary]]:
        """ids, positions [B, S] -> hidden states [B, S, E] and each layer's rotary cosines and sines [B, S, R]."""
        hidden = self.family.embed(self.model, ids, positions)
        return hidden, self._rotary(hidden, positions)

    def _rotary(self, hidden: Tensor, positions: Tensor) -> Sequence[Rotary]:
        """Return the rotary tables of `embed`; only the dtype and device of `hidden` count."""
        rotary = self.family.rotary(self.model, hidden, positions)
        if self.stack is not None and rotary[0] is not None and rotary[0][0].dtype != hidden.dtype:
            # OLMo 2 has float32; a stack computes in one dtype
            rotary = [(rotary[0][0].to(hidden.dtype), rotary[0][1].to(hidden.dtype))] * self.num_layers
        return rotary

    def run_layer(
        self,
        layer: int,
        hidden: Tensor,
        rotary: Rotary,
        mask: Tensor | Attendance | None,
        cache: KeyValueStore | None = None,
    ) -> Tensor:
        """One layer over hidden states [B, S, E].

        Args:
            layer: its index.
            hidden: [B, S, E].
            rotary: the layer's own.
            mask: bool [B or 1, 1, S, K], true where a query may attend to a key, with the layer's window; None is
                causal if K = S, and all keys if S = 1. An `Attendance` if the attention is that of `packed_attention`.
            cache: stores the layer's keys and values, and returns those to attend to; None: the pass's own.
        """
        if self._adds_masks and not isinstance(mask, Attendance):
            mask = self._added_mask(mask, hidden)
        output: Tensor = self.blocks[layer](
            hidden,
            attention_mask=mask,
            position_embeddings=rotary,
            use_cache=cache is not None,
            **{self.family.cache_argument: cache},
        )
        return output

    def skip_layer(self, layer: int, hidden: Tensor, skipping: Tensor) -> Tensor:
        """Hidden states [1, N, E] behind a layer that the tokens `skipping`, bool [N], do not run: unchanged.

        Called by `token_tree` alone, so that a subclass can try another way past a layer.
        """
        return hidden

    def _added_mask(self, mask: Tensor | None, hidden: Tensor) -> Tensor | None:
        """The mask for eager attention: numbers added to the scores, and never None for causal."""
        if mask is None:
            if hidden.shape[1] == 1:
                return None
            mask = causal_mask(hidden.shape[1], 0, None, hidden.device)
        if mask.dtype != torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and vocabulary head over [N, E] -> [N, V], capped if the family does so."""
        output: Tensor = self.head(self._finish(hidden))
        if self.logit_cap is not None:
            output = torch.tanh(output / self.logit_cap) * self.logit_cap
        return output

    def _finish(self, hidden: Tensor) -> Tensor:
        """Return the head's input [N, E]."""
        if self._last_norm is None:
            return self.family.finish(self.model, hidden)
        return normalize(hidden, self._last_norm)

    def likeliest(self, hidden: Tensor) -> list[int]:
        """Return the tokens of the highest of `logits` of [N, E], the first of equal ones.

        Most logits are not computed where the CPU can screen the head.
        """
        if self._screened is None or self._last_norm is None:
            tokens = argmax(self.logits(hidden))
        else:
            self.screen = self.screen or Screen(self._screened, self._last_norm)
            tokens = self.screen(hidden)
            undecided = (tokens < 0).nonzero()[:, 0]
            if len(undecided):
                tokens[undecided] = argmax(self.logits(hidden[undecided]))
        found: list[int] = tokens.tolist()
        return found

    def prefill(
        self,
        ids: Tensor,
        positions: Tensor,
        last: Tensor,
        layers: Sequence[int],
        cache: KeyValueStore,
        prefix_columns: int = 0,
    ) -> Tensor:
        """Run `layers` over right-padded prompts [B, S]; logits [B, V] at each row's column `last` [B].

        prefix_columns: C tokens before column 0 of every row; the cache returns their keys first, C + S in all, and
        positions begin at C. Padding lies behind a row's own tokens, so that causality keeps it out of their attention.
        """
        hidden, rotary = self.embed(ids, positions)
        columns = ids.shape[1]
        masks = {
            window: None
            if prefix_columns == 0 and (window is None or window >= columns)
            else causal_mask(columns, prefix_columns, window, ids.device)
            for window in set(self.windows)
        }
        for layer in layers:
            hidden = self.run_layer(layer, hidden, rotary[layer], masks[self.windows[layer]], cache)
        return self.logits(hidden[torch.arange(len(last), device=last.device), last])

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], rows_per_layer: Sequence[int], cache: SkipCache
    ) -> Tensor:
        """Run one token of B rows, oldest first; return hidden states [B, E] behind the last layer.

        tokens, positions: [B]. rows_per_layer: how many of the youngest rows each layer runs for; depth never rises
        along a row, so they are one contiguous slice.
        """
        ids, places = (torch.tensor(column, device=self.device)[:, None] for column in (tokens, positions))
        hidden, rotary = self.embed(ids, places)
        batch = len(ids)
        for layer, rows in enumerate(rows_per_layer):
            if rows == 0:
                continue
            first = batch - rows
            youngest = part(rotary[layer], slice(first, None))
            output = self.run_layer(layer, hidden[first:], youngest, cache.mask(layer, rows), cache)
            if first == 0:
                hidden = output
            else:
                hidden[first:] = output
        return hidden[:, 0]
