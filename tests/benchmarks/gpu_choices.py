"""What the GPU's engine could do one way or another, each way measured: see gpu.py.

    graphs         one a step, one a layer, none: seconds a step, seconds and bytes of capture
    programs       of attention on a multiprocessor at once, among which few rows are split
    long rows      tokens from which on a row is split where all programs have rows
    page tokens    of a page of keys and values
    read every     steps after which the host looks which rows have ended
    attention      tokens read at once, reads under way, warps: share of the bandwidth, by itself

The defaults in the engine are the first of each.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from actors.engine.checkpoint.compressed import Kind
from actors.engine.decoder import Decoder
from actors.engine.gpu import engine as engines
from actors.engine.gpu import pages, splits, steps
from actors.engine.gpu.engine import GpuEngine
from actors.engine.gpu.operations import Lanes, LayerPages
from actors.engine.gpu.products import DTYPES
from actors.engine.schedules.schedule import ScheduleSpec
from actors.engine.types import Request

Run = Callable[[GpuEngine, list[Request]], tuple[float, float]]
Setting = dict[str, Any]

GRAPHS: list[tuple[str, Setting]] = [
    ("a step", {}),
    ("a layer", {"steps.MOST_STEP_KERNELS": 0}),
    ("none", {"graphs": False}),
]
WAYS: dict[str, list[tuple[str, Setting]]] = {
    "graphs": GRAPHS,
    "programs": [(f"{count}", {"splits.PER_PROCESSOR": count}) for count in (splits.PER_PROCESSOR, 1, 4, 8)],
    "long rows": [(f"{count}", {"splits.LONG_TOKENS": count}) for count in (splits.LONG_TOKENS, 256, 4096)],
    "page tokens": [(f"{count}", {"page_tokens": count}) for count in (pages.PAGE_TOKENS, 32, 64)],
    "read every": [(f"{count}", {"read_every": count}) for count in (engines.READ_EVERY, 1, 16)],
}
PROGRAMS = (132, 264, 528, 1056)
LAUNCHES = 20  # of attention in a graph, one after the other


@contextmanager
def _set(given: Setting) -> Iterator[Setting]:
    """Modules' constants as they are asked for; what is left is for the engine."""
    left = dict(given)
    with ExitStack() as stack:
        for name in [one for one in left if "." in one]:
            module, _, constant = name.partition(".")
            stack.enter_context(patch.object({"steps": steps, "splits": splits}[module], constant, left.pop(name)))
        if (tokens := left.pop("page_tokens", None)) is not None:
            stack.enter_context(patch.object(pages, "PAGE_TOKENS", tokens))
            stack.callback(pages.row_pages.cache_clear)
            pages.row_pages.cache_clear()
        yield left


def choices(
    decoder: Decoder, rows: list[Request], budget: int, run: Run, allows: Callable[[str, float], bool]
) -> Iterator[dict[str, Any]]:
    """Each way, over the same rows at 2x: {"choice", "way", "step" and "capture" in seconds, "graph_bytes"}."""
    schedule = ScheduleSpec(speedup=2, horizon=64).build(decoder.num_layers)
    took = 2.0
    for choice, ways in WAYS.items():
        for way, given in ways:
            if not allows(f"choice of {choice}: {way}", 4 * took):
                continue
            with _set(given) as how:
                engine = GpuEngine(
                    decoder, schedule, (), budget_bytes=budget, max_rows=len(rows), cumulative_logprob=False, **how
                )
                run(engine, rows)  # kernels are compiled
                torch.cuda.empty_cache()
                before = torch.cuda.mem_get_info()[0]
                _, captured = run(engine, rows)
                torch.cuda.empty_cache()
                held = before - torch.cuda.mem_get_info()[0]  # the driver's own part too
                prefill, decode = run(engine, rows)
                took = prefill + decode
            steps_run = max(row.sampling.max_new_tokens for row in rows) - 1
            yield {
                "choice": choice,
                "way": way,
                "step": decode / steps_run,
                "capture": max(0.0, captured - decode),
                "graph_bytes": held,
            }
            del engine
            gc.collect()
            torch.cuda.empty_cache()


def attention(
    decoder: Decoder,
    batch: int,
    length: int,
    bandwidth: float,
    ways: Sequence[tuple[int, int, int]],
    allows: Callable[[str, float], bool],
    kv_cache: Kind | None = None,
) -> Iterator[dict[str, Any]]:
    """Share of the copy's bandwidth of attention over `length` tokens of `batch` rows; ways: (tokens, reads, warps).

    kv_cache: codes in place of numbers; their values do not matter.
    """
    from actors.engine.gpu.kernels import attention as kernels

    device, heads = decoder.device, decoder.model.config.num_attention_heads
    size, kv_heads = decoder.head_dim, decoder.kv_heads
    width = -(-length // pages.PAGE_TOKENS)
    shape = batch * width + 1, kv_heads, pages.PAGE_TOKENS, size
    dtype = decoder.dtype if kv_cache is None else DTYPES[kv_cache]
    keys, values = (torch.randn(shape, dtype=decoder.dtype, device=device).to(dtype) for _ in range(2))
    scales = (
        None if kv_cache is None else (torch.ones(shape[:-1], device=device), torch.ones(shape[:-1], device=device))
    )
    table = torch.randperm(batch * width, device=device).view(batch, width).int() + 1
    slots = torch.arange(batch, device=device)
    positions = torch.full((batch,), length - 1, dtype=torch.int64, device=device)
    lanes = Lanes(slots, positions, torch.ones(batch, dtype=torch.int32, device=device), None)
    layer = LayerPages(keys, values, table, scales)
    queries = torch.randn(batch, heads, size, dtype=decoder.dtype, device=device)
    moved = batch * length * pages.token_bytes(kv_heads, size, dtype.itemsize)
    for tokens, reads, warps in ways:
        if not allows(f"attention: {tokens} tokens, {reads} reads, {warps} warps, {batch} rows", 8):
            continue
        for most in sorted({splits.planned_splits(batch, kv_heads, 0, programs).most for programs in PROGRAMS}):

            def launch(most: int = most) -> None:
                for _ in range(LAUNCHES):
                    kernels.attend(queries, layer, lanes, 0, 0.1, splits.Splits(most))

            with (
                patch.object(kernels, "BLOCK", tokens),
                patch.object(kernels, "STAGES", reads),
                patch.object(kernels, "WARPS", warps),
            ):
                launch()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    launch()
            seconds = []
            for _ in range(4):
                began = time.perf_counter()
                graph.replay()
                torch.cuda.synchronize()
                seconds.append((time.perf_counter() - began) / LAUNCHES)
            yield {
                "kv_cache": kv_cache,
                "batch": batch,
                "length": length,
                "tokens": tokens,
                "reads": reads,
                "warps": warps,
                "splits": most,
                "microseconds": 1e6 * min(seconds),
                "of_bandwidth": moved / min(seconds) / bandwidth,
            }
