"""Skipping decode in the plainest way: one row at a time, no cache, everything recomputed for every token."""

from __future__ import annotations

import torch

from actors.engine.decoder import Decoder
from actors.engine.sampling import sample
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
        part = None if rotary is None else (rotary[0][:, columns], rotary[1][:, columns])
        causal = torch.ones(len(columns), len(columns), dtype=torch.bool).tril()[None, None]
        hidden[:, columns] = decoder.run_layer(layer, hidden[:, columns], part, causal)
    return decoder.logits(hidden[:, -1])[0]


def oracle(decoder: Decoder, schedule: Schedule, request: Request, stop_ids: set[int]) -> list[int]:
    """The row's tokens."""
    prompt, response = list(request.prompt_ids), []
    limit = min(request.sampling.max_new_tokens, decoder.context_length - len(prompt))
    while len(response) < limit:
        logits = oracle_logits(decoder, schedule, prompt, response)
        token, _ = sample(logits[None], [request.sampling], [request.key], [len(response)])
        response.append(int(token))
        if response[-1] in stop_ids:
            break
    return response
