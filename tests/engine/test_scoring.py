"""Scores of continuations against transformers' own, the uncached oracle's, and what the engine says of its answers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from engine_cases import layer_columns
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import oracle_logits_each
from tiny_models import CONTEXT, LAYERS, VOCAB, tiny_model
from torch import Tensor

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import UserError
from actors.engine.gpu import reference
from actors.engine.scheduler import generate
from actors.engine.schedules.schedule import Schedule, ScheduleSpec
from actors.engine.scoring import batches as scoring_batches
from actors.engine.scoring import passes as scoring_passes
from actors.engine.scoring.score import score_continuations, scoring_bytes
from actors.engine.scoring.types import ContinuationScore, RequestScore, ScoreRequest
from actors.engine.types import Request, SamplingParams

FULL = ScheduleSpec().build(LAYERS)
SCHEDULES = [
    FULL,
    ScheduleSpec(speedup=2, horizon=5).build(LAYERS),
    ScheduleSpec(max_depth=5, min_depth=2, horizon=4, keep_order="even", prompt="first").build(LAYERS),
    ScheduleSpec(depths=(5, 3, 1), keep_order=(3, 0, 5, 1, 4, 2), warmup=0).build(LAYERS),
]
BUDGET = {"budget_bytes": 2**24, "max_rows": 8}


def tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(3, VOCAB), k=count)


def requests(seed: int, prefix: int = 0, top: int = 0) -> list[ScoreRequest]:
    """Prompts of 1 to 9 tokens behind a common prefix; one occurs twice; continuations of 0 to 7 tokens."""
    rng = random.Random(seed)
    shared = tokens(rng, prefix)
    prompts = [shared + tokens(rng, rng.randint(1, 9)) for _ in range(4)]
    prompts.append(prompts[1])
    return [ScoreRequest(ids, [tokens(rng, rng.choice([1, 1, 3, 0, 7])) for _ in range(4)], top) for ids in prompts]


def expected(logits: Tensor, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Log-probability of each token, and whether it is the likeliest, from logits [len(ids), V]."""
    logprobs = logits.double().log_softmax(-1)
    return (
        [float(each[token]) for token, each in zip(ids, logprobs, strict=True)],
        [int(each.argmax()) == token for token, each in zip(ids, logprobs, strict=True)],
    )


def assert_scores(found: list[RequestScore], asked: list[ScoreRequest], logits_of: Any) -> None:
    assert len(found) == len(asked)
    for score, request in zip(found, asked, strict=True):
        assert score.error is None
        for one, ids in zip(score.continuations, request.continuations, strict=True):
            logprobs, greedy = expected(logits_of(request.prompt_ids, ids), list(ids)) if ids else ([], [])
            assert [token.token for token in one.tokens] == list(ids)
            assert [token.logprob for token in one.tokens] == pytest.approx(logprobs, rel=1e-3, abs=1e-3)
            assert list(one.greedy) == greedy
            assert one.is_greedy == all(greedy)
            assert one.cumulative == pytest.approx(sum(logprobs), rel=1e-3, abs=2e-3)
            if ids:
                assert one.perplexity == pytest.approx(math.exp(-sum(logprobs) / len(ids)), rel=1e-2)
            else:
                assert one.perplexity is None


@pytest.mark.parametrize("prefix", [0, 17])
def test_scores_are_transformers_own(decoder: Decoder, library: Decoder, prefix: int) -> None:
    asked = requests(1, prefix)

    def logits(prompt: list[int], ids: list[int]) -> Tensor:
        output = library.model(input_ids=torch.tensor([[*prompt, *ids[:-1]]])).logits
        return output[0, len(prompt) - 1 :]

    for layers in (decoder, library):
        engine = Engine(layers, FULL, {2})
        before = layers.model.config._attn_implementation
        found = score_continuations(engine, asked, prefix=asked[0].prompt_ids[:prefix], **BUDGET)
        assert_scores(found, asked, logits)
        assert layers.model.config._attn_implementation == before


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
@pytest.mark.parametrize("name", ["llama", "opt-post-norm", "gemma2", "gemma3", "gpt2"])
def test_each_token_runs_the_layers_of_its_position(name: str, schedule: Schedule) -> None:
    library = Decoder(tiny_model(name))
    fast = Decoder(tiny_model(name))
    fast.prepare_for_cpu()
    asked = requests(2, 17)
    found = score_continuations(Engine(fast, schedule, {2}), asked, prefix=asked[0].prompt_ids[:17], **BUDGET)
    assert_scores(found, asked, lambda prompt, ids: oracle_logits_each(library, schedule, prompt, ids[:-1]))


