"""Skipping decode in the plainest way: one row at a time, no cache, everything recomputed for every token."""

from __future__ import annotations

import torch

from actors.engine.decoder import Decoder, part
from actors.engine.sampling import RowSampling, sample
from actors.engine.schedule import Schedule
from actors.engine.types import Request


@torch.inference_mode()
def oracle_logits(decoder: Decoder, schedule: Schedule, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits [V] behind the last token of prompt + response."""
    ids = torch.tensor([prompt + response])
    places = torch.arange(ids.shape[1])[None]
    hidden, rotary = decoder.embed(ids, places)
    runs = [set(schedule.prompt_layers)] * len(prompt) + [set(schedule.layers(t)) for t in range(len(response))]
    for layer in range(decoder.num_layers):
        columns = [column for column, layers in enumerate(runs) if layer in layers]
        if not columns:
            continue
        window = decoder.windows[layer] or len(runs)
        keys, queries = torch.tensor(columns), torch.tensor(columns)[:, None]
        seen = (queries - window < keys) & (keys <= queries)
        turned = part(rotary[layer], columns=columns)
        hidden[:, columns] = decoder.run_layer(layer, hidden[:, columns], turned, seen[None, None])
    return decoder.logits(hidden[:, -1])[0]


def oracle(decoder: Decoder, schedule: Schedule, request: Request, stop_ids: set[int]) -> list[int]:
    """The row's tokens."""
    prompt, response, params = list(request.prompt_ids), [], request.sampling
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
    limit = min(params.max_new_tokens, decoder.context_length - len(prompt))
    while len(response) < limit:
        early = len(response) < params.min_new_tokens
        state = RowSampling(params, request.key, len(response), barred=ends if early else ())
        if state.penalized:
            state.counts = {token: response.count(token) for token in {*prompt, *response}}
            if params.repetition_penalty == 1:
                state.counts = {token: count for token, count in state.counts.items() if count}
        response += sample(oracle_logits(decoder, schedule, prompt, response)[None], [state]).tokens
        if len(response) >= params.min_new_tokens and response[-1] in ends:
            break
    return response
