"""The ideal wall clock of a schedule: the time of full depth with the skipped work taken off, on a measured machine.

The work is counted from rows' lengths as the least time on this machine: every part takes max(FLOPs / rate, bytes /
bandwidth): linear layers, attention and the vocabulary head, of prompts and of decode steps. Rows run in full batches,
longest prompts first, each row to its own end; nothing is padded, and a prefix that all prompts share is computed once.
Weights that stay in the processor's cache, as a small model's do, may be read faster than that. Projections before the
first layer and behind the last are not counted, nor windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from actors.engine.cpu.kernels import multiplies
from actors.engine.cpu.products import LibraryProduct, PanelProduct, packs
from actors.engine.model.families import family_of
from actors.engine.model.layer_weights import LayerWeights
from actors.engine.schedule.schedule import Schedule


@dataclass(frozen=True)
class Ceilings:
    """flops: a second, of a large product. bandwidth: bytes a second, read and written, of a large copy."""

    flops: float
    bandwidth: float


def measure(dtype: torch.dtype) -> Ceilings:
    """The best of ten on this CPU; of products the engine's and the library's, whichever is faster."""
    size, copied, device = 2048, 2**28, torch.device("cpu")
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    products: list[Callable[[Tensor], Tensor]] = [lambda given: torch.mm(given, right)]
    if packs(dtype, device):
        products.append(LibraryProduct(right, None))
    if multiplies(dtype, device):
        products.append(PanelProduct(right, None))
    source = torch.ones(copied, dtype=torch.uint8)
    target = torch.empty_like(source)
    product = min(_best(partial(one, left)) for one in products)
    return Ceilings(2 * size**3 / product, 2 * copied / _best(lambda: target.copy_(source)))


def _best(work: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@dataclass(frozen=True)
class Shape:
    """Numbers of a model: weights of a layer and of the head, width of attention, numbers cached for a token."""

    layer: int
    head: int
    width: int
    cached: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Of a family with described layers."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        family = family_of(config)
        assert family.weights is not None
        block = family.layers(model)[0]
        described: LayerWeights = family.weights(block)
        return cls(
            layer=sum(weight.numel() for weight in block.parameters() if weight.dim() == 2),
            head=model.get_output_embeddings().weight.numel(),
            width=described.query_heads * described.head_dim,
            cached=2 * described.kv_heads * described.head_dim,
        )


@dataclass(frozen=True)
class Least:
    """Seconds at least, of the prompts' passes and of the decode steps; head: its part of the decode steps."""

    prefill: float
    decode: float
    head: float

    @property
    def whole(self) -> float:
        """Of both."""
        return self.prefill + self.decode


def least(
    rows: Sequence[tuple[int, int]],
    schedule: Schedule,
    shape: Shape,
    ceilings: Ceilings,
    item: int,
    batch: int,
    shared: int = 0,
) -> Least:
    """Least seconds of a run.

    Args:
        rows: tokens of prompt and answer of each.
        item: bytes of a weight.
        batch: rows in flight.
        shared: tokens with which all prompts begin.
    """

    def seconds(flops: float, moved: float) -> float:
        return max(flops / ceilings.flops, moved / ceilings.bandwidth)

    prefill = decode = head = 0.0
    prompt_layers = len(schedule.prompt_layers)
    ordered = sorted(rows, reverse=True)
    for first in range(0, len(ordered), batch):
        group = ordered[first : first + batch]
        tokens = sum(prompt - shared for prompt, _ in group)
        pairs = sum((prompt * (prompt + 1) - shared * (shared + 1)) // 2 for prompt, _ in group)
        prefill += prompt_layers * seconds(2 * tokens * shape.layer, item * shape.layer)
        prefill += prompt_layers * seconds(4 * pairs * shape.width, item * tokens * shape.cached)
        prefill += seconds(2 * len(group) * shape.head, item * shape.head)
        for position in range(max(answer for _, answer in group) - 1):
            alive = [prompt + position + 1 for prompt, answer in group if answer > position + 1]
            layers = schedule.depth(position)
            decode += layers * seconds(2 * len(alive) * shape.layer, item * shape.layer)
            decode += layers * seconds(4 * sum(alive) * shape.width, item * sum(alive) * shape.cached)
            head += seconds(2 * len(alive) * shape.head, item * shape.head)
    return Least(prefill, decode + head, head)


def taken_off(prefill: float, decode: float, full: Least, line: Least) -> tuple[float, float]:
    """Ideal seconds of a schedule's whole run and of its decode steps.

    The measured time of full depth is scaled by the work that is left. Of the decode steps, only the vocabulary head is
    the same at all depths; it counts as its least time, and all other time as time of layers, so that the result is a
    bound that a run does not beat by more than noise.

    Args:
        prefill, decode: seconds measured at full depth.
        full, line: the work at full depth and at the schedule.
    """
    layers = (line.decode - line.head) / (full.decode - full.head) if full.decode > full.head else 1.0
    decode = max(decode - full.head, 0.0) * layers + line.head
    return prefill * line.prefill / full.prefill + decode, decode
