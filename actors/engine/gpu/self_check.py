"""Holds the paged engine to the library's layers on this machine, over a few rows, before its first answer."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import torch

from actors.engine.errors import UserError
from actors.engine.protocol import EngineProtocol
from actors.engine.scheduler import generate
from actors.engine.types import Completion, Request, SamplingParams

PROMPT_TOKENS = (3, 40, 200)  # of the rows
SHARED_TOKENS = 36  # with which all but the shortest begin: whole pages, and tokens behind them
NEW_TOKENS = 8
TOP = 5  # log-probabilities compared at each token
# most nats of the mean difference; rounding of 16 bits leaves 0.01 to 0.1, a wrong kernel more than 1
BOUNDS = {torch.float32: 0.01, torch.bfloat16: 0.3, torch.float16: 0.1}
EIGHT_BITS = 3  # times the bound where products have 8 bits, which alone came to 0.40 nats of SmolLM2-135M on a CPU
log = logging.getLogger(__name__)


def probe(engine: EngineProtocol) -> list[Completion]:
    """Greedy answers to prompts of random tokens, with their likeliest tokens."""
    decoder, chance = engine.decoder, random.Random(0)
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, logprobs=TOP)
    most = decoder.context_length - NEW_TOKENS
    tokens = [chance.randrange(decoder.vocab_size) for _ in range(SHARED_TOKENS)]
    requests = [
        Request(
            [
                *(tokens if length > SHARED_TOKENS else ()),
                *(chance.randrange(decoder.vocab_size) for _ in range(length)),
            ][: min(length, most)],
            params,
        )
        for length in PROMPT_TOKENS
    ]
    budget = len(requests) * engine.row_bytes(max(PROMPT_TOKENS), NEW_TOKENS)
    return generate(engine, requests, budget_bytes=budget, max_rows=len(requests), prefix=tokens, scheduler="refill")


def difference(wanted: Sequence[Completion], got: Sequence[Completion]) -> float:
    """Mean absolute difference of log-probabilities, nats, over tokens that both list at a position.

    A row counts up to the first position at which its answers have different tokens. Infinite if a position has no
    token in both lists.
    """
    differences: list[float] = []
    for one, other in zip(wanted, got, strict=True):
        assert one.logprobs is not None and other.logprobs is not None
        for want, have in zip(one.logprobs, other.logprobs, strict=True):
            theirs, ours = dict(want.top), dict(have.top)
            shared = theirs.keys() & ours.keys()
            if not shared:
                return float("inf")
            differences += [abs(theirs[token] - ours[token]) for token in shared]
            if want.token != have.token:
                break
    return sum(differences) / len(differences)


def check(engine: EngineProtocol, wanted: Sequence[Completion], *, eight_bits: bool = False) -> None:
    """Compare the engine's answers with those of the library's layers, in 16 bits.

    eight_bits: whether the engine's products have them.

    Raises:
        UserError: They differ by more than rounding.
    """
    far = difference(wanted, probe(engine))
    bound = BOUNDS[engine.decoder.dtype] * (EIGHT_BITS if eight_bits else 1)
    if not far <= bound:
        raise UserError(
            f"engine: here the paged engine's log-probabilities differ from the library's by {far:.2g} nats, more than "
            f"{bound}: set engine: library, and report the GPU and the versions of torch and triton"
        )
    log.info("engine: paged, %.2g nats from the library's layers over %d rows", far, len(wanted))
