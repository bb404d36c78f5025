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
from actors.engine.library.executor import LibraryExecutor


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
        """Count the passes of this decoder's model; before its layers are packed, for packed ones tell no sizes."""
        model, item = decoder.model, decoder.dtype.itemsize
        weights = [sum(one.numel() for one in block.parameters() if one.dim() == 2) for block in decoder.blocks]
        head = model.get_output_embeddings().weight.numel()
        width = model.config.num_attention_heads * decoder.head_dim
        stored = 2 * decoder.kv_heads * decoder.head_dim * item

        def layer(stage: str, number: int, tokens: int, pairs: int, read: int) -> None:
            """pairs: of queries and keys. read: keys."""
            count = weights[number]
            self._add(f"{stage} linear", 2 * tokens * count, count * item)
            self._add(f"{stage} attention", 4 * pairs * width, read * stored)

        def prefill(
            run: Decoder, ids: Tensor, positions: Tensor, last: Tensor, layers: Any, *rest: Any, **more: Any
        ) -> Any:
            if run.model is model:
                rows, columns = ids.shape
                before = int(more.get("prefix_columns", 0))
                for number in layers:
                    pairs = rows * (columns * before + columns * (columns + 1) // 2)
                    layer("prefill", number, rows * columns, pairs, rows * (before + columns))
                self._add("prefill head", 2 * len(last) * head, head * item)
            return prefill_(run, ids, positions, last, layers, *rest, **more)

        def prompts(
            run: CpuExecutor, texts: Sequence[Any], begins: int, sources: Any, slots: Any, layers: Any, *rest: Any
        ) -> Any:
            if run.decoder.model is model:
                lengths = [len(text) for text in texts]
                pairs, tokens = sum(one * (one + 1) // 2 + one * begins for one in lengths), sum(lengths)
                for number in layers:
                    layer("prefill", number, tokens, pairs, tokens + begins)
                self._add("prefill head", 2 * len(lengths) * head, head * item)
            return prompts_(run, texts, begins, sources, slots, layers, *rest)

        def decode(
            run: LibraryExecutor, tokens: Any, places: Sequence[int], slots: Any, per_layer: Any, **more: Any
        ) -> Any:
            if run.decoder.model is model:
                live = [place + 1 for place in places]
                for number, rows in enumerate(per_layer):
                    if rows:
                        seen = sum(live[-rows:])
                        layer("decode", number, rows, seen, seen)
                self._add("decode head", 2 * len(places) * head, head * item)
            by_library = type(run) is LibraryExecutor
            return (library_ if by_library else decode_)(run, tokens, places, slots, per_layer, **more)

        prefill_, prompts_ = Decoder.prefill, CpuExecutor._prompts
        library_, decode_ = LibraryExecutor.decode, CpuExecutor.decode
        Decoder.prefill, CpuExecutor._prompts = prefill, prompts  # type: ignore[method-assign, assignment]
        LibraryExecutor.decode = CpuExecutor.decode = decode  # type: ignore[method-assign, assignment]

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
