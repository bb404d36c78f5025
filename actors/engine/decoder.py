"""Runs chosen layers of a Hugging Face decoder-only model. Module `families` lists the supported model families.

This module knows no schedules, sampling or requests: callers choose which layer runs over which rows and columns.
Shapes: B rows, S columns (tokens of a row in this pass), N tokens of a pass without padding, K keys attended to,
E hidden size, H key/value heads, D head size, R rotary size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from actors.engine.cache import PrefixKeys, SkipCache
from actors.engine.model.families import ModelShape, Rotary, context_length, family_of
from actors.engine.torch.packed_attention import Attendance


def part(rotary: Rotary, rows: Any = slice(None), columns: Any = slice(None)) -> Rotary:
    """Return the selected rows and columns of a layer's rotary cosines and sines [B, S, R]."""
    return None if rotary is None else (rotary[0][rows, columns], rotary[1][rows, columns])


def causal_mask(columns: int, prefix: int, window: int | None, device: torch.device) -> Tensor:
    """Return a mask [1, 1, columns, prefix + columns], true for keys to attend to. prefix, columns: numbers of tokens.

    window: how many of the latest keys a token attends to, including its own key; None: all keys.
    """
    keys = torch.arange(prefix + columns, device=device)
    queries = keys[prefix:, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask[None, None]


def _head_of(model: PreTrainedModel, tokens: int) -> nn.Module:
    """Return the model's vocabulary head, cut to the first `tokens` token ids. A padded head has more outputs."""
    whole: Any = model.get_output_embeddings()
    if tokens == model.config.vocab_size:
        return whole  # type: ignore[no-any-return]
    head = nn.Linear(whole.in_features, tokens, bias=whole.bias is not None, device="meta")
    head.weight = nn.Parameter(whole.weight.detach()[:tokens], requires_grad=False)
    if whole.bias is not None:
        head.bias = nn.Parameter(whole.bias.detach()[:tokens], requires_grad=False)
    return head


class Decoder:
    """Runs a causal language model one layer at a time, with transformers' modules.

    Args:
        model: The model.
        tokens: Number of token ids for which logits are computed, from id 0 on; None: all.

    Raises:
        UserError: The model's family is not supported.
    """

    def __init__(self, model: PreTrainedModel, tokens: int | None = None) -> None:
        config = model.config
        self.family = family_of(config)
        self.model = model
        self.blocks = list(self.family.layers(model))
        self.num_layers = len(self.blocks)
        shape = ModelShape.of(config)
        self.kv_heads, self.head_dim = shape.kv_heads, shape.head_dim
        self.vocab_size = min(tokens or shape.vocab, shape.vocab)
        self.windows = self.family.windows(config)
        self.context_length = context_length(config)
        self.logit_cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.head = _head_of(model, self.vocab_size)
        self._adds_masks = config._attn_implementation == "eager"  # eager attention adds the mask to the scores
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype

    @property
    def token_bytes(self) -> int:
        """Cache bytes per token and layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Sequence[Rotary]]:
        """Return the embeddings [B, S, E] of `ids` [B, S], and each layer's rotary cosines and sines [B, S, R]."""
        hidden = self.family.embed(self.model, ids, positions)
        return hidden, self.rotary(hidden, positions)

    def rotary(self, hidden: Tensor, positions: Tensor) -> Sequence[Rotary]:
        """Return each layer's rotary cosines and sines [B, S, R], with the dtype and device of `hidden`."""
        return self.family.rotary(self.model, hidden, positions)

    def run_layer(
        self,
        layer: int,  # index of the layer
        hidden: Tensor,  # [B, S, E]
        rotary: Rotary,  # cosines and sines of this layer
        # bool [rows or 1, 1, queries, keys], with the layer's sliding window applied: true for a key to attend to.
        # None: all keys for a single query, else causal attention. `Attendance`: a mask for `packed_attention`
        mask: Tensor | Attendance | None,
        # stores new keys and values, and returns all keys and values to attend to; None: attend to the new ones only
        cache: SkipCache | PrefixKeys | None = None,
    ) -> Tensor:
        """Run one layer over hidden states [B, S, E]."""
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

    def _added_mask(self, mask: Tensor | None, hidden: Tensor) -> Tensor | None:
        """Convert a bool mask to an additive mask: 0 for visible keys, the dtype's lowest number for masked keys.

        mask: None means causal attention. For a single token this is attention to all keys, and the result is None.
        """
        if mask is None:
            if hidden.shape[1] == 1:
                return None
            mask = causal_mask(hidden.shape[1], 0, None, hidden.device)
        return torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, the vocabulary head and, if the config sets one, a soft cap: [N, E] -> [N, V]."""
        output: Tensor = self.head(self.finish(hidden))
        if self.logit_cap is not None:
            output = torch.tanh(output / self.logit_cap) * self.logit_cap
        return output

    def finish(self, hidden: Tensor) -> Tensor:
        """Apply the final norm; return the input [N, E] of the vocabulary head."""
        return self.family.finish(self.model, hidden)

    def prefill(
        self,
        ids: Tensor,
        positions: Tensor,
        last: Tensor,
        layers: Sequence[int],
        cache: SkipCache | PrefixKeys,
        prefix_columns: int = 0,
    ) -> Tensor:
        """Run `layers` over right-padded prompts [B, S]; return the logits [B, V] at each row's column in `last` [B].

        The causal mask hides padding from a row's own tokens, because padding comes last. prefix_columns: number of
        tokens of a shared prefix. `cache` must return the prefix's keys before the prompts' keys, and `positions` must
        begin after the prefix.
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
        """Run one token of each row (oldest row first); return hidden states [rows, hidden size] after the last layer.

        tokens, positions: one per row. rows_per_layer: for each layer, how many of the youngest rows run the layer.
        These rows are one contiguous slice, because depth never rises along a row.
        """
        ids, places = (torch.tensor(column, device=self.device)[:, None] for column in (tokens, positions))
        hidden, rotary = self.embed(ids, places)
        for layer, rows in enumerate(rows_per_layer):
            if rows:
                youngest = slice(len(ids) - rows, None)
                output = self.run_layer(
                    layer, hidden[youngest], part(rotary[layer], youngest), cache.mask(layer, rows), cache
                )
                if rows == len(ids):
                    hidden = output
                else:
                    hidden[youngest] = output
        return hidden[:, 0]
