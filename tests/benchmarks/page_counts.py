"""How many rows a cache in pages holds at once, against slots of full length: the GPU engine itself, over a model that
has a real one's layers and pages but no work to do, on a CPU.

    .venv/bin/python tests/benchmarks/page_counts.py [--gib 100] [--rows 2000] [--speeds 1,3] [--caches 16,8]
        [--pages-alone]
    .venv/bin/python tests/benchmarks/page_counts.py --prefix 1000 --rows 512 [--gib 100]

The second counts the bytes of so many rows in flight at once that begin with the same tokens, with a copy for each and
with one for all, and the rows in flight that a cache of --gib holds of them.

The shape is Llama-3-8B's: 32 layers, pages of 64 KiB, or of 33 KiB with a cache of 8 bits. Prompts of 512 tokens,
answers lognormal (median 300, sigma 0.7, at most 1,536), refill. Time means nothing here; steps do. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from actors.engine.decoder import Decoder
from actors.engine.gpu import reference
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.pages import PAGE_TOKENS, page_bytes, row_pages
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import ScheduleSpec
from actors.engine.types import Completion, Request, SamplingParams

LAYERS, PROMPT, MOST_NEW = 32, 512, 1536
OWN, ANSWER = 64, 128  # tokens behind a prefix, and of the answers to such prompts
REAL_PAGES = {bits: page_bytes(8, 128, bits // 8) for bits in (16, 8)}


class Nothing:
    """The kernels of a layer without their work: which row holds which pages does not ask what lies in them."""

    begin, finish = staticmethod(reference.begin), staticmethod(reference.finish)
    round_rows = staticmethod(reference.round_rows)

    @staticmethod
    def norm(hidden: Tensor, *rest: Any) -> Tensor:
        return hidden

    @staticmethod
    def add(*given: Any) -> None:
        pass

    @staticmethod
    def add_norm(hidden: Tensor, *rest: Any) -> Tensor:
        return hidden

    @staticmethod
    def gate(wide: Tensor) -> Tensor:
        return wide[:, : wide.shape[1] // 2]

    @staticmethod
    def append(states: Tensor, query_heads: int, *rest: Any) -> Tensor:
        return states[:, :query_heads]

    @staticmethod
    def attend(queries: Tensor, *rest: Any) -> Tensor:
        return queries


class Watched(GpuEngine):
    """Counts the rows of every step, and those put back. lengths: after which rows end, which only the device knows."""

    def __init__(self, lengths: list[int], *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.lengths = lengths
        self.flights: list[int] = []
        self.left: list[bool] = []  # whether rows were waiting
        self.returned = 0

    def admit(self, requests: Sequence[Request], prefix: Sequence[int] = ()) -> list[int]:
        tickets = super().admit(requests, prefix)
        assert self._run is not None
        for ticket, request in zip(tickets, requests, strict=True):
            self._run.state.limits[self._slots[ticket]] = self.lengths[request.key]
        return tickets

    def step(self, *, last: bool = False) -> list[tuple[int, Completion]]:
        self.flights.append(len(self.rows))
        self.left.append(not last)
        return super().step(last=last)

    def take_preempted(self) -> list[int]:
        tickets = super().take_preempted()
        self.returned += len(tickets)
        return tickets


def measure(
    decoder: Decoder, speed: float, pages: int, lengths: list[int], horizon: int, *, pages_alone: bool
) -> dict[str, float]:
    """Rows in flight while some were waiting, and the steps that all rows took, in pages and in two kinds of slots."""
    schedule = ScheduleSpec(speedup=speed, horizon=horizon).build(LAYERS)
    used = [PROMPT + schedule.uses(layer, MOST_NEW) for layer in range(LAYERS) if schedule.uses(layer, MOST_NEW)]
    tokens = pages * PAGE_TOKENS
    found: dict[str, float] = {}
    for name, most_rows in (
        ("pages", len(lengths)),
        ("slots of full length", tokens // (LAYERS * (PROMPT + MOST_NEW))),
        ("slots in the schedule's shape", tokens // sum(used)),
    )[: 1 if pages_alone else None]:
        budget = pages * page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
        params = SamplingParams(max_new_tokens=MOST_NEW, ignore_eos=True)
        rows = [Request([3] * PROMPT, params, number) for number in range(len(lengths))]
        how = {"budget_bytes": budget, "max_rows": most_rows}
        engine = Watched(lengths, decoder, schedule, (), cumulative_logprob=False, **how)
        generate(engine, rows, scheduler="refill", **how)
        waiting = [count for count, left in zip(engine.flights, engine.left, strict=True) if left]
        found |= {
            f"{name}: rows in flight": sum(waiting) / max(1, len(waiting)),
            f"{name}: steps": len(engine.flights),
            f"{name}: put back": engine.returned,
        }
    return found


def measure_shared(decoder: Decoder, speed: float, prefix: int, rows: int, cache_pages: int) -> dict[str, float]:
    """Most pages of rows that begin with the same prefix, all in flight, and how many rows `cache_pages` hold."""
    schedule = ScheduleSpec(speedup=speed, horizon=ANSWER).build(LAYERS)
    beginning, params = tuple([3] * prefix), SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    requests = [Request([*beginning, 4, *[5 + number % 8] * (OWN - 1)], params, number) for number in range(rows)]
    each = row_pages(schedule, prefix + OWN, ANSWER + 8, 4)
    found: dict[str, float] = {}
    for name, shared in (("a copy for each", ()), ("one for all", beginning)):
        size = page_bytes(decoder.kv_heads, decoder.head_dim, decoder.dtype.itemsize)
        for pages, what in ((rows * each, "pages"), (cache_pages, "rows in flight")):
            engine = Watched(
                [ANSWER] * rows,
                decoder,
                schedule,
                (),
                cumulative_logprob=False,
                budget_bytes=pages * size,
                max_rows=rows,
            )
            how = {"budget_bytes": pages * size, "max_rows": rows, "scheduler": "refill"}
            generate(engine, requests, prefix=shared, share_prefixes=False, **how)
            assert engine._run is not None and not engine.returned
            found[f"{name}: {what}"] = engine._run.cache.most if what == "pages" else max(engine.flights)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=100, help="of cache")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--speeds", default=[1.0, 3.0], type=lambda text: [float(x) for x in text.split(",")])
    parser.add_argument("--caches", default=[16, 8], type=lambda text: [int(x) for x in text.split(",")], help="bits")
    parser.add_argument("--pages-alone", action="store_true", help="no slots")
    parser.add_argument("--prefix", type=int, help="tokens with which all prompts begin")
    given = parser.parse_args()
    chance = random.Random(7)
    lengths = [min(MOST_NEW, max(1, round(300 * chance.lognormvariate(0, 0.7)))) for _ in range(given.rows)]
    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=8,
        vocab_size=16,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    decoder = Decoder(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False))
    assert decoder.prepare_for_gpu(Nothing)
    found = {}
    for speed, bits in itertools.product(given.speeds, given.caches):
        name, pages = f"{speed:g}x, {bits} bits", int(given.gib * 2**30) // REAL_PAGES[bits]
        if given.prefix is None:
            one = measure(decoder, speed, pages, lengths, 300, pages_alone=given.pages_alone)
        else:
            one = measure_shared(decoder, speed, given.prefix, given.rows, pages)
            sizes = {key.replace("pages", "GB"): one[key] * REAL_PAGES[bits] / 1e9 for key in one if "pages" in key}
            one |= sizes
        found[name] = one
        print(f"{name}, {given.gib:g} GiB, {given.rows} rows")
        for name, value in one.items():
            print(f"  {name:45} {f'{value:,.1f}'.removesuffix('.0'):>9}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
