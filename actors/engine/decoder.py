"""Runs chosen layers of a Hugging Face decoder-only model; the only file that knows model families.

It does not know schedules, sampling or requests: callers say which layer runs over which rows and columns.
Shapes: B rows, S columns (tokens of a row in this pass), E hidden size, H key/value heads, D head size,
V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

Rotary = tuple[Tensor, Tensor] | None


class KeyValueStore(Protocol):
    """What a library attention layer asks of a cache, and the masks that go with what it returns."""

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Bool [rows, 1, 1, K] for a step of the `rows` youngest rows; None: all keys are seen."""
        ...

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store this pass's keys and values [B, H, S, D]; return those to attend to [B, H, K, D]."""
        ...


@dataclass(frozen=True)
class Family:
    """How to reach the parts of one model family. A further family is one more of these.

    embed: (model, ids [B, S], positions [B, S]) -> hidden states [B, S, E].
    rotary: (model, hidden states, positions) -> cosines and sines [B, S, D], None if the family has none.
    finish: (model, hidden states [N, E]) -> what the vocabulary head takes.
    unsupported: config -> why this checkpoint cannot be run exactly, None if it can.
    """

    layers: Callable[[Any], nn.ModuleList]
    embed: Callable[[Any, Tensor, Tensor], Tensor]
    rotary: Callable[[Any, Tensor, Tensor], Rotary]
    finish: Callable[[Any, Tensor], Tensor]
    unsupported: Callable[[PretrainedConfig], str | None] = lambda config: None


def _opt_embed(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    decoder = model.model.decoder
    hidden: Tensor = decoder.embed_tokens(ids)
    if decoder.project_in is not None:
        hidden = decoder.project_in(hidden)
    # the mask argument is unused when positions are given
    learned: Tensor = decoder.embed_positions(None, position_ids=positions)
    return hidden + learned


def _opt_finish(model: Any, hidden: Tensor) -> Tensor:
    decoder = model.model.decoder
    if decoder.final_layer_norm is not None:
        hidden = decoder.final_layer_norm(hidden)
    if decoder.project_out is not None:
        hidden = decoder.project_out(hidden)
    return hidden


def _llama_unsupported(config: PretrainedConfig) -> str | None:
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"rope_type {kind!r} changes earlier keys as a row grows, which no cache can hold"
    return None


FAMILIES: dict[str, Family] = {
    "llama": Family(
        layers=lambda model: model.model.layers,
        embed=lambda model, ids, positions: model.model.embed_tokens(ids),
        rotary=lambda model, hidden, positions: model.model.rotary_emb(hidden, position_ids=positions),
        finish=lambda model, hidden: model.model.norm(hidden),
        unsupported=_llama_unsupported,
    ),
    "opt": Family(
        layers=lambda model: model.model.decoder.layers,
        embed=_opt_embed,
        rotary=lambda model, hidden, positions: None,
        finish=_opt_finish,
    ),
}


def check_supported(config: PretrainedConfig) -> None:
    """ValueError, listing the supported families, if a model of this config cannot be run."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"model_type {config.model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    if reason := family.unsupported(config):
        raise ValueError(f"model_type {config.model_type!r}: {reason}")


class Decoder:
    """The parts of a causal language model, run one layer at a time.

    Raises ValueError for a family that is not supported.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        check_supported(config)
        self.model = model
        self.family = FAMILIES[config.model_type]
        self.blocks = list(self.family.layers(model))
        self.num_layers = len(self.blocks)
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.context_length: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.device: torch.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype

    def compile(self) -> None:
        """Compile every layer with torch.compile, for any batch size and length; needs a C++ compiler on CPU."""
        for block in self.blocks:
            block.compile(dynamic=True)

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotary]:
        """ids, positions [B, S] -> hidden states [B, S, E] and rotary cosines and sines [B, S, D]."""
        hidden = self.family.embed(self.model, ids, positions)
        return hidden, self.family.rotary(self.model, hidden, positions)

    def run_layer(
        self, layer: int, hidden: Tensor, rotary: Rotary, mask: Tensor | None, cache: KeyValueStore | None = None
    ) -> Tensor:
        """One layer over hidden states [B, S, E].

        mask: bool [B or 1, 1, S, K], true where a query may attend to a key; None is causal (K = S).
        """
        output: Tensor = self.blocks[layer](
            hidden,
            attention_mask=mask,
            position_embeddings=rotary,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and vocabulary head over [N, E] -> [N, V]."""
        output: Tensor = self.model.get_output_embeddings()(self.family.finish(self.model, hidden))
        return output

    def prefill(
        self, ids: Tensor, positions: Tensor, last: Tensor, layers: Sequence[int], cache: KeyValueStore
    ) -> Tensor:
        """Run `layers` over right-padded prompts [B, S]; logits [B, V] at each row's column `last` [B].

        Padding lies behind a row's own tokens, so the causal mask alone keeps it out of their attention.
        """
        hidden, rotary = self.embed(ids, positions)
        for layer in layers:
            hidden = self.run_layer(layer, hidden, rotary, None, cache)
        return self.logits(hidden[torch.arange(len(last), device=last.device), last])

    def step(self, ids: Tensor, positions: Tensor, rows_per_layer: Sequence[int], cache: KeyValueStore) -> Tensor:
        """One token for B rows, oldest first; logits [B, V].

        ids, positions: [B, 1]. rows_per_layer: how many of the youngest rows each layer runs for; depth
        never rises along a row, so they are one contiguous slice.
        """
        hidden, rotary = self.embed(ids, positions)
        batch = len(ids)
        for layer, rows in enumerate(rows_per_layer):
            if rows == 0:
                continue
            first = batch - rows
            part = None if rotary is None else (rotary[0][first:], rotary[1][first:])
            output = self.run_layer(layer, hidden[first:], part, cache.mask(layer, rows), cache)
            if first == 0:
                hidden = output
            else:
                hidden[first:] = output
        return self.logits(hidden[:, 0])
