"""Memory that runs out costs a batch, never an answer: it is halved until it fits; a row that fails alone is told."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engine_cases import PREFIX, STOP, requests, with_prefix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import LAYERS

from actors.engine.decoder import Decoder
from actors.engine.engine import Engine
from actors.engine.errors import free_memory, is_out_of_memory
from actors.engine.loop import SCHEDULERS, generate
from actors.engine.schedule.schedule import ScheduleSpec
from actors.engine.types import FinishReason, Request, SamplingParams

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


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    given_prefix = PREFIX if shared else ()
    roomy, told = Engine(llama, SCHEDULE, STOP), []
    want = generate(roomy, wanted, budget_bytes=2**40, max_rows=8, prefix=given_prefix)
    engine = Engine(Small(llama, numbers, rows, error), SCHEDULE, STOP)  # type: ignore[arg-type]
    how: dict[str, Any] = {"budget_bytes": 2**40, "max_rows": 8, "prefix": given_prefix, "scheduler": scheduler}
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
        gc.disable()  # only what is referred to counts, not what is still to be collected
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


def test_the_hosts_own_allocator_says_so() -> None:
    """What torch really raises where the host has no room."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
