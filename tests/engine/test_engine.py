"""The tests that carry the weight: the engine against `generate` and against the uncached oracle, in fp32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import SPECS, STOP, answer, any_schedule, every_case, requests, thoroughly
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import oracle, oracle_logits
from tiny_models import CONTEXT, LAYERS, MODELS, tiny_model

from actors.engine.cpu import products
from actors.engine.cpu.executor import StackDecoder, fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.schedule.schedule import Schedule, ScheduleSpec
from actors.engine.types import NOT_NUMBERS, Completion, FinishReason, Request, SamplingParams


def test_full_depth_equals_generate(decoder: Decoder, library: Decoder) -> None:
    rows = requests(8, seed=1)
    answers = answer(Engine(decoder, ScheduleSpec().build(LAYERS), {2}), rows, max_rows=5)
    for row, got in zip(rows, answers, strict=True):
        prompt = torch.tensor([list(row.prompt_ids)])
        want = library.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=row.sampling.max_new_tokens, do_sample=False
        )
        assert list(got.token_ids) == want[0, prompt.shape[1] :].tolist()
        assert got.finish_reason == (FinishReason.STOP if got.token_ids[-1] == 2 else FinishReason.LENGTH)


@every_case
def test_cached_batches_equal_the_oracle(decoder: Decoder, library: Decoder, spec: int) -> None:
    """Greedy and sampled rows together; with the layers of the CPU path, and at two schedules with the library's."""
    schedule = SPECS[spec].build(LAYERS)
    rows = requests(5, seed=3) + requests(5, seed=3, sampled=True)
    for layers in (decoder, library) if spec in (1, 3) else (decoder,):
        answers = answer(Engine(layers, schedule, STOP), rows, max_rows=5)
        for row, got in zip(rows, answers, strict=True):
            assert list(got.token_ids) == oracle(library, schedule, row, STOP, got.token_ids)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_answers_what_the_oracle_on_the_cpu_answers(name: str) -> None:
    """fp32, greedy: token for token."""
    schedule, rows = SPECS[1].build(LAYERS), requests(9, seed=3)
    on_gpu, on_cpu = Engine(Decoder(tiny_model(name).cuda()), schedule, STOP), Decoder(tiny_model(name))
    for row, got in zip(rows, answer(on_gpu, rows, max_rows=5), strict=True):
        assert list(got.token_ids) == oracle(on_cpu, schedule, row, STOP, got.token_ids)


@thoroughly
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=any_schedule(), seed=st.integers(0, 10**6))
def test_any_schedule_equals_the_oracle(decoder: Decoder, library: Decoder, schedule: Schedule, seed: int) -> None:
    rows = requests(4, seed=seed, sampled=True, most_new=10, longest=12)
    for row, got in zip(rows, answer(Engine(decoder, schedule, STOP), rows), strict=True):
        assert list(got.token_ids) == oracle(library, schedule, row, STOP, got.token_ids)


@thoroughly
def test_rows_end_at_the_context(decoder: Decoder, library: Decoder) -> None:
    schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
    rows = [Request([7] * (CONTEXT - left), SamplingParams(max_new_tokens=50)) for left in (1, 3, 8)]
    for left, row, got in zip((1, 3, 8), rows, answer(Engine(decoder, schedule, set()), rows), strict=True):
        assert len(got.token_ids) == left and got.finish_reason == FinishReason.LENGTH
        assert list(got.token_ids) == oracle(library, schedule, row, set(), got.token_ids)


@thoroughly
def test_impossible_requests_are_refused(decoder: Decoder) -> None:
    engine = Engine(decoder, ScheduleSpec().build(LAYERS), STOP)
    with pytest.raises(ValueError, match="the prompt is empty"):
        answer(engine, [Request([])])
    with pytest.raises(ValueError, match="leaves no room in a context of 64"):
        answer(engine, [Request([3] * CONTEXT)])
    with pytest.raises(ValueError, match="the schedule is for 4 layers, but the model has 6"):
        Engine(decoder, ScheduleSpec().build(4), STOP)


