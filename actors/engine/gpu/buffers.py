"""Buffers of a run on the GPU, and the graphs over them: pages, state of the rows, steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from actors.engine.decoder import Decoder
from actors.engine.gpu.layers import FusedLayer
from actors.engine.gpu.pages import PagedCache, PagePool
from actors.engine.gpu.state import DeviceRows
from actors.engine.gpu.steps import Steps
from actors.engine.schedules.schedule import Schedule

LEAST_TOKENS = 256  # of prompts and of answers that buffers are made for: they serve all shorter rows too


@dataclass
class Buffers:
    """For at most `rows` rows with at most `prompt` tokens of prompt and `most_new` new tokens.

    free_slots: indices into the state that no row has.
    """

    rows: int
    prompt: int
    most_new: int
    cache: PagedCache
    state: DeviceRows
    steps: Steps
    free_slots: list[int] = field(default_factory=list)

    def fit(self, rows: int, prompt: int, most_new: int, pool: PagePool) -> bool:
        """Whether they are large enough, over the pool's present memory."""
        enough = rows <= self.rows and prompt <= self.prompt and most_new <= self.most_new
        return enough and self.cache.count == pool.pages and self.cache.memory is pool.memory


def allocate(
    decoder: Decoder,
    schedule: Schedule,
    pool: PagePool,
    rows: int,
    prompt: int,
    most_new: int,
    *,
    dtype: torch.dtype,
    stop_tokens: int,
    window: int,
    graphs: bool,
) -> Buffers:
    """Buffers over all pages of the pool.

    Args:
        decoder: Its layers are `FusedLayer`s.
        schedule: Layers of each position.
        pool: Memory of the pages.
        rows: Most rows in flight.
        prompt: Most tokens of a prompt.
        most_new: Most new tokens of a row.
        dtype: Of the pages, see `PagedCache`.
        stop_tokens: Most stop tokens of a row that the GPU checks.
        window: More tokens than a row samples between two polls.
        graphs: Whether to capture steps as CUDA graphs.
    """
    cache = PagedCache(
        schedule,
        rows,
        pool.pages,
        prompt,
        most_new,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
        device=decoder.device,
        pool=pool,
    )
    layer = decoder.blocks[0]
    assert isinstance(layer, FusedLayer)
    state = DeviceRows(rows, most_new, stop_tokens, decoder.vocab_size, decoder.device, layer.operations, window=window)
    return Buffers(rows, prompt, most_new, cache, state, Steps(decoder, schedule, cache, state, rows, graphs=graphs))


def rounded(tokens: int) -> int:
    """The smallest power of two that is not below tokens, at least `LEAST_TOKENS`."""
    return max(LEAST_TOKENS, 1 << max(0, tokens - 1).bit_length())
