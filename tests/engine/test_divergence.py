"""Token KL and perplexity: against the uncached oracle, and against what the engine itself said of its tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine_cases import generate
from oracle import oracle_logits_each
from tiny_models import LAYERS, VOCAB, tiny_model

from actors.engine.cpu.executor import fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.torch import divergence
from actors.engine.torch.divergence import Model, Pair, answer_regret, teacher_forced
from actors.engine.types import Request, SamplingParams

FULL = ScheduleSpec().build(LAYERS)
SPECS = [
    ScheduleSpec(speedup=2, horizon=5),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first"),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0),
]


def pairs(seed: int, count: int = 6) -> list[Pair]:
    rng = random.Random(seed)
    return [
        (rng.choices(range(3, VOCAB), k=rng.randint(1, 9)), rng.choices(range(3, VOCAB), k=rng.randint(1, 8)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("make", [Decoder, fastest_decoder])
@pytest.mark.parametrize("family", ["llama", "opt", "gemma2"])
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_scores_are_the_oracles(spec: ScheduleSpec, family: str, make: Callable[..., Decoder]) -> None:
    library, decoder = Decoder(tiny_model(family)), make(tiny_model(family))
    schedule, rows = spec.build(LAYERS), pairs(1)
    full, line = Model(decoder, FULL), Model(decoder, schedule)
    same, found = teacher_forced(full, [full, line], rows)
    assert (same.kl == 0).all()
    for row, (prompt, response) in enumerate(rows):
        kl = nll = 0.0
        agreed = []
        p_each, q_each = (
            oracle_logits_each(library, of, prompt, response[:-1]).double().log_softmax(-1) for of in (FULL, schedule)
        )
        for token, p, q in zip(response, p_each, q_each, strict=True):
            kl += float((p.exp() * (p - q)).sum())
            nll -= float(q[token])
            agreed.append(bool(p.argmax() == q.argmax()))
        assert found.kl[row] == pytest.approx(kl, rel=1e-3, abs=1e-4)
        assert found.nll[row] == pytest.approx(nll, rel=1e-4)
        assert (found.tokens[row], found.agreed[row]) == (len(response), sum(agreed))
    assert found.kl.sum() > 0.01
    assert (same.agreed == same.tokens).all() and 0 < found.agreed.sum() < found.tokens.sum()


def test_regret_is_the_oracles_and_greedy_answers_have_none() -> None:
    decoder, rows = Decoder(tiny_model("llama")), pairs(4)
    greedy = [Request(prompt, SamplingParams(max_new_tokens=6), key=row) for row, (prompt, _) in enumerate(rows)]
    done = generate(Engine(decoder, FULL, {2}), greedy, budget_bytes=2**24, max_rows=4)
    own = [(prompt, one.token_ids) for (prompt, _), one in zip(rows, done, strict=True)]
    np.testing.assert_allclose(answer_regret(Model(decoder, FULL), own), 0, atol=1e-4)
    found = answer_regret(Model(decoder, FULL), rows)
    for row, (prompt, answer) in enumerate(rows):
        logits = oracle_logits_each(decoder, FULL, prompt, answer[:-1]).double()
        lost = sum(float(each.max() - each[token]) for token, each in zip(answer, logits, strict=True))
        assert found[row] == pytest.approx(lost, rel=1e-3, abs=1e-4)
    assert (found > 0.1).all()


@pytest.mark.parametrize("spec", [ScheduleSpec(), *SPECS], ids=range(len(SPECS) + 1))
def test_tokens_are_as_likely_as_the_engine_said_when_it_drew_them(spec: ScheduleSpec) -> None:
    decoder, schedule = Decoder(tiny_model("llama")), spec.build(LAYERS)
    prompts = [prompt for prompt, _ in pairs(2)]
    sampling = SamplingParams(max_new_tokens=7, temperature=1.0)
    requests = [Request(prompt, sampling, key=row) for row, prompt in enumerate(prompts)]
    done = generate(Engine(decoder, schedule, {2}), requests, budget_bytes=2**24, max_rows=4)
    rows = [(prompt, one.token_ids) for prompt, one in zip(prompts, done, strict=True)]
    [found] = teacher_forced(Model(decoder, FULL), [Model(decoder, schedule)], rows)
    np.testing.assert_allclose(found.nll, [-one.cumulative_logprob for one in done], rtol=1e-3, atol=1e-3)


def test_neither_batches_nor_a_padded_vocabulary_change_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, rows = Decoder(tiny_model("llama")), pairs(3)
    line = Model(decoder, SPECS[0].build(LAYERS))
    [whole] = teacher_forced(Model(decoder, FULL), [line], rows)
    monkeypatch.setattr(divergence, "TOKENS", 1)
    monkeypatch.setattr(divergence, "LOGITS_AT_ONCE", 2 * VOCAB)
    sizes: list[int] = []
    plain = Decoder.logits
    padded = Decoder(decoder.model)

    def logits(self: Decoder, states: torch.Tensor) -> torch.Tensor:
        found = plain(self, states)
        sizes.append(len(states))
        return torch.cat([found, torch.full((len(states), 5), 50.0)], dim=-1) if self is padded else found

    monkeypatch.setattr(Decoder, "logits", logits)
    done: list[int] = []
    [alone] = teacher_forced(Model(padded, FULL), [line], rows, report=done.append)
    assert set(sizes) == {1, 2}
    assert done == [*range(len(rows)), len(rows)]
    np.testing.assert_allclose(alone.kl, whole.kl, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(alone.nll, whole.nll, rtol=1e-4)