@thoroughly
def test_layers_counted_are_layers_run(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the statistics say was run is what ran, and nothing else did."""
    schedule = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
    rows = requests(10, seed=8)
    run: list[int] = []
    if isinstance(decoder, StackDecoder):
        step = decoder.stack.step

        def counting_rows(tokens: Any, per_layer: Sequence[int], *rest: Any) -> torch.Tensor:
            run.extend(per_layer)
            return step(tokens, per_layer, *rest)

        monkeypatch.setattr(decoder.stack, "step", counting_rows)
    else:
        plain = decoder.run_layer

        def counting(layer: int, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            run.append(len(hidden) if hidden.shape[1] == 1 else 0)
            return plain(layer, hidden, *rest)

        monkeypatch.setattr(decoder, "run_layer", counting)
    engine = Engine(decoder, schedule, STOP)
    long = [Request([5, *row.prompt_ids], row.sampling, row.key) for row in rows]  # a prompt is never one column
    answers = answer(engine, long, max_rows=4)
    steps = [len(one.token_ids) - 1 for one in answers]
    assert sum(run) == engine.stats.layer_steps == sum(schedule.layer_steps(count) for count in steps)
    assert engine.stats.decode_steps == sum(steps)
    assert engine.stats.full_layer_steps == LAYERS * sum(steps)
    assert engine.stats.generated_tokens == sum(len(one.token_ids) for one in answers)


@thoroughly
@pytest.mark.parametrize("prepared", [False, True])
def test_bf16_logits_stay_near_the_fp32_oracle(library: Decoder, prepared: bool) -> None:
    """At every depth: cached bf16 against uncached fp32, teacher-forced along the bf16 tokens."""
    schedule = ScheduleSpec(max_depth=6, min_depth=2, horizon=8).build(LAYERS)
    rows = [Request(row.prompt_ids, SamplingParams(max_new_tokens=12)) for row in requests(4, seed=9)]
    half = Decoder(copy.deepcopy(library.model).to(torch.bfloat16))
    if prepared:
        half = fastest_decoder(half.model)
        packs = any(can(half.dtype, half.device) for can in (products.packs, products.multiplies))
        assert isinstance(half.head, products.PackedLinear) == packs
    seen: list[torch.Tensor] = []
    engine = Engine(half, schedule, set())
    plain = engine.executor.decode

    def watching(*given: Any, greedy: bool) -> torch.Tensor:
        seen.append(plain(*given))
        return seen[-1]

    engine.executor.decode = watching  # type: ignore[method-assign]
    answers = answer(engine, rows)
    order = sorted(range(len(rows)), key=lambda row: -len(rows[row].prompt_ids))
    for step, logits in enumerate(seen):
        for place, row in enumerate(order):
            tokens = list(answers[row].token_ids[: step + 1])
            want = oracle_logits(library, schedule, list(rows[row].prompt_ids), tokens)
            error = (logits[place].float() - want).abs() / want.std()
            assert error.mean() < 0.15 and error.max() < 0.5


def test_used_cache_is_that_of_the_slots(decoder: Decoder) -> None:
    """A batch that is over has none."""
    engine = Engine(decoder, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), STOP)
    assert engine.used_cache_bytes() == 0
    engine.open(3, 20, 14)
    engine.admit(requests(3, seed=1))
    engine.step()
    assert engine.used_cache_bytes() == 3 * engine.row_bytes(20, 14)
    engine.close()
    assert engine.used_cache_bytes() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("for_cpu", [False, True])
@pytest.mark.parametrize("way", [{}, {"temperature": 0.8}, {"logprobs": 2}, {"repetition_penalty": 1.3}])
def test_a_row_whose_logits_are_not_numbers_ends_with_an_error(
    dtype: torch.dtype, for_cpu: bool, way: dict[str, Any]
) -> None:
    """The embedding of one token is NaN: rows that have it in their prompt have no answer, those that generate it none
    from there on, the others what they have without."""
    model = tiny_model("llama").to(dtype)
    prompts = [[7, 8, 9], [7, 90, 9], [11, 12], [13, 14, 15, 16]]
    rows = [Request(prompt, SamplingParams(max_new_tokens=8, **way), key=5) for prompt in prompts]

    def answers() -> list[Completion]:
        decoder = Decoder(model)
        if for_cpu:
            decoder = fastest_decoder(decoder.model)
        engine = Engine(decoder, ScheduleSpec(speedup=2, horizon=6).build(LAYERS), (), cumulative_logprob=False)
        return answer(engine, rows)

    before = copy.deepcopy(model.state_dict())
    whole = answers()
    model = tiny_model("llama").to(dtype)
    model.load_state_dict(before)
    third = whole[2].token_ids[2]
    model.model.embed_tokens.weight.data[[90, third]] = torch.nan
    found = answers()
    assert (found[1].token_ids, found[1].finish_reason, found[1].error) == ((), FinishReason.ERROR, NOT_NUMBERS)
    for row, done in enumerate(found):
        if row != 1:
            length = next((at + 1 for at, token in enumerate(whole[row].token_ids) if token in (90, third)), 8)
            assert done.token_ids == whole[row].token_ids[:length]
            assert done.error == (NOT_NUMBERS if length < 8 else None)
