"""Defines schedulers for vLLM that cache only prompts where answers skip layers, and that spend less time on a row."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import RequestStatus

from actors.engine.errors import UserError
from actors.vllm.graphs import BACKENDS
from actors.vllm.settings import read_settings

RUNNING = RequestStatus.RUNNING
# With graphs, requests begin once 1/ADMISSION_PART of the places is free, because a step with prompts runs eagerly. If
# their prompts have MOST_PROMPT_TOKENS tokens, computation on a GPU hides the launches of such a step.
ADMISSION_PART, MOST_PROMPT_TOKENS = 16, 1500


class SkipCacheManager(KVCacheManager):  # type: ignore[misc]
    """A cache manager of vLLM with two changes.

    It returns at once for a decode step that needs no new block, and it can leave answers out of the prefix cache.

    Args:
        made: the scheduler's manager, which this one replaces.
        caches_answers: whether generated tokens have keys in every layer, so that later prompts may reuse them.
    """

    def __init__(self, made: KVCacheManager, *, caches_answers: bool) -> None:
        self.__dict__.update(vars(made))
        self._caches_answers = caches_answers
        self._groups = self.coordinator.single_type_managers
        # other kinds of groups, such as Mamba states, change with every token
        self._may_have_room = {type(group) for group in self._groups} <= {FullAttentionManager, SlidingWindowManager}

    def allocate_slots(
        self, request: Any, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **options: Any
    ) -> Any:
        """Allocate blocks for new tokens. vLLM passes no further options for a running row."""
        is_decode = num_new_tokens == 1 and request.status == RUNNING and not (num_lookahead_tokens or args or options)
        if is_decode and self._has_room(request):
            return self.empty_kv_cache_blocks
        options["num_lookahead_tokens"] = num_lookahead_tokens
        if self._caches_answers:
            return super().allocate_slots(request, num_new_tokens, *args, **options)
        blocks = super().allocate_slots(request, num_new_tokens, *args, **options | {"delay_cache_blocks": True})
        if blocks is not None:
            found = options.get("num_new_computed_tokens", 0)
            self.cache_blocks(request, request.num_computed_tokens + found + num_new_tokens)
        return blocks

    def _has_room(self, request: Any) -> bool:
        """Return whether one more token changes nothing: no block is needed, none is full, and no window leaves one."""
        if not self._may_have_room:
            return False
        computed = request.num_computed_tokens
        for group in self._groups:
            blocks = group.req_to_blocks[request.request_id]
            if len(blocks) * group.block_size <= computed:
                return False
            if type(group) is SlidingWindowManager:
                read = max(0, computed - request.num_in_flight_tokens)
                left = min(group.get_num_skipped_tokens(read) // group.block_size, len(blocks))
                if left and not blocks[left - 1].is_null:
                    return False
        return not self._has_full_block(request, min(computed + 1, request.num_tokens))

    def _has_full_block(self, request: Any, tokens: int) -> bool:
        """Return whether a block of the first `tokens` tokens is full and belongs into the prefix cache, but is not."""
        if not self._caches_answers:
            tokens = min(tokens, request.num_prompt_tokens)
        return self.enable_caching and any(
            tokens // group.block_size > group.num_cached_block.get(request.request_id, 0) for group in self._groups
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Put full blocks into the prefix cache."""
        if not self._caches_answers:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        super().cache_blocks(request, num_computed_tokens)

    def get_computed_blocks(self, request: Any) -> Any:
        """Find cached blocks; for the prompt only, if generated tokens may have run fewer layers."""
        if self._caches_answers:
            return super().get_computed_blocks(request)
        hashes = request.block_hashes
        request.block_hashes = hashes[: request.num_prompt_tokens // self.block_pool.hash_block_size]
        try:
            return super().get_computed_blocks(request)
        finally:
            request.block_hashes = hashes


class PromptCache:
    """Lets a vLLM scheduler use a `SkipCacheManager`, and begin requests in groups if decode steps run by graphs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model = config.model_config
        settings = read_settings(config.additional_config, model.model, model.get_total_num_hidden_layers())
        self.is_uniform = settings.schedule.is_uniform
        if self.connector is None:  # type: ignore[attr-defined]  # a connector holds vLLM's own manager
            made: Any = self.kv_cache_manager  # type: ignore[has-type]
            self.kv_cache_manager = SkipCacheManager(made, caches_answers=self.is_uniform)
        self._by_graphs = settings.graphs and not self.is_uniform and config.device_config.device_type in BACKENDS
        self._places = self.max_num_active_reqs  # type: ignore[has-type]
        self._requests = self._prompt_tokens = 0  # of all requests so far

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Schedule a step. Hold waiting requests while fewer places are free than a group of them needs."""
        if self._by_graphs:
            running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
            group = min(self._places // ADMISSION_PART, waiting)
            is_small = group * self._prompt_tokens < MOST_PROMPT_TOKENS * self._requests
            holds = running > 0 and is_small and self._places - running < group
            self.max_num_active_reqs = running if holds else self._places
        return super().schedule(*args, **options)  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        """Queue a request. Raises UserError if its input is streamed: vLLM would add its answers to its prompt."""
        if request.resumable and not self.is_uniform:
            raise UserError("skipdecode: input that streams into a request is not supported")
        self._requests, self._prompt_tokens = self._requests + 1, self._prompt_tokens + request.num_prompt_tokens
        super().add_request(request)  # type: ignore[misc]


class SkipScheduler(PromptCache, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler for ``async_scheduling=False``."""


class SkipAsyncScheduler(PromptCache, AsyncScheduler):  # type: ignore[misc]
    """vLLM's default (async) scheduler."""
