"""`skipdecode plan` with `task: score`: seconds a token from scored batches; nothing is simulated.

A job that scores runs prompts' passes alone: its time is about in proportion to the tokens that are computed, which are
those of the beginning that all prompts share, once a call, of each distinct prompt behind it, and of all texts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from actors.answers import Prompt
from actors.engine.errors import UserError
from pipeline.estimate.measure import WARM_UP_ROWS
from pipeline.estimate.predict import HIGH, LOW, SPREAD, STARTUP_SPREAD, Prediction, Work, makespan
from pipeline.generate.settings import fetched
from pipeline.read.shards import Shard

REPLICATES = 200


@dataclass(frozen=True)
class ScoredChunk:
    """Rows of one call. rows: that have scores. tokens: that were computed for them, see `computed`."""

    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ScoreSample:
    """What one actor measured. loaded: s since 1970 when its model was ready. error: a row's that has none."""

    loaded: float
    chunks: list[ScoredChunk]
    tried: int  # rows
    error: str = ""


def computed(prompts: Sequence[Prompt], prefix: int) -> int:
    """Tokens of distinct prompts, behind the first `prefix` ones, and of all texts; none of rows with an error."""
    good = [prompt for prompt in prompts if prompt.error is None]
    distinct = {tuple(prompt.ids) for prompt in good}
    return sum(max(0, len(ids) - prefix) for ids in distinct) + sum(
        len(text) for one in good for text in one.continuations
    )


def measure_scores(
    prompts: Sequence[Prompt], generator: Mapping[str, Any], prefix: Sequence[int], seconds: float
) -> ScoreSample:
    """Score as many of the prompts as the time allows; arguments as for `measure_actor`."""
    from actors.generator import Generator

    one = Generator(**fetched(generator))
    loaded, until = time.time(), time.monotonic() + seconds
    one.score(prompts[:WARM_UP_ROWS], prefix)
    chunks: list[ScoredChunk] = []
    tried, error = 0, ""
    for first in range(0, len(prompts), one.max_batch):
        some = prompts[first : first + one.max_batch]
        if chunks and time.monotonic() + chunks[-1].seconds > until:
            break
        began = time.perf_counter()
        scored = one.score(some, prefix)
        tried += len(some)
        seconds_of_call = time.perf_counter() - began
        good = [prompt for prompt, row in zip(some, scored, strict=True) if row.error is None]
        error = error or next((row.error for row in scored if row.error is not None), "")
        chunks.append(ScoredChunk(len(good), len(prefix) + computed(good, len(prefix)), seconds_of_call))
    return ScoreSample(loaded, chunks, tried, error)


def predict_scores(samples: Sequence[ScoreSample], work: Work, prefix: int) -> Prediction:
    """The whole run. prefix: tokens that all prompts begin with. Raises UserError if no sampled row has scores."""
    random = np.random.default_rng(0)
    chunks = [chunk for one in samples for chunk in one.chunks]
    if not any(chunk.rows for chunk in chunks):
        raise UserError(f"no sampled row has scores; the first: {next(one.error for one in samples if one.error)}")
    mean = computed(list(work.known.values()), prefix) / len(work.known)

    def tokens(shard: Shard) -> float:
        places = [(shard.url, shard.first_row + row) for row in range(shard.rows)]
        known = [work.known[place] for place in places if place in work.known]
        return prefix + computed(known, prefix) + mean * (shard.rows - len(known))

    of_shards = [tokens(shard) for shard in work.shards]

    def wall(rate: float, startup: float) -> float:
        seconds = [rate * work.crowd * count for count in of_shards]
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
    scored = sum(chunk.rows for chunk in chunks)
    share = rows * len(good) / len(work.known) * scored / sum(one.tried for one in samples)  # rows that have scores
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
        batches=len(work.shards),
        cache_bytes=0,
        layer_ratio=None,
        sampled=scored,
    )


def _rate(chunks: Sequence[ScoredChunk]) -> float:
    """Seconds a token of an actor."""
    return sum(chunk.seconds for chunk in chunks) / max(1, sum(chunk.tokens for chunk in chunks))
