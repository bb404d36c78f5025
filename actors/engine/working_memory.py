"""What a GPU holds beside weights and cache while rows are in flight, and the limits that hold it down.

Counted by operation, not by what torch's allocator makes of it; a test holds it against the real tensors.
"""

from __future__ import annotations

from typing import Any

PIECE_TOKENS = 8192  # of prompts whose activations are there at once: products are bound by arithmetic long before
KEY_TOKENS = 2 * PIECE_TOKENS  # that they see at once: a beginning that prompts share lies before each of them
PREFIX_TOKENS = 4096  # of a beginning that prompts share, whose keys and values are kept; what is longer is their own
DRAWN_NUMBERS = 2**23  # logits from which tokens are drawn at once
DRAWN_BYTES = 80  # that each of these takes: in float32 and float64, sorted, summed up
LONG_PROMPT = 2**15  # tokens of the longest prompt that is counted on, where the context has so many


def working_bytes(config: Any, itemsize: int, max_rows: int) -> int:
    """Most bytes of activations of a pass over prompts, or of a step of `max_rows` rows, of a GPU engine with pages.

    config: of a model that it takes. itemsize: bytes of a number.
    """
    width: int = config.hidden_size
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or width // heads
    inner: int = getattr(config, "ffn_dim", None) or config.intermediate_size
    piece = PIECE_TOKENS * (8 * width + 3 * inner)
    seen = max(KEY_TOKENS, min(config.max_position_embeddings, LONG_PROMPT))
    # hidden states; keys and values of the layer, with those before them, and as many as there are queries
    prompt = seen * (width + 4 * kv_heads * head_dim + 2 * heads * head_dim)
    shared = min(config.max_position_embeddings, PREFIX_TOKENS) * config.num_hidden_layers * 2 * kv_heads * head_dim
    logits: int = max_rows * config.vocab_size
    # those of a pass and of a step's graphs, which keep theirs
    numbers: int = piece + prompt + shared + 2 * logits
    return itemsize * numbers + 2 * DRAWN_BYTES * min(DRAWN_NUMBERS, logits)