QWEN = Decoder(tiny_model("qwen2-window"))
IDS = st.lists(st.integers(3, 6), min_size=1, max_size=8)


@settings(max_examples=30)
@example(  # one of two prompts has continuations behind its first token
    prompts=[[3, 4, 5], [3]],
    continuations=[[[4, 4]], [[5]]],
    prefix=[6],
    schedule=FULL,
    sizes=(12, 40, 20, 5 * VOCAB),
    max_rows=4,
)
@given(
    prompts=st.lists(IDS, min_size=1, max_size=5),
    continuations=st.lists(st.lists(IDS, max_size=4), min_size=5, max_size=5),
    prefix=IDS,
    schedule=st.sampled_from(SCHEDULES),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 40), st.integers(1, 20), st.integers(1, 5 * VOCAB)),
    max_rows=st.integers(1, 4),
)
def test_no_way_of_sharing_passes_changes_scores(
    prompts: list[list[int]],
    continuations: list[list[list[int]]],
    prefix: list[int],
    schedule: Schedule,
    sizes: tuple[int, int, int, int],
    max_rows: int,
) -> None:
    """Few values of tokens, so that prompts are equal, begin with each other, and begin with the prefix."""
    asked = [ScoreRequest(ids, ways) for ids, ways in zip(prompts, continuations, strict=False)]
    engine = Engine(QWEN, schedule, {2})
    budget = max(scoring_bytes(engine, one) for one in asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring_passes, "LOGITS_AT_ONCE", sizes[3])
        for module in (scoring_batches, scoring_passes):
            patch.setattr(module, "PASS_TOKENS", sizes[0])
        patch.setattr(scoring_batches, "PASS_KEYS", sizes[1])
        patch.setattr(scoring_batches, "LEAST_GROUP", sizes[2])
        found = score_continuations(engine, asked, budget_bytes=budget, max_rows=max_rows, prefix=prefix)
    assert_scores(found, asked, lambda prompt, ids: oracle_logits_each(QWEN, schedule, prompt, ids[:-1]))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_a_prompt_is_computed_once_and_counted(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny_model("llama"))
    run = layer_columns(decoder, monkeypatch)
    asked = requests(3, 17)
    engine = Engine(decoder, schedule, {2})
    score_continuations(engine, asked, prefix=asked[0].prompt_ids[:17], **BUDGET)
    distinct = {tuple(one.prompt_ids) for one in asked}
    assert len(distinct) == 4
    prompts = 17 + sum(len(ids) - 17 for ids in distinct)
    lengths = [len(ids) for one in asked for ids in one.continuations if ids]
    for layer in range(LAYERS):
        of_prompts = prompts if layer in schedule.prompt_layers else 0
        assert run[layer] == of_prompts + sum(schedule.uses(layer, length) for length in lengths)
    stats = engine.take_stats()
    assert stats.prompt_tokens == stats.padded_prompt_tokens == prompts
    asked_for = sum(len(one.prompt_ids) for one in asked for ids in one.continuations if ids)
    assert stats.shared_prompt_tokens == asked_for - (prompts - 17)  # by the prefix's pass or another continuation's
    assert stats.generated_tokens == sum(lengths)
    assert stats.decode_steps == sum(length - 1 for length in lengths)
    assert stats.layer_steps == sum(schedule.layer_steps(length - 1) for length in lengths)
    assert stats.full_layer_steps == LAYERS * stats.decode_steps
    assert stats.batches == 1 and stats.cache_bytes > 0 and stats.prefill_seconds > 0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=range(len(SCHEDULES)))
def test_generated_tokens_are_as_likely_as_the_engine_said(schedule: Schedule) -> None:
    engine = Engine(Decoder(tiny_model("llama")), schedule, {2})
    sampling = SamplingParams(max_new_tokens=6, logprobs=3)
    prompts = [one.prompt_ids for one in requests(4)]
    done = generate(engine, [Request(ids, sampling) for ids in prompts], **BUDGET)
    asked = [ScoreRequest(ids, [one.token_ids], top=3) for ids, one in zip(prompts, done, strict=True)]
    for score, answer in zip(score_continuations(engine, asked, **BUDGET), done, strict=True):
        [one] = score.continuations
        assert one.is_greedy
        assert one.cumulative == pytest.approx(answer.cumulative_logprob, rel=1e-3, abs=1e-3)
        assert answer.logprobs is not None
        for found, drawn in zip(one.tokens, answer.logprobs, strict=True):
            assert found.token == drawn.token and len(found.top) == 3
            assert [token for token, _ in found.top] == [token for token, _ in drawn.top]
            assert [value for _, value in found.top] == pytest.approx(
                [value for _, value in drawn.top], rel=1e-3, abs=1e-3
            )


