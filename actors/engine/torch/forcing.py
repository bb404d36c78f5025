"""Teacher forcing without padding: each token of a known response runs the layers that it would run at inference.

Tokens form a tree (see `token_tree`) of three levels: the tokens with which all prompts begin, each prompt's other
tokens, and the responses. Prompts run once for all schedules, through all layers or through d(0) layers. Responses run
once for each schedule. If response token t is the input, d(t) layers run.
Shapes: E hidden size, S schedules, M response tokens of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.schedule.schedule import Schedule
from actors.engine.scheduler import common_length
from actors.engine.torch.token_tree import Level, Tokens, prompt_ranks, prompt_tokens, run_level

Pair = Mapping[str, Any]  # a prompt with its response: `input_ids` (tokens of both), `prompt_tokens` (prompt length)
LEAST_SAVED = 16  # minimum tokens saved by sharing a prefix; fewer are not worth a separate pass over the prefix


def predicting_states(
    decoder: Decoder,  # decoder whose model uses the attention of `packed_attention`
    pairs: Sequence[Pair],  # prompts with their responses, at least one pair
    schedules: Sequence[Schedule],  # schedules that run the same layers over prompts
    *,
    # whether gradients flow through all prompt tokens; if not, they flow only through the last token of each prompt
    prompt_gradient: bool = True,
    recompute: bool = False,  # whether to use gradient checkpointing: the backward pass recomputes each layer
) -> Tensor:
    """Return, for each schedule, the hidden states (before the final norm) that predict response tokens: [S, M, E]."""
    assert len({schedule.prompt_layers for schedule in schedules}) == 1
    shared = shared_tokens(pairs)
    above: list[Level] = []
    with nullcontext() if prompt_gradient else torch.no_grad():
        prefix = prompt_tokens([pairs[0]["input_ids"][:shared]], 0)
        own = prompt_tokens([pair["input_ids"][shared : pair["prompt_tokens"] - 1] for pair in pairs], shared)
        for tokens, groups in ((prefix, 1), (own, len(pairs))):
            if len(tokens.ids):
                ranks = prompt_ranks(decoder.num_layers, schedules[0].prompt_layers)
                _, level = run_level(decoder, tokens, ranks, groups, above, recompute=recompute)
                above.append(level)
    ranks = torch.tensor([schedule.ranks for schedule in schedules])
    responses = _responses(pairs, schedules)
    hidden, _ = run_level(decoder, responses, ranks, len(pairs), above, recompute=recompute)
    return hidden.view(len(schedules), -1, hidden.shape[-1])


def response_labels(pairs: Sequence[Pair]) -> Tensor:
    """Return the response tokens [M], in the order of the hidden states from `predicting_states`."""
    return torch.tensor([token for pair in pairs for token in pair["input_ids"][pair["prompt_tokens"] :]])


def shared_tokens(pairs: Sequence[Pair]) -> int:
    """Return the length of the prefix that all prompts share, without their last tokens; 0 if sharing saves little."""
    shared = common_length([pair["input_ids"][: pair["prompt_tokens"] - 1] for pair in pairs])
    return shared if shared * (len(pairs) - 1) >= LEAST_SAVED else 0


def micro_batches(pairs: Sequence[Pair], schedules: int, tokens: int) -> Iterator[Sequence[Pair]]:
    """Cut `pairs`, in order, into batches of similar size with at most `tokens` tokens, or with one longer pair."""
    shared = shared_tokens(pairs)
    costs = [
        pair["prompt_tokens"] - 1 - shared + schedules * (len(pair["input_ids"]) - pair["prompt_tokens"])
        for pair in pairs
    ]
    room = max(tokens - shared, tokens // 4, 1)  # maximum tokens of a batch, not counting the shared prefix
    each = sum(costs) / -(-sum(costs) // room)  # tokens per batch if all batches have equal size
    first, cost = 0, 0
    for number, more in enumerate(costs):
        if number > first and (cost + more > room or cost + more / 2 > each):
            yield pairs[first:number]
            first, cost = number, 0
        cost += more
    yield pairs[first:]


def _responses(pairs: Sequence[Pair], schedules: Sequence[Schedule]) -> Tokens:
    """Return the tokens that predict the responses: the last prompt token, and all response tokens but the last."""
    fields = []
    for branch, schedule in enumerate(schedules):
        for group, pair in enumerate(pairs):
            last = pair["prompt_tokens"] - 1
            for place, token in enumerate(pair["input_ids"][last:-1]):
                depth = schedule.depth(place - 1) if place else len(schedule.prompt_layers)
                fields.append((token, last + place, group, branch, depth))
    return Tokens.of(fields)
