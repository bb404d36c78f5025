"""GPU memory besides weights and cache while rows are in flight, and the limits that bound it.

Counted by operation, not by torch's allocator; a test compares it with the real tensors.
"""

from __future__ import annotations

from typing import Any

from actors.engine.checkpoint.compressed import Kind
from actors.engine.checkpoint.model_shape import ModelShape

PAGE_TOKENS = 16
LONG_SPLITS = 4  # attention programs of a long row and head where every row and head has a program already
CHUNK_TOKENS = 8192  # most tokens of prompts whose activations exist together; products need far fewer to be efficient
KEY_TOKENS = 2 * CHUNK_TOKENS  # most keys that a pass attends to; a shared prefix counts once for each prompt
PREFIX_TOKENS = 4096  # most tokens of a shared prefix whose keys and values are kept; the rest belongs to each prompt
DRAWN_NUMBERS = (
    2**23
)  # most logits from which tokens are sampled together by torch; the GPU's kernel has no temporaries
LONG_ROW = 2**17  # tokens of the longest row that is planned for, if the context has so many
GRAPH_BYTES = 2**30  # of the driver, for CUDA graphs; no more graphs of whole steps are captured than fit it
NODE_BYTES = 2**14  # of the driver, for a kernel of a graph; estimated from others' reports, not measured


def working_bytes(config: Any, itemsize: int, max_rows: int, weights: Kind | None = None) -> int:
    """Most bytes of activations of a prefill pass and of a step of `max_rows` rows, of a GPU engine with pages.

    Args:
        config: of a model that `has_pages`.
        itemsize: bytes of a number.
        max_rows: most rows in flight.
        weights: 8 bits of the products; None: none.
    """
    shape = ModelShape.of(config)
    own_heads, query_heads = shape.kv_heads * shape.head_dim, shape.query_heads * shape.head_dim
    chunk = (CHUNK_TOKENS + max_rows) * (8 * shape.hidden + 3 * shape.feed_forward)
    longest = min(shape.context, LONG_ROW)
    keys = max(KEY_TOKENS, longest)
    # hidden states; keys and values of one layer, with those of the prefix, and repeated for all query heads
    prompt = keys * (shape.hidden + 4 * own_heads + 2 * query_heads)
    prefix = min(shape.context, PREFIX_TOKENS) * shape.layers * 2 * own_heads
    logits = max_rows * shape.vocab
    numbers = chunk + prompt + prefix + 2 * logits  # logits of a pass, and of the step's graphs, which keep theirs
    # float32 with penalties, of a pass and of graphs; int16 counts of tokens; a bit each of masks
    changed = 2 * 4 * logits + 2 * logits + logits // 8
    tables = max_rows * longest * (4 * shape.layers // PAGE_TOKENS + 8)  # int32 a page and layer; int64 a token
    split = 4 * max_rows * query_heads * LONG_SPLITS  # float32 of attention in few programs a row
    rounded = 0  # codes of a product's inputs, and int32 sums
    if weights is not None:
        rounded = (CHUNK_TOKENS + max_rows) * shape.feed_forward
    if weights == "int8":
        rounded += 4 * max((CHUNK_TOKENS + max_rows) * 2 * shape.feed_forward, logits)
    return itemsize * numbers + changed + tables + split + rounded + GRAPH_BYTES