def test_the_tokens_of_a_text_by_themselves() -> None:
    decoder = Decoder(tiny_model("llama"))
    ids = tokens(random.Random(5), CONTEXT + 1)  # the last one is never an input
    [score] = score_continuations(Engine(decoder, FULL, {2}), [ScoreRequest(ids[:1], [ids[1:]])], **BUDGET)
    logits = decoder.model(input_ids=torch.tensor([ids[:-1]])).logits[0]
    assert [one.logprob for one in score.continuations[0].tokens] == pytest.approx(
        expected(logits, ids[1:])[0], rel=1e-3, abs=1e-3
    )


def test_out_of_memory_halves_batches_and_fails_only_the_row_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(6)
    engine = Engine(Decoder(tiny_model("llama")), FULL, {2})
    whole = score_continuations(engine, asked, **BUDGET)
    heavy = tuple(asked[2].prompt_ids)
    plain = scoring_passes.Scorer.run
    tried: list[int] = []

    def failing(self: Any, batch: list[Any]) -> Any:
        tried.append(len(batch))
        if any(prompt.ids == heavy for prompt in batch):
            raise torch.OutOfMemoryError("no memory")
        return plain(self, batch)

    monkeypatch.setattr(scoring_passes.Scorer, "run", failing)
    seen: list[list[int]] = []
    engine.take_stats()
    found = score_continuations(engine, asked, on_batch=lambda rows: seen.append(list(rows)), **BUDGET)
    assert tried[0] == 4 and 1 in tried
    assert sorted(seen[0]) == [0, 1, 2, 3, 4] and [2] in seen
    assert found[2].continuations == () and "out of memory" in str(found[2].error)
    assert engine.stats.out_of_memory >= 2
    for row in (0, 1, 3, 4):
        for one, other in zip(found[row].continuations, whole[row].continuations, strict=True):
            assert one.cumulative == pytest.approx(other.cumulative, abs=1e-4)


def test_another_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Decoder(tiny_model("llama")), FULL, {2})

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr(scoring_passes.Scorer, "run", failing)
    with pytest.raises(RuntimeError, match="something else"):
        score_continuations(engine, requests(6), **BUDGET)
    assert engine.decoder.model.config._attn_implementation != "skipdecode_packed"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ScoreRequest([], [[3]]), "empty prompt"),
        (ScoreRequest([VOCAB], [[3]]), f"prompt: token {VOCAB} lies outside the model's vocabulary of {VOCAB}"),
        (ScoreRequest([3], [[4], [5, -1]]), "continuation: token -1 lies outside"),
        (ScoreRequest([3] * 60, [[4] * 6]), "prompt of 60 tokens and continuation of 6 exceed the context of 64"),
        (ScoreRequest([3] * 65, []), "prompt of 65 tokens and continuation of 0 exceed the context of 64"),
    ],
)
def test_what_cannot_be_scored_is_refused(request_: ScoreRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score_continuations(Engine(QWEN, FULL, {2}), [request_], **BUDGET)


def test_a_request_above_the_budget_is_refused() -> None:
    engine = Engine(QWEN, FULL, {2})
    request = ScoreRequest([3] * 9, [[4]])
    needed = scoring_bytes(engine, request)
    assert score_continuations(engine, [request], budget_bytes=needed, max_rows=1)[0].error is None
    with pytest.raises(UserError, match=f"needs {needed} bytes of cache, more than the budget of {needed - 1}"):
        score_continuations(engine, [request], budget_bytes=needed - 1, max_rows=1)


def test_fused_layers_score_as_the_librarys() -> None:
    library, fused = (Decoder(tiny_model("llama")) for _ in range(2))
    assert fused.prepare_for_gpu(reference)
    requests = [ScoreRequest([3, 4, 5], [[6, 7], [8]]), ScoreRequest([9], [[4, 4, 4]])]
    want, found = (score_continuations(Engine(of, FULL, {2}), requests, **BUDGET) for of in (library, fused))
    for expected, score in zip(want, found, strict=True):
        for one, other in zip(expected.continuations, score.continuations, strict=True):
            assert other.cumulative == pytest.approx(one.cumulative, abs=1e-4)


def test_perplexity_beyond_a_float_is_infinite() -> None:
    from actors.engine.types import TokenLogprob

    assert ContinuationScore((TokenLogprob(3, -1000.0, ()),), (False,)).perplexity == math.inf
