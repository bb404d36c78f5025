"""A keep order measured on a model: layers ranked by the loss of agreement with full depth without them.

Two rankings from the literature are combined. Influence (ShortGPT: Men et al., 2024, arXiv 2403.03853) is
1 - cos(input, output) of a layer, and one pass gives it for all layers; it does not detect that of two layers which
replace each other one must stay. Greedy elimination (SLEB: Song et al., 2024, arXiv 2402.09025) does, at one pass for
each layer and step. Here each step tries the layers of least influence only, and its measure is the KL divergence of
the next-token distribution from full depth's. Where that is so large that nothing of full depth's text is left,
differences between layers say nothing, and those that remain are ranked by their influence at full depth. As in
generation, layers are bypassed for response tokens only.

Shapes: B rows of a batch, P prompt columns, R response columns, N response tokens of a batch, E hidden size,
H key/value heads, D head size, V vocabulary size.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actors.engine.decoder import Decoder, causal_mask, part
from actors.engine.errors import UserError
from actors.engine.forcing.teacher_forcing import IGNORED, batch_of

log = logging.getLogger(__name__)
Row = tuple[Sequence[int], Sequence[int]]  # token ids of prompt and response
ROWS_PER_PASS = 8  # of similar length, for little padding, and so that a pass over a bad candidate ends early
CANDIDATES = 6  # layers of least influence that a step tries
LOST = 3.0  # nats per token beyond which the text is lost: full depth's token has a probability of about 5%
PROMPT_TOKENS = 2**14  # of all rows: their keys and values stay in memory
PROBABILITIES = 2**27  # of all rows, [N, V]: 512 MiB in fp32


@dataclass(frozen=True)
class LayerRanking:
    """Layers ranked by elimination.

    keep_order: the most needed layer first. divergence: nats per response token after each elimination, least needed
    layer first. tokens: response tokens that it was measured on.
    """

    keep_order: tuple[int, ...]
    divergence: tuple[float, ...]
    tokens: int

    def warmup(self, most: int) -> int:
        """The number of lowest layers, at most `most`, with which the order begins."""
        leading = range(1, min(most, len(self.keep_order)) + 1)
        return max((count for count in leading if set(self.keep_order[:count]) == set(range(count))), default=0)


def rank_layers(
    decoder: Decoder,
    rows: Sequence[Row],
    *,
    warmup: int = 0,
    candidates: int | None = CANDIDATES,
    report: Callable[[str], None] = log.info,
) -> LayerRanking:
    """Rank the layers on prompts and the responses of full depth.

    Deterministic on one machine; of equal layers the higher one is kept longer. The order of a model tuned to skip is
    biased towards the layers that it was tuned to keep.

    Args:
        decoder: The model.
        rows: Prompts and responses. Rows without either, and rows beyond the bounds on memory, are ignored. With a
            response of one token the prompt's last token is taken for a response token too.
        warmup: Lowest layers that are kept before all others.
        candidates: Layers of least influence that a step tries; None: all, m (m + 1) / 2 - 1 passes for m layers.
        report: Receives a line now and then.

    Raises:
        UserError: No row has a prompt and a response.
    """
    was_training = decoder.model.training
    decoder.model.eval()
    try:
        with torch.inference_mode():
            passes = [ResponsePasses(decoder, pairs) for pairs in batches(rows, decoder.vocab_size)]
            return _eliminate(decoder, passes, warmup, candidates, report)
    finally:
        decoder.model.train(was_training)


def _eliminate(
    decoder: Decoder,
    batches: Sequence[ResponsePasses],
    warmup: int,
    candidates: int | None,
    report: Callable[[str], None],
) -> LayerRanking:
    tokens = sum(batch.tokens for batch in batches)
    remaining = list(range(warmup, decoder.num_layers))
    bypassed: list[int] = []
    divergence: list[float] = []
    at_full_depth = _influence(batches, remaining)
    began, total_work = time.monotonic(), _work_left(len(remaining), candidates)
    report(f"keep order: up to {len(remaining) - 1} layers are left out, one after the other")
    while len(remaining) > 1 and (not divergence or divergence[-1] <= LOST):
        influence = _influence(batches, remaining) if bypassed else at_full_depth
        by_influence = sorted(remaining, key=lambda layer: (influence[layer], layer))
        least, lowest = by_influence[0], math.inf
        for layer in by_influence[:candidates]:
            total = _divergence(batches, layer, lowest)
            if (total, layer) < (lowest, least):
                least, lowest = layer, total
        remaining.remove(least)
        bypassed.append(least)
        divergence.append(lowest / tokens)
        for batch in batches:
            batch.bypass(least)
        left = _work_left(len(remaining), candidates)
        minutes = (time.monotonic() - began) * left / max(total_work - left, 1) / 60
        report(
            f"keep order: {len(remaining)} layers left, loss {lowest / tokens:.4f} nats per token without {bypassed}; "
            f"at most about {minutes:.1f} min left"
        )
    remaining.sort(key=lambda layer: (-at_full_depth[layer], -layer))
    return LayerRanking((*range(warmup), *remaining, *reversed(bypassed)), tuple(divergence), tokens)


def _work_left(layers: int, candidates: int | None) -> int:
    """Return the layers that are run until one is left: of each candidate about half of those that remain."""
    return sum(min(candidates or left, left) * left for left in range(2, layers + 1))


def _influence(batches: Sequence[ResponsePasses], layers: Sequence[int]) -> dict[int, float]:
    return {layer: sum(batch.influence(layer) for batch in batches) for layer in layers}


def _divergence(batches: Sequence[ResponsePasses], layer: int, limit: float) -> float:
    """Summed divergence without `layer` too; inf as soon as it exceeds `limit`, since no batch lowers the sum."""
    total = 0.0
    for batch in batches:
        total += batch.divergence_without(layer)
        if not total <= limit:  # NaN too
            return math.inf
    return total


class _PromptKeys:
    """Keys and values of every layer for the prompts, before those of a pass over responses."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.complete = False

    def mask(self, layer: int, rows: int) -> Tensor | None:
        """Not called: every pass brings its own mask."""
        raise NotImplementedError

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """keys, values [B, H, S, D] of a pass -> those to attend to."""
        if not self.complete:
            self.layers[layer_idx] = keys, values
            return keys, values
        prompt_keys, prompt_values = self.layers[layer_idx]
        return torch.cat([prompt_keys, keys], dim=2), torch.cat([prompt_values, values], dim=2)


