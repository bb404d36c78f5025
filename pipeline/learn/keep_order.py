"""Measures and caches a checkpoint's layer order (`keep_order`): the layers that answers need most come first.

The ranking combines two methods. ShortGPT (Men et al., 2024, arXiv 2403.03853) ranks layers by their influence,
1 - cos(input, output). One pass measures all layers, but does not show that one of two interchangeable layers must
stay. Greedy elimination (SLEB: Song et al., 2024, arXiv 2402.09025) shows this, but needs a pass per layer for each
layer that it drops. Here, each step tries to drop only the layers of least influence. It drops the one that changes the
next-token distribution least (KL divergence from full depth). The steps end when the divergence exceeds `LOST`. The
layers that remain are ranked by their influence at full depth. As in generation, layers are skipped for response tokens
only.

Shapes: N response tokens of a batch, E hidden size, V vocabulary size.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder
from actors.engine.errors import UserError
from actors.engine.model.file_digests import cache_record, write_record
from actors.engine.schedule.schedule import Schedule
from actors.engine.torch.packed_attention import packed
from actors.engine.torch.token_tree import Tokens, prompt_ranks, prompt_tokens, run_level
from pipeline.runtime.announce import announce

log = logging.getLogger(__name__)
Row = tuple[Sequence[int], Sequence[int]]  # token ids of prompt and response
ROWS = 32  # maximum number of rows (prompt and response) on which an order is measured
VERSION = 1  # version of the algorithm; an order that another version has cached is measured again
ROWS_PER_PASS = 8  # rows of a batch; few, so that a bad candidate is recognized after little work
CANDIDATES = 6  # number of layers that each step tries to drop: the layers of least influence
LOST = 3.0  # nats per token; the token chosen at full depth then has a probability of only about exp(-3) = 5%
PROMPT_TOKENS = 2**14  # limit for the prompt tokens of all rows, whose keys and values stay in memory
PROBABILITIES = 2**27  # limit for the probabilities [N, V] of all rows: 512 MiB in fp32


def measured_order(
    identity: Mapping[str, Any],
    load: Callable[[], Decoder],
    rows: Sequence[Row],
    warmup: int | None,
    cache: str | None,
) -> tuple[tuple[int, ...], int]:
    """Return a checkpoint's layer order (keep order) and number of warm-up layers, from the cache or `rank_layers`.

    Args:
        identity: Digests or versions of the checkpoint's files; part of the cache key.
        load: Loads the checkpoint's model; not called if the cache holds the order.
        rows: Prompts and the model's responses at full depth; `ROWS` evenly spaced rows are used.
        warmup: Number of lowest layers that always run; None: at most 1/8 of all layers, see `LayerRanking`.
        cache: Folder of the cache (`model.cache`); None: the default folder.
    """
    kept = min(ROWS, len(rows))
    chosen = [(list(prompt), list(response)) for prompt, response in (rows[n * len(rows) // kept] for n in range(kept))]
    record = cache_record(cache, "keep-orders", [VERSION, identity, chosen, warmup])
    found = _read(record)
    if found is not None:
        announce(f"keep order: {list(found[0])}, warmup {found[1]}, read from {record}")
        return found
    announce(f"measuring the keep order on {kept} answers")
    ranking = rank_layers(load(), chosen, warmup=warmup or 0)
    layers = len(ranking.keep_order)
    found = ranking.keep_order, ranking.warmup(max(1, layers // 8)) if warmup is None else warmup
    write_record(record, {"keep_order": found[0], "warmup": found[1], "divergence": ranking.divergence})
    announce(f"keep order: {list(found[0])}, warmup {found[1]}")
    return found


def _read(record: Path) -> tuple[tuple[int, ...], int] | None:
    """Return the layer order and number of warm-up layers in the file `record`; None if it is missing or damaged."""
    try:
        values = json.loads(record.read_text())
        order, warmup = tuple(values["keep_order"]), values["warmup"]
        Schedule(len(order), (len(order),), order, warmup)  # raises if the list is no permutation
        return order, warmup
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, UserError) as error:
        log.warning("%s: not a valid keep order (%s); measuring the order again", record, error)
        return None


@dataclass(frozen=True)
class LayerRanking:
    """Layers ranked by dropping one after the other.

    keep_order: all layers, the most needed first. divergence: KL divergence from full depth after each drop, in nats
    per response token; the first entry is for the least needed layer.
    """

    keep_order: tuple[int, ...]
    divergence: tuple[float, ...]

    def warmup(self, most: int) -> int:
        """Return the largest n <= `most` for which layers 0 to n - 1, in any order, come first in `keep_order`."""
        leading = range(1, min(most, len(self.keep_order)) + 1)
        return max((count for count in leading if set(self.keep_order[:count]) == set(range(count))), default=0)


def rank_layers(decoder: Decoder, rows: Sequence[Row], *, warmup: int = 0) -> LayerRanking:
    """Rank the layers by how much the model needs them to predict its own responses at full depth.

    The result is deterministic on one machine. If two layers are needed equally, the higher is kept. A model tuned to
    skip layers gets an order biased towards the layers that it was tuned to keep.

    Args:
        decoder: The model, in evaluation mode.
        rows: Prompts and responses. Rows without a prompt or response, and rows beyond the memory limits, are ignored.
            If a response has one token, the prompt's last token counts as a response token too.
        warmup: Number of lowest layers that always run. They come first in the order.

    Raises:
        UserError: No row has a prompt and a response.
    """
    with torch.inference_mode(), packed(decoder.model):
        passes = [ResponsePasses(decoder, pairs) for pairs in batches(rows, decoder.vocab_size)]
        return _eliminate(passes, range(warmup, decoder.num_layers))


def _eliminate(batches: Sequence[ResponsePasses], layers: range) -> LayerRanking:
    tokens, remaining = sum(batch.tokens for batch in batches), list(layers)
    dropped: list[int] = []
    divergence: list[float] = []
    at_full_depth = _influence(batches, remaining)
    began, total_work = time.monotonic(), _work_left(len(remaining))
    announce(f"keep order: dropping up to {len(remaining) - 1} layers, one after the other")
    while len(remaining) > 1 and (not divergence or divergence[-1] <= LOST):
        influence = _influence(batches, remaining) if dropped else at_full_depth
        by_influence = sorted(remaining, key=lambda layer: (influence[layer], layer))
        least, lowest = by_influence[0], math.inf
        for layer in by_influence[:CANDIDATES]:
            total = _divergence(batches, layer, lowest)
            if (total, layer) < (lowest, least):
                least, lowest = layer, total
        remaining.remove(least)
        dropped.append(least)
        divergence.append(lowest / tokens)
        for batch in batches:
            batch.drop(least)
        left = _work_left(len(remaining))
        seconds = (time.monotonic() - began) * left / max(total_work - left, 1)
        announce(
            f"keep order: {len(remaining)} layers remain; without {dropped}, KL from full depth is "
            f"{lowest / tokens:.4f} nats per token; at most about {seconds / 60:.1f} min left"
        )
    remaining.sort(key=lambda layer: (-at_full_depth[layer], -layer))
    return LayerRanking((*range(layers.start), *remaining, *reversed(dropped)), tuple(divergence))


def _work_left(layers: int) -> int:
    """Estimate the work to drop all but one of `layers` layers: candidates × remaining layers, summed over steps."""
    return sum(min(CANDIDATES, left) * left for left in range(2, layers + 1))


def _influence(batches: Sequence[ResponsePasses], layers: Sequence[int]) -> dict[int, float]:
    return {layer: sum(batch.influence(layer) for batch in batches) for layer in layers}


def _divergence(batches: Sequence[ResponsePasses], layer: int, limit: float) -> float:
    """Return the divergence if `layer` is dropped too, summed over batches; inf if it exceeds `limit`."""
    total = 0.0
    for batch in batches:
        total += batch.divergence_without(layer)
        if not total <= limit:  # true for NaN too
            return math.inf
    return total


class ResponsePasses:
    """Runs a batch's response tokens many times, each time without some layers. The prompts run once, at full depth.

    The hidden states before every layer are stored, so that a pass without layer L need not run the layers below L.
    Create and use an object only inside `with packed(decoder.model)`.
    """

    def __init__(self, decoder: Decoder, pairs: Sequence[Row]) -> None:
        self._decoder, self._rows, self._dropped = decoder, len(pairs), set[int]()
        every = prompt_ranks(decoder.num_layers, range(decoder.num_layers))
        _, self._prompts = run_level(decoder, prompt_tokens([prompt for prompt, _ in pairs], 0), every, len(pairs))
        self._responses = Tokens.of(  # the last token of a response is never an input
            (token, len(prompt) + place, group, 0, 1)
            for group, (prompt, response) in enumerate(pairs)
            for place, token in enumerate(response[:-1])
        )
        self.tokens = len(self._responses.ids)
        self._inputs: list[Tensor] = []  # hidden states before each layer and after the last, [1, tokens, hidden size]
        logits = self._logits(self._run(self._inputs))
        self._expected = logits.softmax(dim=-1)  # [N, V]
        self._entropy = logits.logsumexp(dim=-1) - (self._expected * logits).sum(dim=-1)  # [N]

    def influence(self, layer: int) -> float:
        """Return 1 - cos(input, output) of `layer`, summed over response tokens."""
        before, after = self._inputs[layer].float(), self._inputs[layer + 1].float()
        return float((1 - nn.functional.cosine_similarity(before, after, dim=-1)).sum())

    def divergence_without(self, layer: int) -> float:
        """Return KL(full depth || model without `layer` and the dropped layers) in nats, summed over tokens."""
        logits = self._logits(self._run(self._inputs[: layer + 1], {layer}))
        cross = logits.logsumexp(dim=-1) - (self._expected * logits).sum(dim=-1)
        return float((cross - self._entropy).clamp(min=0).sum(dtype=torch.float64))  # rounding may make it negative

    def drop(self, layer: int) -> None:
        """Skip `layer` in all later passes, in addition to the layers dropped before."""
        self._dropped.add(layer)
        del self._inputs[layer + 1 :]
        self._run(self._inputs)

    def _run(self, inputs: list[Tensor], without: Collection[int] = ()) -> Tensor:
        """Run the layers from index `len(inputs) - 1` on (0 if empty). Append their outputs; return the last one."""
        running = set(range(self._decoder.num_layers)) - self._dropped - set(without)
        ranks = prompt_ranks(self._decoder.num_layers, running)
        return run_level(self._decoder, self._responses, ranks, self._rows, [self._prompts], inputs=inputs)[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden[0]).float()


def batches(rows: Sequence[Row], vocab_size: int) -> list[list[Row]]:
    """Group rows of similar length into batches. Leave out rows beyond the memory limits, but use at least one row."""
    chosen: list[Row] = []
    prompts = responses = 0
    for prompt, response in rows:
        if len(response) == 1 and len(prompt) > 1:  # the prompt's last token predicts the response's only token
            prompt, response = prompt[:-1], [prompt[-1], *response]
        if not len(prompt) or len(response) < 2:
            continue
        prompts, responses = prompts + len(prompt), responses + len(response) - 1
        if chosen and (prompts > PROMPT_TOKENS or responses * vocab_size > PROBABILITIES):
            break
        chosen.append((prompt, response))
    if not chosen:
        raise UserError("no keep order can be measured: no row has a prompt and a response")
    chosen.sort(key=lambda row: (len(row[1]), len(row[0])))
    return [chosen[start : start + ROWS_PER_PASS] for start in range(0, len(chosen), ROWS_PER_PASS)]
