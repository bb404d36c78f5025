"""What decode and prefill must move and make on a GPU, and the least time for it. See gpu_speed.py.

    .venv/bin/python tests/benchmarks/gpu_account.py [--shape llama-3-8b] [--rows 1,32,128,512] [--speed 1]

counts, without a GPU, the gigabytes of a step with weights and cache of 16 and of 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import roofline
import torch
from gpu_parts import NEW, PROMPT, build, rows_of, schedule_of

from actors.engine.checkpoint.compressed import Kind
from actors.engine.decoder import Decoder
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import token_bytes
from actors.engine.schedules.schedule import Schedule
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


def layer_numbers(decoder: Decoder) -> list[int]:
    """Numbers of the products of each layer of a model with the library's layers."""
    return [sum(one.numel() for one in block.parameters() if one.dim() == 2) for block in decoder.blocks]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--rows", default=[1, 32, 128, 512], type=lambda text: [int(x) for x in text.split(",")])
    parser.add_argument("--speed", default=1.0, type=float)
    given = parser.parse_args()
    decoder = Decoder(build(given.shape, torch.device("meta")))
    numbers = layer_numbers(decoder), decoder.head.weight.numel()
    for count in given.rows:
        rows = rows_of("equal", count, decoder.vocab_size)
        schedule = schedule_of(decoder, given.speed, rows)
        found = {}
        for weights, cache in itertools.product((16, 8), (16, 8)):
            bits = {"eight_bits": weights == 8, "kv_cache": "int8" if cache == 8 else None}
            account = Account(decoder, *numbers, roofline.Ceilings(1.0, 1.0), **bits)
            found[weights, cache] = account.decode(schedule, rows)[0] / (NEW - 1) / 1e9
        shown = (f"{bits} bits: {size:.1f} GB ({found[16, 16] / size:.2f})" for bits, size in found.items())
        print(f"{count:4} rows, weights and cache of", ", ".join(shown))


if __name__ == "__main__":
    main()
