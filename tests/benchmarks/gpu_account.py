"""What decode and prefill must move and make on a GPU, and the least time for it. See gpu.py."""

from __future__ import annotations

from collections.abc import Sequence

import roofline
from gpu_parts import NEW, PROMPT

from actors.engine.compressed import Kind
from actors.engine.decoder import Decoder
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import token_bytes
from actors.engine.schedule import Schedule
from actors.engine.types import Request


class Account:
    """Bytes and FLOPs that decode must move and make, and the least time for them.

    Args:
        decoder: whose passes are counted.
        weights: numbers of the products of each layer.
        head: numbers of the vocabulary head.
        ceilings: of the device, for 16 bits. Products of 8 bits are counted at the same rate: their bytes bound a step.
        eight_bits: whether weights and head have 8 bits.
        kv_cache: 8 bits of keys and values; None: in the model's dtype.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: Sequence[int],
        head: int,
        ceilings: roofline.Ceilings,
        *,
        eight_bits: bool = False,
        kv_cache: Kind | None = None,
    ) -> None:
        self.decoder, self.weights, self.head, self.ceilings = decoder, weights, head, ceilings
        self.weight_bytes = 1 if eight_bits else decoder.dtype.itemsize
        self.kv_cache = kv_cache

    def decode(self, schedule: Schedule, rows: Sequence[Request]) -> tuple[float, float]:
        """Bytes, and least seconds, of these rows in lock step."""
        item = self.decoder.dtype.itemsize if self.kv_cache is None else 1
        stored = token_bytes(self.decoder.kv_heads, self.decoder.head_dim, item)
        width = self.decoder.model.config.num_attention_heads * self.decoder.head_dim
        lengths = [(len(row.prompt_ids), row.sampling.max_new_tokens) for row in rows]
        moved = least = 0.0
        for position in range(max(new for _, new in lengths) - 1):
            live = [prompt + position + 1 for prompt, new in lengths if position < new - 1]
            parts = [(self.head * self.weight_bytes, 2 * len(live) * self.head)]
            for layer in schedule.layers(position):
                parts.append((self.weights[layer] * self.weight_bytes, 2 * len(live) * self.weights[layer]))
                parts.append((sum(live) * stored, 4 * sum(live) * width))
            moved += sum(one for one, _ in parts)
            least += sum(max(one / self.ceilings.bandwidth, flops / self.ceilings.flops) for one, flops in parts)
        return moved, least

    def prefill(self, rows: Sequence[Request]) -> float:
        """Least seconds of all prompts: bound by arithmetic."""
        tokens = sum(len(row.prompt_ids) for row in rows)
        return 2 * tokens * sum(self.weights) / self.ceilings.flops


def exact_row_bytes(engine: GpuEngine) -> int:
    """Most bytes of keys and values that a row of PROMPT + NEW tokens ever needs, to the token."""
    schedule = engine.schedule
    uses = [schedule.uses(layer, NEW - 1) for layer in range(schedule.num_layers)]
    return engine.token_bytes * max(sum(PROMPT + at + 1 for last in uses if at < last) for at in range(NEW - 1))
