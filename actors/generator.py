"""A plain callable class that answers batches of rows: columns in, the same columns and answers out.

    ds.map_batches(Generator, fn_constructor_kwargs={"checkpoint": "..."}, compute=ActorPoolStrategy(size=2))

It imports no ray. Rows are answered in batches of similar length under a budget of cache bytes; how they are
cut is a function of the rows given and the settings alone.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine.loading import inspect, load_decoder, load_tokenizer, stop_ids
from actors.engine.types import Completion, EngineStats, FinishReason, Request, SamplingParams


@dataclass(frozen=True)
class Answers:
    """Answers to rows, in their order; a bad row has an error and no text."""

    texts: list[str | None]
    finish_reasons: list[str]
    prompt_tokens: list[int]
    generated_tokens: list[int]
    mean_depths: list[float | None]
    errors: list[str | None]
    token_ids: list[list[int]]
    cumulative_logprobs: list[float | None]


class Generator:
    """Holds one model on one device.

    checkpoint: folder. schedule: keys of a job's `schedule` section, on top of what the checkpoint stores.
    sampling: max_new_tokens, temperature, top_k, top_p. dtype: float32, bfloat16 or float16. device: auto,
    cpu or cuda. threads: torch threads on CPU. cache_bytes: key/value cache of one batch. max_batch: rows of
    one batch. compile: torch.compile the layers. Raises ValueError of one line if these do not fit.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        schedule: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int | None = None,
        cache_bytes: int = 2**30,
        max_batch: int = 64,
        compile: bool = False,
        seed: int = 0,
        prompt_column: str = "prompt",
    ) -> None:
        import torch

        from actors.engine.engine import Engine

        if threads is not None:
            torch.set_num_threads(threads)
        found = inspect(checkpoint)
        self.schedule = found.schedule(dict(schedule or {}))
        self.sampling = SamplingParams(**dict(sampling or {}))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        decoder = load_decoder(checkpoint, getattr(torch, dtype), self.device)
        if compile:
            decoder.compile()
        self.tokenizer = load_tokenizer(checkpoint)
        self.engine = Engine(decoder, self.schedule, stop_ids(decoder, self.tokenizer))
        self.cache_bytes = cache_bytes
        self.max_batch = max_batch
        self.seed = seed
        self.prompt_column = prompt_column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns of a batch, with a column of prompts (text) -> the same columns and the answers' columns.

        A row's random numbers follow from seed and prompt, so that batches may be cut in any way.
        """
        prompts = [None if value is None else str(value) for value in batch[self.prompt_column]]
        ids = [self.tokenizer(prompt)["input_ids"] if prompt else [] for prompt in prompts]
        errors = [None if tokens else "prompt is null or empty" for tokens in ids]
        keys = [_prompt_key(self.seed, prompt or "") for prompt in prompts]
        answers = self.answer(ids, errors, keys)
        return {
            **batch,
            "generated_text": np.array(answers.texts, dtype=object),
            "finish_reason": np.array(answers.finish_reasons, dtype=object),
            "prompt_tokens": np.array(answers.prompt_tokens),
            "generated_tokens": np.array(answers.generated_tokens),
            "mean_depth": np.array(answers.mean_depths, dtype=float),
            "error": np.array(answers.errors, dtype=object),
        }

    def answer(self, prompt_ids: Sequence[Sequence[int]], errors: Sequence[str | None], keys: Sequence[int]) -> Answers:
        """Answer rows given as token ids; rows that come with an error are passed by.

        keys: 64-bit, a row's random numbers follow from its own.
        """
        problems = list(errors)
        requests: dict[int, Request] = {}
        for row, ids in enumerate(prompt_ids):
            if problems[row] is not None:
                continue
            request = Request(ids, self.sampling, keys[row])
            try:
                needed = self.engine.row_bytes(len(ids), self.engine.new_tokens_limit(request))
            except ValueError as error:
                problems[row] = str(error)
                continue
            if needed > self.cache_bytes:
                problems[row] = f"needs {needed} bytes of cache, more than the budget of {self.cache_bytes}"
            else:
                requests[row] = request
        done = self.engine.generate(list(requests.values()), budget_bytes=self.cache_bytes, max_rows=self.max_batch)
        found: dict[int, Completion] = dict(zip(requests, done, strict=True))
        texts = [str(self.tokenizer.decode(list(one.token_ids), skip_special_tokens=True)) for one in done]
        decoded = {row: text.strip() for row, text in zip(requests, texts, strict=True)}
        rows = range(len(prompt_ids))
        counts = [len(found[row].token_ids) if row in found else 0 for row in rows]
        return Answers(
            texts=[decoded.get(row) for row in rows],
            finish_reasons=[str(found[row].finish_reason if row in found else FinishReason.ERROR) for row in rows],
            prompt_tokens=[len(ids) for ids in prompt_ids],
            generated_tokens=counts,
            mean_depths=[self.schedule.mean_depth(count) for count in counts],
            errors=problems,
            token_ids=[list(found[row].token_ids) if row in found else [] for row in rows],
            cumulative_logprobs=[found[row].cumulative_logprob if row in found else None for row in rows],
        )

    def take_stats(self) -> EngineStats:
        """What the engine has counted since the last call."""
        return self.engine.take_stats()

    def peak_memory_bytes(self) -> int:
        """Largest memory so far: of the GPU if there is one, else of this process."""
        if self.device.type == "cuda":
            import torch

            return int(torch.cuda.max_memory_allocated(self.device))
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def device_name(self) -> str:
        """For the statistics: the GPU's name, or cpu, and in brackets the GPUs this process may see."""
        name = "cpu"
        if self.device.type == "cuda":
            import torch

            name = torch.cuda.get_device_name(self.device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"{name} [{visible}]" if visible else name


def _prompt_key(seed: int, prompt: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{prompt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
