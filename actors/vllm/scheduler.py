"""Defines schedulers for vLLM that cache only prompts if generated tokens have no keys in skipped layers."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from actors.engine.errors import UserError
from actors.vllm.settings import read_settings


class PromptCache:
    """Limits the prefix cache of a vLLM scheduler to the blocks of prompts, unless all tokens run the same layers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        model = config.model_config
        settings = read_settings(config.additional_config, model.model, model.get_total_num_hidden_layers())
        self.is_uniform = settings.schedule.is_uniform
        if self.is_uniform:
            return
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        store, find = manager.coordinator.cache_blocks, manager.get_computed_blocks

        def cache_blocks(request: Any, num_computed_tokens: int, *args: Any, **options: Any) -> None:
            store(request, min(num_computed_tokens, request.num_prompt_tokens), *args, **options)

        def get_computed_blocks(request: Any, *args: Any, **options: Any) -> Any:
            """Find cached blocks for the prompt only, because generated tokens may have run fewer layers."""
            hashes = request.block_hashes
            request.block_hashes = hashes[: request.num_prompt_tokens // manager.block_pool.hash_block_size]
            try:
                return find(request, *args, **options)
            finally:
                request.block_hashes = hashes

        manager.coordinator.cache_blocks, manager.get_computed_blocks = cache_blocks, get_computed_blocks

    def add_request(self, request: Any) -> None:
        """Queue a request. Raises UserError if its input is streamed: vLLM would add its answers to its prompt."""
        if request.resumable and not self.is_uniform:
            raise UserError("skipdecode: input that streams into a request is not supported")
        super().add_request(request)  # type: ignore[misc]


class SkipScheduler(PromptCache, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler for ``async_scheduling=False``."""


class SkipAsyncScheduler(PromptCache, AsyncScheduler):  # type: ignore[misc]
    """vLLM's default (async) scheduler."""
