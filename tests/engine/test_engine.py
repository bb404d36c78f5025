"""The engine against `generate` and the uncached oracle; memory that runs out costs a batch, never an answer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_cases import (
    PREFIX,
    SPECS,
    STOP,
    answer,
    any_schedule,
    every_case,
    generate,
    requests,
    thoroughly,
    with_prefix,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle, oracle_logits
from tiny_models import CONTEXT, LAYERS, MODELS, tiny_model

from actors.engine.cpu import products
from actors.engine.cpu.executor import StackDecoder, fastest_decoder
from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import free_memory, is_out_of_memory
from actors.engine.loop import SCHEDULERS, Call, Loop
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
@settings(max_examples=25, deadline=None)
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
    assert engine.executor.used_bytes() == 0
    engine.open(3, 20, 14)
    engine.admit(requests(3, seed=1))
    engine.step()
    assert engine.executor.used_bytes() == 3 * engine.row_bytes(20, 14)
    engine.close()
    assert engine.executor.used_bytes() == 0


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


SCHEDULE = ScheduleSpec(speedup=2, horizon=6).build(LAYERS)
CPU_ERROR = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"


@dataclass
class Small:
    """A decoder that runs out of memory in passes of more than `numbers` tokens, and in steps of more than `rows`."""

    decoder: Decoder
    numbers: int
    rows: int
    error: type[RuntimeError]
    sizes: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def prefill(self, ids: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self.sizes.append(ids.numel())
        if ids.numel() > self.numbers:
            raise self.error(CPU_ERROR)
        return self.decoder.prefill(ids, *rest, **named)

    def step(self, ids: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        if len(ids) > self.rows:
            raise self.error(CPU_ERROR)
        return self.decoder.step(ids, *rest, **named)


@settings(max_examples=12, deadline=None)
@pytest.mark.usefixtures("shared_by_few")
@given(
    numbers=st.integers(1, 200),
    rows=st.integers(1, 12),
    error=st.sampled_from([torch.OutOfMemoryError, RuntimeError]),
    seed=st.integers(0, 3),
    shared=st.booleans(),
    scheduler=st.sampled_from(SCHEDULERS),
)
def test_answers_are_those_of_a_machine_with_room(
    llama: Decoder, numbers: int, rows: int, error: type[RuntimeError], seed: int, shared: bool, scheduler: str
) -> None:
    wanted = with_prefix(13, seed) if shared else requests(12, seed, sampled=True)
    roomy, told = Engine(llama, SCHEDULE, STOP), []
    want = generate(roomy, wanted, budget_bytes=2**40, max_rows=8)
    engine = Engine(Small(llama, numbers, rows, error), SCHEDULE, STOP)  # type: ignore[arg-type]
    how: dict[str, Any] = {"budget_bytes": 2**40, "max_rows": 8, "scheduler": scheduler}
    got = generate(engine, wanted, **how, on_batch=told.append)
    good = [one for one in got if one.error is None]
    for request, one, right in zip(wanted, got, want, strict=True):
        if one.error is None:
            assert (one.token_ids, one.finish_reason) == (right.token_ids, right.finish_reason)
            assert one.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-4)
        else:
            assert (one.token_ids, one.finish_reason) == ((), FinishReason.ERROR)
            assert len(request.prompt_ids) > numbers or (shared and len(PREFIX) > numbers)
            assert one.error.startswith(f"out of memory: a row of {len(request.prompt_ids)} prompt tokens and up to ")
            assert "cache_bytes" not in one.error  # a row alone gets only the cache that it needs
    stats = engine.take_stats()
    assert stats.generated_tokens == sum(len(one.token_ids) for one in good)  # nothing is counted twice
    assert stats.decode_steps == sum(len(one.token_ids) - 1 for one in good)
    ran = [batch for batch in told if len(batch) == 1 or got[batch[0]].error is None]
    assert {row for batch in ran for row in batch} == set(range(len(wanted)))
    if scheduler == "lock_step":
        assert stats.batches == len(told)
    again = generate(engine, wanted, **how)
    assert [one.token_ids for one in again] == [one.token_ids for one in got]  # the prefix that is held stays right


def test_a_batch_as_large_as_one_that_failed_is_not_tried_again(llama: Decoder) -> None:
    same = [Request([5 + row] * 10, SamplingParams(max_new_tokens=4), row) for row in range(32)]
    small = Small(llama, 40, 32, torch.OutOfMemoryError)
    engine = Engine(small, SCHEDULE, STOP)  # type: ignore[arg-type]
    generate(engine, same, budget_bytes=2**40, max_rows=8)
    assert small.sizes == [80] + [40] * 8
    assert engine.take_stats().out_of_memory == 1


def test_what_the_failed_batch_held_is_given_back_first(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's traceback must not keep the cache of the failed batch alive while the halves run."""
    caches: list[int] = []
    engine = Engine(Small(llama, 40, 32, torch.OutOfMemoryError), SCHEDULE, STOP)  # type: ignore[arg-type]
    opened = engine.open

    def counting(*shape: Any) -> None:
        gc.disable()  # the test counts only objects that something refers to
        caches.append(sum(type(one).__name__ == "SkipCache" for one in gc.get_objects()))
        gc.enable()
        opened(*shape)

    monkeypatch.setattr(engine, "open", counting)
    free_memory()
    generate(engine, [Request([5 + row] * 10, key=row) for row in range(8)], budget_bytes=2**40, max_rows=8)
    assert caches == [caches[0]] * 3


def test_other_errors_are_not_swallowed(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_out_of_memory(RuntimeError(CPU_ERROR)) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))

    def broken(*rest: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(llama, "prefill", broken)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        generate(Engine(llama, SCHEDULE, STOP), requests(3, 1), budget_bytes=2**40, max_rows=8)


def test_an_interrupt_after_a_call_has_ended_leaves_the_next_call(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(call: Call) -> None:
        raise KeyboardInterrupt

    loop = Loop(Engine(llama, SCHEDULE, STOP), budget_bytes=2**40, max_rows=8)
    first, second = (loop.add(requests(2, seed)) for seed in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.finish(first)
    assert len(loop.finish(second)) == 2


def test_the_hosts_own_allocator_says_so() -> None:
    """What torch really raises where the host has no room."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
