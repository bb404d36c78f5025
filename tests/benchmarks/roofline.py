"""What a machine can do, and what the passes of a run ask of it: FLOPs, bytes, and the least time for both.

Ceilings are measured in the run itself: a product of large matrices, the engine's or the library's, whichever is
faster, and a copy of memory. A pass is counted as it is run, padding included; the least time of each of its parts is
max(FLOPs / rate, bytes / bandwidth). Weights that stay in the processor's cache, as a small model's do, may be read
faster than that. Projections before the first layer and behind the last are not counted, nor windows.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actors.engine.cpu.executor import CpuExecutor
from actors.engine.cpu.library import multiplies
from actors.engine.cpu.products import LibraryProduct, PanelProduct, packs
from actors.engine.decoder import Decoder


@dataclass(frozen=True)
class Ceilings:
    """flops: a second, of a large product. bandwidth: bytes a second, read and written, of a large copy."""

    flops: float
    bandwidth: float


def measure(dtype: torch.dtype, device: torch.device, size: int = 2048, copied: int = 2**28) -> Ceilings:
    """The best of ten."""
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    products: list[Callable[[Tensor], Tensor]] = [lambda given: torch.mm(given, right)]
    if packs(dtype, device):
        products.append(LibraryProduct(right, None))
    if multiplies(dtype, device):
        products.append(PanelProduct(right, None))
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(_best(functools.partial(one, left), device) for one in products)
    copy = _best(lambda: target.copy_(source), device)
    return Ceilings(2 * size**3 / product, 2 * copied / copy)


def _best(work: Callable[[], Any], device: torch.device) -> float:
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@dataclass
class Part:
    """Of all calls together; least: seconds."""

    flops: float = 0.0
    bytes: float = 0.0
    least: float = 0.0


@dataclass
class Counter:
    """Counts what a decoder is asked to run, from `watch` on; `take` gives the parts and begins anew.

    Parts: prefill and decode, each of linear layers, attention, and the vocabulary head.
    """

    ceilings: Ceilings
    parts: dict[str, Part] = field(default_factory=lambda: defaultdict(Part))

    def watch(self, decoder: Decoder) -> None:
        """Count this decoder's passes; before its layers are packed, for packed ones tell no sizes."""
        item = decoder.dtype.itemsize
        weights = [sum(one.numel() for one in block.parameters() if one.dim() == 2) for block in decoder.blocks]
        head = decoder.model.get_output_embeddings().weight.numel()
        config = decoder.model.config
        width = config.num_attention_heads * decoder.head_dim
        stored = 2 * decoder.kv_heads * decoder.head_dim * item
        prefill, step = decoder.prefill, decoder.step

        def layer(stage: str, number: int, tokens: int, pairs: int, read: int) -> None:
            """pairs: of queries and keys. read: keys."""
            count = weights[number]
            self._add(f"{stage} linear", 2 * tokens * count, count * item)
            self._add(f"{stage} attention", 4 * pairs * width, read * stored)

        def counted_prefill(
            ids: Tensor, positions: Tensor, last: Tensor, layers: Sequence[int], *rest: Any, **more: Any
        ) -> Tensor:
            rows, columns = ids.shape
            before = int(more.get("prefix_columns", 0))
            for number in layers:
                pairs = rows * (columns * before + columns * (columns + 1) // 2)
                layer("prefill", number, rows * columns, pairs, rows * (before + columns))
            self._add("prefill head", 2 * len(last) * head, head * item)
            return prefill(ids, positions, last, layers, *rest, **more)

        def counted_step(tokens: Sequence[int], places: Sequence[int], rows_per_layer: Sequence[int]) -> None:
            live = [place + 1 for place in places]
            for number, rows in enumerate(rows_per_layer):
                if rows:
                    seen = sum(live[-rows:])
                    layer("decode", number, rows, seen, seen)
            self._add("decode head", 2 * len(places) * head, head * item)

        def prompts_counted(run: CpuExecutor, texts: Any, begins: int, starts: Tensor, layers: Any, rest: Any) -> Any:
            if run.decoder is decoder:
                lengths = starts.diff()
                pairs, tokens = int((lengths * (lengths + 1) // 2 + lengths * begins).sum()), int(starts[-1])
                for number in layers:
                    layer("prefill", number, tokens, pairs, tokens + begins)
                self._add("prefill head", 2 * len(lengths) * head, head * item)
            return prompts_(run, texts, begins, starts, layers, rest)

        def decode_counted(run: CpuExecutor, *given: Any) -> Any:
            if run.decoder is decoder:
                counted_step(*given)
            return decode_(run, *given)

        def step_counted(*given: Any) -> Any:
            counted_step(*given[:3])
            return step(*given)

        prompts_, decode_ = CpuExecutor._prompts, CpuExecutor.decode
        CpuExecutor._prompts, CpuExecutor.decode = prompts_counted, decode_counted  # type: ignore[method-assign]
        decoder.prefill = counted_prefill  # type: ignore[method-assign]
        decoder.step = step_counted  # type: ignore[method-assign]

    def _add(self, name: str, flops: float, moved: float) -> None:
        part = self.parts[name]
        part.flops += flops
        part.bytes += moved
        part.least += max(flops / self.ceilings.flops, moved / self.ceilings.bandwidth)

    def take(self) -> dict[str, Part]:
        """Parts counted since the last call."""
        parts, self.parts = dict(self.parts), defaultdict(Part)
        return parts


def least(parts: dict[str, Part], stage: str = "") -> float:
    """Seconds that the parts take at least; stage: prefill or decode alone."""
    return sum(part.least for name, part in parts.items() if name.startswith(stage))
