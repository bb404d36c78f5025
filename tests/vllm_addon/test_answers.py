"""vLLM with the add-on answers as the builtin engine does, token for token in float32, however it schedules."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import numpy as np
import torch
import vllm_cases as cases
from random_adapter import random_adapter
from vllm.v1.attention.backend import CommonAttentionMetadata

from actors.engine.errors import UserError
from actors.engine.schedule.schedule import ScheduleSpec
from actors.vllm import layers
from actors.vllm.plan import cut_metadata
from actors.vllm.worker import SkipWorker

ROOT = Path(__file__).parents[2]
SYNC = {"scheduler_cls": "actors.vllm.scheduler.SkipScheduler", "async_scheduling": False}
schedulers = pytest.mark.parametrize("scheduler", [{}, SYNC], ids=["async", "sync"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.checkpoint(tmp_path_factory.mktemp("models"), "llama")


@pytest.mark.parametrize("model_type", cases.MODELS)
def test_families_answer_as_the_library_engine_at_every_schedule(tmp_path: Path, model_type: str) -> None:
    """Eight rows in four places: rows begin while others are in flight. No hole in the cache is read."""
    model = cases.checkpoint(tmp_path, model_type)
    prompts, limits = cases.rows(8)
    wanted = {name: cases.library_answers(model, spec, prompts, limits) for name, spec in cases.SPECS.items()}
    settings = {**cases.SPECS["2x"].to_dict(), "unadapted": True}
    with cases.engine(model, settings) as llm:  # checks itself
        cases.poison(llm)
        for name, spec in cases.SPECS.items():
            llm.collective_rpc("set_schedule", args=(spec.build(cases.LAYERS),))
            assert cases.answers(llm, prompts, limits) == wanted[name], name
            counts = cases.skipper(llm).counts
            assert (counts["token_layers"] < cases.LAYERS * counts["tokens"]) == (name != "1x")
            assert (counts["builds"] > 0) == (name != "1x")
    # on a GPU by FlashAttention, which has no float32
    with cases.engine(model, settings, dtype="bfloat16") as llm:  # checks itself
        assert [len(answer) for answer in cases.answers(llm, prompts, limits)] == limits


@schedulers
def test_chunks_and_preempted_rows_change_no_answer(folder: Path, scheduler: dict[str, Any]) -> None:
    """The cache holds 9 blocks for rows that need up to 5 each, and chunks end inside of prompts."""
    prompts, limits = cases.rows(12, seed=1, shortest=40, longest=110)
    names = ("2x", "first", "without layer 0")
    wanted = {name: cases.library_answers(folder, cases.SPECS[name], prompts, limits) for name in names}
    with cases.engine(folder, max_num_batched_tokens=24, num_gpu_blocks_override=9, **scheduler) as llm:
        preempted = cases.preemptions(llm)
        for name in names:
            llm.collective_rpc("set_schedule", args=(cases.SPECS[name].build(cases.LAYERS),))
            assert cases.answers(llm, prompts, limits) == wanted[name], name
        assert len(preempted) > 2


@schedulers
def test_the_prefix_cache_serves_prompts_and_no_answers(folder: Path, scheduler: dict[str, Any]) -> None:
    """The second pass finds its prompts in the cache; further prompts begin with a prompt and its whole answer."""
    prompts, limits = cases.rows(6, seed=2, shortest=60, longest=90)
    spec = cases.SPECS["3x"]
    wanted = cases.library_answers(folder, spec, prompts, limits)
    longer = [[*prompt, *answer, 5] for prompt, answer in zip(prompts, wanted, strict=True)]
    after = cases.library_answers(folder, spec, longer, limits)
    with cases.engine(folder, enable_prefix_caching=True, num_gpu_blocks_override=24, **scheduler) as llm:
        llm.collective_rpc("set_schedule", args=(spec.build(cases.LAYERS),))
        computed = []
        for _ in range(2):
            assert cases.answers(llm, prompts, limits) == wanted
            computed.append(cases.skipper(llm).counts["tokens"])
        assert computed[1] - computed[0] < computed[0]
        assert cases.answers(llm, longer, limits) == after


def test_vllms_own_scheduler_serves_where_nothing_is_cached(folder: Path) -> None:
    prompts, limits = cases.rows(5, seed=3)
    wanted = cases.library_answers(folder, cases.SPECS["2x"], prompts, limits)
    with cases.engine(folder, scheduler_cls=None) as llm:
        assert cases.answers(llm, prompts, limits) == wanted


def test_a_speed_adapter_is_merged_while_weights_load(folder: Path, tmp_path: Path) -> None:
    spec = ScheduleSpec(speedup=2, horizon=10, prompt="first")
    adapter = random_adapter(folder, tmp_path / "adapter", spec)
    prompts, limits = cases.rows(5, seed=4)
    wanted = cases.library_answers(folder, spec, prompts, limits, adapter)
    assert wanted != cases.library_answers(folder, spec, prompts, limits)
    with cases.engine(folder, {"speed_adapter": str(adapter)}) as llm:
        assert cases.answers(llm, prompts, limits) == wanted


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs")
def test_two_workers_share_each_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, limits = cases.rows(6, seed=8)
    wanted = cases.library_answers(folder, cases.SPECS["3x"], prompts, limits)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests/vllm_addon", ROOT / "tests/engine")))
    )
    settings = {**cases.SPECS["3x"].to_dict(), "unadapted": True}
    with cases.engine(folder, settings, tensor_parallel_size=2) as llm:
        assert cases.answers(llm, prompts, limits) == wanted


def test_full_depth_is_plain_vllm(folder: Path) -> None:
    """Nothing is replaced, and settings that skipping refuses are accepted."""
    prompts, limits = cases.rows(5, seed=5)
    wanted = cases.library_answers(folder, ScheduleSpec(), prompts, limits)
    with cases.engine(folder, {"speedup": 1}, scheduler_cls=None, enable_prefix_caching=True) as llm:
        assert cases.skipper(llm) is None
        (wrapped,) = llm.apply_model(
            lambda model: [name for name, part in model.named_modules() if "forward" in vars(part)]
        )
        assert wrapped == []
        assert cases.answers(llm, prompts, limits) == wanted


def test_metadata_that_is_made_from_another_cache_groups_keeps_its_own_blocks() -> None:
    """As FlashAttention's builders make it for a further group, which no builder on a CPU does."""
    skipper = layers.LayerSkipper(cases.SPECS["2x"].build(cases.LAYERS), {}, lambda common: common)
    first, second = (
        SimpleNamespace(
            requires_block_table_width=False,
            layer_names=[name],
            build=lambda prefix, common: common,
            update_block_table=lambda made, blocks, slots: (made, blocks, slots),
        )
        for name in ("first", "second")
    )
    skipper.watch(first)
    skipper.watch(second)
    numbers = torch.arange(2)
    common = CommonAttentionMetadata(numbers, numbers, numbers, 1, 1, 1, 1, numbers, numbers)
    made = first.build(0, common)
    assert second.update_block_table(made, numbers + 3, numbers + 5)[0] is made
    assert skipper._built["first"] == (first, common)
    builder, other = skipper._built["second"]
    assert builder is second and other.seq_lens is common.seq_lens
    assert (other.block_table_tensor.tolist(), other.slot_mapping.tolist()) == ([3, 4], [5, 6])