class ResponsePasses:
    """A batch whose response tokens run again and again without some layers; their prompts run once, at full depth.

    The hidden states before every layer are kept, so that a pass without one layer begins behind it.
    """

    def __init__(self, decoder: Decoder, pairs: Sequence[Row]) -> None:
        batch = batch_of(pairs, decoder.device)
        columns, first = batch.ids.shape[1], batch.prompt_columns
        prompt, response = slice(None, first), slice(first, None)
        self.decoder = decoder
        self.bypassed: set[int] = set()
        # the prompt's last column predicts the first token at full depth
        self.counted = batch.labels[:, 1:] != IGNORED  # [B, R]
        self.tokens = int(self.counted.sum())
        masks = {
            window: (batch.mask == 0) & causal_mask(columns, 0, window, decoder.device)  # [B, 1, P + R, P + R]
            for window in set(decoder.windows)
        }
        self.masks = {window: mask[:, :, response] for window, mask in masks.items()}
        hidden, rotary = decoder.embed(batch.ids, batch.positions)
        self.rotary = [part(tables, columns=response) for tables in rotary]
        self.keys = _PromptKeys()
        states = hidden[:, prompt]
        for layer in range(decoder.num_layers):
            mask = masks[decoder.windows[layer]][:, :, prompt, prompt]
            states = decoder.run_layer(layer, states, part(rotary[layer], columns=prompt), mask, self.keys)
        self.keys.complete = True
        self.inputs = [hidden[:, response]] * (decoder.num_layers + 1)  # [B, R, E] before every layer, and the output
        self._run(0)
        logits = self._logits(self.inputs[-1])
        self.expected = logits.softmax(dim=-1)  # [N, V]
        self.entropy = logits.logsumexp(dim=-1) - (self.expected * logits).sum(dim=-1)  # [N]

    def influence(self, layer: int) -> float:
        """1 - cos(input, output) of a layer, summed over response tokens."""
        before, after = self.inputs[layer][self.counted].float(), self.inputs[layer + 1][self.counted].float()
        return float((1 - nn.functional.cosine_similarity(before, after, dim=-1)).sum())

    def divergence_without(self, layer: int) -> float:
        """KL(full depth || without the bypassed layers and this one), nats, summed over response tokens."""
        hidden = self.inputs[layer]
        for above in range(layer + 1, self.decoder.num_layers):
            hidden = self._layer(above, hidden)
        return self._divergence(self._logits(hidden))

    def agreement(self, layers: Collection[int]) -> tuple[int, float]:
        """Tokens at which `layers` alone have full depth's likeliest token, and their divergence from it, summed."""
        hidden = self.inputs[0]
        for layer in sorted(layers):
            hidden = self._layer(layer, hidden)
        logits = self._logits(hidden)
        agreed = logits.argmax(dim=-1) == self.expected.argmax(dim=-1)
        return int(agreed.sum()), self._divergence(logits)

    def bypass(self, layer: int) -> None:
        """Run without a further layer from here on."""
        self.bypassed.add(layer)
        self._run(layer)

    def _run(self, first: int) -> None:
        """Compute the inputs of the layers above `first`."""
        for layer in range(first, self.decoder.num_layers):
            self.inputs[layer + 1] = self._layer(layer, self.inputs[layer])

    def _layer(self, layer: int, hidden: Tensor) -> Tensor:
        if layer in self.bypassed:
            return hidden
        mask = self.masks[self.decoder.windows[layer]]
        return self.decoder.run_layer(layer, hidden, self.rotary[layer], mask, self.keys)

    def _divergence(self, logits: Tensor) -> float:
        cross = logits.logsumexp(dim=-1) - (self.expected * logits).sum(dim=-1)
        return float((cross - self.entropy).clamp(min=0).sum(dtype=torch.float64))  # negative only by rounding

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden[self.counted]).float()


def batches(rows: Sequence[Row], vocab_size: int) -> list[list[Row]]:
    """The first rows within the bounds on memory, in batches of similar length; at least one row."""
    chosen: list[Row] = []
    prompts = responses = 0
    for prompt, response in rows:
        if len(response) == 1 and len(prompt) > 1:  # the prompt's own pass predicts it, by its last token
            prompt, response = prompt[:-1], [prompt[-1], *response]
        if not len(prompt) or len(response) < 2:
            continue
        prompts, responses = prompts + len(prompt), responses + len(response) - 1
        if chosen and (prompts > PROMPT_TOKENS or responses * vocab_size > PROBABILITIES):
            break
        chosen.append((prompt, response))
    if not chosen:
        raise UserError("no row with a prompt and a response to measure a keep order on")
    chosen.sort(key=lambda row: (len(row[1]), len(row[0])))
    return [chosen[start : start + ROWS_PER_PASS] for start in range(0, len(chosen), ROWS_PER_PASS)]
