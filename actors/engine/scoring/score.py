"""Log-probabilities of given continuations of prompts, by prefill alone.

The prompt runs the layers that the schedule runs over prompts, continuation token t as input those of d(t), as if the
model had generated it. A prompt is computed once for all of its continuations, a prefix once for all prompts; the state
of a prompt's last token predicts the first token of every continuation. Requests with equal prompts share them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from actors.engine.batching import begins_with
from actors.engine.errors import UserError
from actors.engine.forcing import packed_attention
from actors.engine.out_of_memory import free_memory, is_out_of_memory
from actors.engine.protocol import EngineProtocol
from actors.engine.scoring.batches import Prompt, cut_batches, distinct
from actors.engine.scoring.passes import Scorer
from actors.engine.scoring.types import ContinuationScore, RequestScore, ScoreRequest


def score_continuations(
    engine: EngineProtocol,
    requests: Sequence[ScoreRequest],
    *,
    budget_bytes: int,
    max_rows: int,
    prefix: Sequence[int] = (),
    on_batch: Callable[[Sequence[int]], None] | None = None,
) -> list[RequestScore]:
    """Score all requests under the engine's schedule; returns their scores in their order.

    Counts go to `engine.stats`: continuation tokens as generated tokens, all time as prefill. Where memory runs out, a
    batch runs again in two halves; a prompt that runs out of memory alone gives its requests an error.

    Args:
        engine: Rows may be in flight; they are left alone.
        requests: The rows.
        budget_bytes: Bytes of keys and values of a batch.
        max_rows: Most prompts of a batch.
        prefix: Token ids with which most prompts begin, computed once for a call.
        on_batch: Called, before each batch, with the indices of its requests.

    Raises:
        UserError: A request that cannot be scored.
    """
    for request in requests:
        check_request(engine, request, budget_bytes)
    found: dict[tuple[int, int], ContinuationScore] = {}
    errors: dict[int, str] = {}
    prompts = distinct(requests)
    with packed_attention.packed(engine.decoder.model), torch.inference_mode():
        for shared in (tuple(prefix), ()) if prefix else ((),):
            group = [prompt for prompt in prompts if begins_with(prompt.ids, prefix) == bool(shared)]
            if not group:
                continue
            scorer = Scorer(engine, shared)
            waiting = list(cut_batches(group, len(shared), token_bytes(engine), budget_bytes, max_rows))[::-1]
            while waiting:
                batch = waiting.pop()
                numbers = sorted({one.request for prompt in batch for one in prompt.continuations})
                if on_batch is not None:
                    on_batch(numbers)
                try:
                    found |= scorer.run(batch)
                    continue
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                engine.stats.out_of_memory += 1  # here the error is gone, whose traceback holds tensors
                engine.release_memory()
                free_memory()
                if len(batch) > 1:
                    half = (len(batch) + 1) // 2
                    waiting += [batch[half:], batch[:half]]
                else:
                    errors |= dict.fromkeys(numbers, _alone_error(batch[0]))
    nothing = ContinuationScore((), ())
    return [
        RequestScore((), errors[number])
        if number in errors
        else RequestScore(tuple(found.get((number, each), nothing) for each in range(len(request.continuations))))
        for number, request in enumerate(requests)
    ]


def check_request(engine: EngineProtocol, request: ScoreRequest, budget_bytes: int) -> None:
    """Raise UserError for a request that cannot be scored."""
    request.check(engine.decoder.context_length, engine.decoder.vocab_size)
    if (needed := scoring_bytes(engine, request)) > budget_bytes:
        raise UserError(f"needs {needed} bytes of cache, more than the budget of {budget_bytes}")


def token_bytes(engine: EngineProtocol) -> int:
    """Bytes of the keys and values of a token in all layers."""
    decoder = engine.decoder
    return 2 * decoder.num_layers * decoder.kv_heads * decoder.head_dim * decoder.dtype.itemsize


def scoring_bytes(engine: EngineProtocol, request: ScoreRequest) -> int:
    """Most bytes of keys and values that a request needs alone."""
    return (len(request.prompt_ids) + request.longest) * token_bytes(engine)


def _alone_error(prompt: Prompt) -> str:
    return (
        f"out of memory: a prompt of {len(prompt.ids)} tokens and continuations of up to {prompt.longest} do not fit "
        "alone: shorten them"
    )