# Wrong add-ons: the tests above, the self-check and the poison see them


def test_mutant_recomputed_tokens_taken_for_the_prompt(folder: Path) -> None:
    prompts, limits = cases.rows(12, seed=1, shortest=40, longest=110)
    wanted = cases.library_answers(folder, cases.SPECS["2x"], prompts, limits)
    with cases.engine(folder, num_gpu_blocks_override=9) as llm:
        skipper, preempted = cases.skipper(llm), cases.preemptions(llm)
        right = skipper._prompt_lengths

        def wrong(common: Any) -> np.ndarray:
            several = np.diff(common.query_start_loc_cpu[: common.num_reqs + 1].numpy()) > 1
            return np.where(several, common.seq_lens[: common.num_reqs].cpu().numpy(), right(common))

        skipper._prompt_lengths = wrong
        assert cases.answers(llm, prompts, limits) != wanted
        assert preempted


def test_the_poison_is_met_where_depth_rises(folder: Path) -> None:
    """A curve that rises, which schedules refuse, reads keys that no token has written."""
    prompts, limits = cases.rows(4, seed=7)
    with cases.engine(folder) as llm:
        cases.poison(llm)
        cases.skipper(llm).depths = np.array([5, 3, 3, 5])
        with pytest.raises(AssertionError, match="a layer read the slot of a skipped token"):
            cases.answers(llm, prompts, limits)


def stale_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(common: Any, subset: Any, ends: np.ndarray) -> Any:
        made = cut_metadata(common, subset, ends)
        return made.replace(slot_mapping=common.slot_mapping[: made.num_actual_tokens])

    monkeypatch.setattr(layers, "cut_metadata", cut)


def another_requests_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(common: Any, subset: Any, ends: np.ndarray) -> Any:
        made = cut_metadata(common, subset, ends)
        return made.replace(block_table_tensor=common.block_table_tensor[: made.num_reqs])

    monkeypatch.setattr(layers, "cut_metadata", cut)


def a_position_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SkipWorker._prompt_lengths
    monkeypatch.setattr(SkipWorker, "_prompt_lengths", lambda self, common: right(self, common) + 1)


def a_layer_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = layers.PassPlan
    monkeypatch.setattr(layers, "PassPlan", lambda depths, *rest: plan(np.minimum(depths + 1, cases.LAYERS), *rest))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mutant", [stale_slots, another_requests_blocks, a_position_late, a_layer_more])
def test_the_self_check_refuses_mutants(folder: Path, monkeypatch: pytest.MonkeyPatch, mutant: Any, dtype: str) -> None:
    mutant(monkeypatch)
    settings = {**cases.SPECS["2x"].to_dict(), "unadapted": True}
    with pytest.raises(UserError, match="self-check failed"), cases.engine(folder, settings, dtype=dtype):
        pass
