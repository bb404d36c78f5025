"""Teacher forcing without padding: each token of known responses runs the layers that it runs at inference.

Tokens form a tree, see `token_tree`: first the tokens with which all prompts begin, then each prompt's own tokens, both
computed once for all schedules, then the responses, computed once for each schedule. The prompt runs all layers (or
those of d(0)). Response token t as input runs the layers of d(t).
Shapes: E hidden size, S schedules, M response tokens of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.library.token_tree import Level, Tokens, prompt_ranks, prompt_tokens, run_level
from actors.engine.schedule.schedule import Schedule
from actors.engine.scheduler import common_length

Pair = Mapping[str, Any]  # `input_ids`: prompt and response; `prompt_tokens`: length of the prompt
LEAST_SAVED = 16  # if a shared prefix saves fewer tokens, its own pass costs more


def predicting_states(
    decoder: Decoder,  # decoder with the attention of `packed_attention`
    pairs: Sequence[Pair],  # prompts and responses, at least one
    schedules: Sequence[Schedule],  # schedules that run the same layers over prompts
    *,
    # whether gradients flow through all prompt tokens; else through each prompt's last one alone
    prompt_gradient: bool = True,
    recompute: bool = False,  # keep only each layer's input for the backward pass (gradient checkpointing)
) -> Tensor:
    """Return the hidden states [S, M, E] before the final norm that predict each response token under each schedule."""
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
    """Return the tokens [M] of the responses in the order of `predicting_states`."""
    return torch.tensor([token for pair in pairs for token in pair["input_ids"][pair["prompt_tokens"] :]])


def shared_tokens(pairs: Sequence[Pair]) -> int:
    """Return the length of the prompts' shared prefix, which is computed once; a prompt's last token is not in it."""
    shared = common_length([pair["input_ids"][: pair["prompt_tokens"] - 1] for pair in pairs])
    return shared if shared * (len(pairs) - 1) >= LEAST_SAVED else 0


def micro_batches(pairs: Sequence[Pair], schedules: int, tokens: int) -> Iterator[Sequence[Pair]]:
    """Cut pairs, in order, into batches of about equal size, with at most `tokens` tokens unless one pair has more."""
    shared = shared_tokens(pairs)
    costs = [
        pair["prompt_tokens"] - 1 - shared + schedules * (len(pair["input_ids"]) - pair["prompt_tokens"])
        for pair in pairs
    ]
    room = max(tokens - shared, tokens // 4, 1)
    each = sum(costs) / -(-sum(costs) // room)
    first, cost = 0, 0
    for number, more in enumerate(costs):
        if number > first and (cost + more > room or cost + more / 2 > each):
            yield pairs[first:number]
            first, cost = number, 0
        cost += more
    yield pairs[first:]


def _responses(pairs: Sequence[Pair], schedules: Sequence[Schedule]) -> Tokens:
    """Return, for each schedule, every prompt's last token and its response's tokens except the last."""
    fields = []
    for branch, schedule in enumerate(schedules):
        for group, pair in enumerate(pairs):
            last = pair["prompt_tokens"] - 1
            for place, token in enumerate(pair["input_ids"][last:-1]):
                depth = schedule.depth(place - 1) if place else len(schedule.prompt_layers)
                fields.append((token, last + place, group, branch, depth))
    return Tokens.of(fields)
