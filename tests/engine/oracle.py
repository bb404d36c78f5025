"""SkipDecode in its plainest form: one row at a time, without a cache, by the library's layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch

from actors.engine.decoder import Decoder, part
from actors.engine.sampling.sampler import sample_by_torch
from actors.engine.sampling.state import RowSampling, TokenCounts
from actors.engine.schedule.schedule import Schedule
from actors.engine.types import Request

# of each decoder: the tokens of the rows that have been asked for, by schedule, request and stop tokens
_known: WeakKeyDictionary[Decoder, dict[object, list[int]]] = WeakKeyDictionary()


def forced_logits(decoder: Decoder, schedule: Schedule, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logits after the prompt and after each token of the response: [1 + len(response), V]."""
    ids = torch.tensor([[*prompt, *response]])
    positions = torch.arange(ids.shape[1])[None]
    hidden, rotary = decoder.embed(ids, positions)  # [1, S, D]
    layers_of = [set(schedule.prompt_layers)] * len(prompt) + [set(schedule.layers(t)) for t in range(len(response))]
    for layer in range(decoder.num_layers):
        columns = [column for column, layers in enumerate(layers_of) if layer in layers]
        if not columns:
            continue
        window = decoder.windows[layer] or len(layers_of)
        keys, queries = torch.tensor(columns), torch.tensor(columns)[:, None]
        visible = (queries - window < keys) & (keys <= queries)
        rope = part(rotary[layer], columns=columns)
        hidden[:, columns] = decoder.run_layer(layer, hidden[:, columns], rope, visible[None, None])
    return decoder.logits(hidden[0, len(prompt) - 1 :])


oracle_logits_each = torch.inference_mode()(forced_logits)


def oracle_logits(decoder: Decoder, schedule: Schedule, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Logits after the last token of prompt + response: [V]."""
    return oracle_logits_each(decoder, schedule, prompt, response)[-1]


def oracle(
    decoder: Decoder, schedule: Schedule, request: Request, stop_ids: set[int], guess: Sequence[int] = ()
) -> list[int]:
    """The row's tokens, computed once for each decoder, schedule and request.

    Args:
        guess: the engine's answer. Logits after its tokens come from one pass: a token sees none that follow it. Where
            the guess is wrong, one pass a token follows, so that the result never depends on it.
    """
    known = _known.setdefault(decoder, {})
    case = schedule, tuple(request.prompt_ids), request.sampling, request.key, frozenset(stop_ids)
    if case not in known:
        known[case] = tokens_of(decoder, schedule, request, stop_ids, list(guess))
    return known[case]


def tokens_of(
    decoder: Decoder, schedule: Schedule, request: Request, stop_ids: set[int], guess: list[int]
) -> list[int]:
    """`oracle`, computed every time."""
    prompt, response, params = list(request.prompt_ids), [], request.sampling
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
    limit = min(params.max_new_tokens, decoder.context_length - len(prompt))
    guess = guess[: limit - 1]  # no token follows the last one
    guessed = oracle_logits_each(decoder, schedule, prompt, guess)
    while len(response) < limit:
        early = len(response) < params.min_new_tokens
        state = RowSampling(params, request.key, len(response), barred=ends if early else ())
        if state.penalized:
            state.counts = TokenCounts(prompt if params.repetition_penalty != 1 else ())
            for token in response:
                state.counts.add(token)
        if response == guess[: len(response)]:
            logits = guessed[len(response)]
        else:
            logits = oracle_logits(decoder, schedule, prompt, response)
        response += sample_by_torch(logits[None], [state]).tokens
        if len(response) >= params.min_new_tokens and response[-1] in ends:
            break
    return response


def oracle_answers(
    decoder: Decoder, schedule: Schedule, rows: Iterable[Request], stop_ids: set[int], guesses: Iterable[Sequence[int]]
) -> list[list[int]]:
    """`oracle` of each row; guesses: the engine's answers."""
    return [oracle(decoder, schedule, row, stop_ids, guess) for row, guess in zip(rows, guesses, strict=True)]
