"""`skipdecode plan` with `task: score`: seconds a token from scored batches; nothing is simulated.

A job that scores runs prompts' passes alone: its time is about in proportion to the tokens of its prompts and texts,
without the beginning that all prompts share.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from actors.answers import Prompt
from pipeline.estimate.measure import WARM_UP_ROWS
from pipeline.estimate.predict import HIGH, LOW, SPREAD, STARTUP_SPREAD, Prediction, Work, makespan
from pipeline.generate.settings import fetched

REPLICATES = 200


@dataclass(frozen=True)
class ScoredChunk:
    """Rows that one call scored. tokens: that were computed for them, see `computed`."""

    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ScoreSample:
    """What one actor measured. loaded: s since 1970 when its model was ready."""

    loaded: float
    chunks: list[ScoredChunk]


def computed(prompt: Prompt, prefix: int) -> int:
    """Tokens of a row's prompt, behind the first `prefix` ones, and of its texts; 0 for a row with an error."""
    if prompt.error is not None:
        return 0
    return max(0, len(prompt.ids) - prefix) + sum(map(len, prompt.continuations))


def measure_scores(
    prompts: Sequence[Prompt], generator: Mapping[str, Any], prefix: Sequence[int], seconds: float
) -> ScoreSample:
    """Score as many of the prompts as the time allows; arguments as for `measure_actor`."""
    from actors.generator import Generator

    one = Generator(**fetched(generator))
    loaded, until = time.time(), time.monotonic() + seconds
    one.score(prompts[:WARM_UP_ROWS], prefix)
    chunks: list[ScoredChunk] = []
    for first in range(0, len(prompts), one.max_batch):
        some = prompts[first : first + one.max_batch]
        if chunks and time.monotonic() + chunks[-1].seconds > until:
            break
        began = time.perf_counter()
        one.score(some, prefix)
        tokens = sum(computed(prompt, len(prefix)) for prompt in some)
        chunks.append(ScoredChunk(len(some), tokens, time.perf_counter() - began))
    return ScoreSample(loaded, chunks)


def predict_scores(samples: Sequence[ScoreSample], work: Work, prefix: int) -> Prediction:
    """The whole run. prefix: tokens that all prompts begin with."""
    random = np.random.default_rng(0)
    chunks = [chunk for one in samples for chunk in one.chunks]
    tokens = {place: computed(prompt, prefix) for place, prompt in work.known.items()}
    mean = fmean(tokens.values())
    of_shards = [
        sum(tokens.get((shard.url, shard.first_row + row), mean) for row in range(shard.rows)) for shard in work.shards
    ]

    def wall(rate: float, startup: float) -> float:
        seconds = [rate * work.crowd * tokens for tokens in of_shards]
        return startup + max(makespan(seconds, work.actors), work.prepare)

    walls = []
    for _ in range(REPLICATES):
        drawn = [chunks[index] for index in random.integers(len(chunks), size=len(chunks))]
        rate = _rate(drawn) * max(0.5, random.normal(1.0, SPREAD))
        walls.append(wall(rate, work.startup * max(0.5, random.normal(1.0, STARTUP_SPREAD))))
    seconds = wall(_rate(chunks), work.startup)
    rows = sum(shard.rows for shard in work.shards)
    low, high = np.percentile(walls, [LOW, HIGH])
    good = [prompt for prompt in work.known.values() if prompt.error is None]
    share = rows * len(good) / len(work.known)  # of rows without an error
    busy = sum(of_shards) * _rate(chunks) * work.crowd
    return Prediction(
        seconds=seconds,
        low=min(float(low), seconds),
        high=max(float(high), seconds),
        busy_seconds=busy,
        prefill_seconds=busy,
        decode_seconds=0.0,
        prompt_tokens=round(share * fmean(len(prompt.ids) for prompt in good)),
        generated_tokens=round(share * fmean(sum(map(len, prompt.continuations)) for prompt in good)),
        batches=round(rows / fmean(chunk.rows for chunk in chunks)),
        cache_bytes=0,
        layer_ratio=None,
        sampled=sum(chunk.rows for chunk in chunks),
    )


def _rate(chunks: Sequence[ScoredChunk]) -> float:
    """Seconds a token of an actor."""
    return sum(chunk.seconds for chunk in chunks) / max(1, sum(chunk.tokens for chunk in chunks))
