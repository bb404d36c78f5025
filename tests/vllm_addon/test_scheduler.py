"""The add-on's scheduler does what vLLM's does, step for step and block for block, in less time for a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed here: make test-vllm")
import vllm
import vllm_cases as cases
from vllm.v1.core.kv_cache_manager import KVCacheManager

from actors.vllm import scheduler
from actors.vllm.scheduler import SkipCacheManager

SYNC = {"scheduler_cls": "actors.vllm.scheduler.SkipScheduler", "async_scheduling": False}


class Steps:
    """What a scheduler decides, with names for requests and blocks in the order in which they appear."""

    def __init__(self, llm: vllm.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[Any] = []
        self.preempted = self.cached = self.allocations = 0
        self._names: dict[Any, int] = {}
        owner: Any = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        schedule, allocate = owner.schedule, KVCacheManager.allocate_slots

        def noting(*args: Any, **options: Any) -> Any:
            out = schedule(*args, **options)
            new, old = out.scheduled_new_reqs, out.scheduled_cached_reqs
            self.preempted += len(out.preempted_req_ids or ())
            self.cached += sum(one.num_computed_tokens for one in new)
            self.found.append(
                (
                    [(self.name(one.req_id), one.num_computed_tokens, self.blocks(one.block_ids)) for one in new],
                    [
                        (self.name(key), self.blocks(ids))
                        for key, ids in zip(old.req_ids, old.new_block_ids, strict=True)
                    ],
                    [(self.name(key), count) for key, count in out.num_scheduled_tokens.items()],
                )
            )
            return out

        def counting(manager: Any, *args: Any, **options: Any) -> Any:
            self.allocations += 1
            return allocate(manager, *args, **options)

        monkeypatch.setattr(owner, "schedule", noting)
        monkeypatch.setattr(KVCacheManager, "allocate_slots", counting)

    def name(self, key: Any) -> int:
        return self._names.setdefault(key, len(self._names))

    def blocks(self, ids: Any) -> Any:
        return None if ids is None else [[self.name(block) for block in group] for group in ids]


def runs(llm: vllm.LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[list[Any], Steps]]:
    """A function that answers the same prompts in an empty cache, then prompts that begin with them and the answers.

    All prompts share their first block. The second time they come in reverse, because the last ones are still cached.
    """
    own, limits = cases.rows(12, seed=1, shortest=8, longest=78)
    shared = cases.rows(1, seed=9, shortest=cases.BLOCK, longest=cases.BLOCK)[0][0]
    prompts = [[*shared, *prompt] for prompt in own]

    def run() -> tuple[list[Any], Steps]:
        assert llm.reset_prefix_cache()
        with monkeypatch.context() as changes:
            steps = Steps(llm, changes)
            first = cases.answers(llm, prompts, limits)
            longer = [[*prompt, *answer, 5] for prompt, answer in zip(prompts, first, strict=True)]
            return [first, cases.answers(llm, longer[::-1], limits)], steps

    return run


@pytest.mark.parametrize(
    ("family", "speed", "how"),
    [("llama", "1x", SYNC), ("llama", "2x", {}), ("gemma3_text", "1x", {}), ("gemma3_text", "2x", SYNC)],
)
def test_rows_with_room_take_a_short_way_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, speed: str, how: dict[str, Any]
) -> None:
    """Preempted rows, chunks, prompts and (at 1x) answers in the prefix cache, windows: every step and block agrees.

    Gemma 3 has a second cache group, with windows of 8 tokens.
    """
    settings = {**cases.SPECS[speed].to_dict(), "unadapted": True, "self_check": False}
    blocks = {"llama": 9, "gemma3_text": 15}[family]
    sizes = {"max_num_batched_tokens": 24, "num_gpu_blocks_override": blocks, "enable_prefix_caching": True}
    with cases.engine(cases.checkpoint(tmp_path, family), settings, **sizes, **how) as llm:
        run = runs(llm, monkeypatch)
        answers, short = run()
        with monkeypatch.context() as changes:
            changes.setattr(SkipCacheManager, "_has_room", lambda self, request: False)
            wanted, long = run()
        assert answers == wanted
        assert short.found == long.found
        assert short.preempted > 2 and short.cached > 0
        assert short.allocations < long.allocations / 2
        for mutant in (no_block_is_full, no_block_leaves_a_window, every_row_has_room):
            with monkeypatch.context() as changes:
                if mutant(changes, caches_answers=speed == "1x", is_sync=bool(how), has_windows="gemma" in family):
                    try:
                        answers, wrong = run()
                    except Exception:
                        return  # the engine is lost
                    assert wrong.found != long.found, mutant.__name__


def no_block_is_full(changes: pytest.MonkeyPatch, *, caches_answers: bool, is_sync: bool, **_: bool) -> bool:
    """The async scheduler puts answers into the prefix cache itself, when it gets a token."""
    changes.setattr(SkipCacheManager, "_has_full_block", lambda self, request, tokens: False)
    return caches_answers and is_sync


def no_block_leaves_a_window(changes: pytest.MonkeyPatch, *, has_windows: bool, **_: bool) -> bool:
    changes.setattr(scheduler, "SlidingWindowManager", None)
    return has_windows


def every_row_has_room(changes: pytest.MonkeyPatch, **_: bool) -> bool:
    changes.setattr(SkipCacheManager, "_has_room", lambda self, request: True)
    return True
