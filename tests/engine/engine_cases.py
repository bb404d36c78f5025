"""Cases for tests of the engine: schedules, requests, and calls that answer them or count the layers that run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from tiny_models import LAYERS, MODELS, VOCAB
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.loop import Loop, OnBatch
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import Completion, Request, SamplingParams

STOP = {2, 5, 9, 33}
SPECS = [
    ScheduleSpec(),
    ScheduleSpec(speedup=2, horizon=6),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, decay="cosine", keep_order="even"),
    ScheduleSpec(max_depth=6, min_depth=1, horizon=8, decay="power", prompt="first"),
    ScheduleSpec(max_depth=4, min_depth=2, horizon=7, decay="step", steps=3, prompt="first", keep_order="even"),
    ScheduleSpec(max_depth=3, min_depth=3, decay="constant"),
    ScheduleSpec(depths=(6, 6, 4, 4, 4, 3, 2), warmup=2),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]
PREFIX = [(7 * place) % 90 + 3 for place in range(17)]

# Tests that do not depend on the family run with these families; the laws of the engine with all: these families with
# all schedules, the others with one of two, in turn.
THOROUGH = ["llama", "opt-post-norm", "gemma3"]
thoroughly = pytest.mark.parametrize("family", THOROUGH, indirect=True)


def cases_of(families: Iterable[str]) -> list[tuple[str, int]]:
    """Families with the numbers of their schedules."""
    return [
        (name, spec)
        for number, name in enumerate(families)
        for spec in (range(len(SPECS)) if name in THOROUGH else (1 + 2 * (number % 2),))
    ]


CASES = cases_of(MODELS)
every_case = pytest.mark.parametrize(("family", "spec"), CASES, indirect=["family"])


def layer_columns(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of hidden states that each layer is given from now on."""
    columns, plain = [0] * LAYERS, decoder.run_layer

    def counting(layer: int, hidden: Tensor, *rest: Any) -> Tensor:
        columns[layer] += hidden.shape[1]
        return plain(layer, hidden, *rest)

    monkeypatch.setattr(decoder, "run_layer", counting)
    return columns


def requests(count: int, seed: int, *, sampled: bool = False, most_new: int = 14, longest: int = 20) -> list[Request]:
    """Random rows; fewer rows of a seed are the first of more, so that tests share what the oracle computes."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        sampling = SamplingParams(max_new_tokens=rng.randint(1, most_new))
        if sampled:
            sampling = SamplingParams(
                max_new_tokens=sampling.max_new_tokens,
                min_new_tokens=rng.choice([0, 0, sampling.max_new_tokens // 2]),
                temperature=rng.choice([0.0, 0.7, 1.3]),
                top_k=rng.choice([0, 5]),
                top_p=rng.choice([1.0, 0.8]),
                min_p=rng.choice([0.0, 0.05]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                presence_penalty=rng.choice([0.0, 0.5]),
                frequency_penalty=rng.choice([0.0, 0.3]),
                stop_token_ids=rng.choice([(), (40, 50, 60)]),
                ignore_eos=rng.choice([False, False, True]),
            )
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]
        rows.append(Request(prompt, sampling, key=rng.getrandbits(62)))
    return rows


def generate(
    engine: Engine,
    requests: Sequence[Request],
    *,
    on_batch: OnBatch | None = None,
    **how: Any,
) -> list[Completion]:
    """The requests' completions, in order. `how`: arguments of `Loop`."""
    loop = Loop(engine, **how)
    return loop.finish(loop.add(requests, on_batch))


def answer(engine: Engine, rows: Sequence[Request], max_rows: int = 64, **how: Any) -> list[Completion]:
    return generate(engine, rows, budget_bytes=2**40, max_rows=max_rows, **how)


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    warmup = draw(st.integers(0, LAYERS))
    depths = sorted(draw(st.lists(st.integers(max(warmup, 1), LAYERS), min_size=1, max_size=12)), reverse=True)
    order = (*draw(st.permutations(range(warmup))), *draw(st.permutations(range(warmup, LAYERS))))
    return Schedule(LAYERS, tuple(depths), order, warmup, draw(st.sampled_from(["full", "first"])))


def with_prefix(count: int, seed: int) -> list[Request]:
    """Prompts that begin with PREFIX, but for every fifth; one is the prefix itself."""
    rng = random.Random(seed)
    rows = []
    for row in range(count):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 14))]
        sampling = SamplingParams(max_new_tokens=rng.randint(1, 12), temperature=rng.choice([0.0, 1.0]))
        prompt = PREFIX if row == 3 else own if row % 5 == 4 else PREFIX + own
        rows.append(Request(prompt, sampling, rng.getrandbits(60)))
    return rows
