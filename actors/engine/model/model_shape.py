"""A model's sizes, from its config alone; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model, in numbers."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    context: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """config: of a supported family."""
        heads: int = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            query_heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            # OPT, GPT-2 (null is four times the width), all others
            feed_forward=getattr(config, "ffn_dim", None)
            or getattr(config, "intermediate_size", None)
            or getattr(config, "n_inner", None)
            or 4 * config.hidden_size,
            vocab=config.vocab_size,
            context=config.max_position_embeddings,
        )
