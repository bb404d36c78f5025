"""A plain callable class that answers batches of rows: columns in, the same columns and answers out.

    ds.map_batches(Generator, fn_constructor_kwargs={"checkpoint": "..."}, compute=ActorPoolStrategy(size=2))

It imports no ray. Rows are answered in batches of similar length under a budget of cache bytes; how they are
cut is a function of the rows given and the settings alone.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

import jinja2
import numpy as np

from actors.engine.batching import constant_prefix
from actors.engine.choices import ChoiceTrie
from actors.engine.errors import UserError
from actors.engine.loading import Checkpoint, inspect, load_decoder, load_tokenizer, memory_needed, stop_ids
from actors.engine.row_key import row_key
from actors.engine.stopping import StopStrings
from actors.engine.types import Completion, EngineName, EngineStats, FinishReason, Request, SamplingParams, TokenLogprob
from actors.engine.weights import check_free

if TYPE_CHECKING:
    import torch

KEPT_TRIES = 64
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """A row to answer.

    ids: tokens of the prompt. source, row: what its random numbers follow from, beside the seed. error: why it
    cannot be answered. sampling: its own parameters, on top of the Generator's. choices: its own labels.
    """

    ids: Sequence[int]
    source: str
    row: int
    error: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choices: Sequence[str] | None = None


@dataclass(frozen=True)
class Answer:
    """One answer to a row; a bad row has a single one, with an error and no text.

    row: place of its prompt among those given. cumulative_logprob, logprobs: see Completion.
    """

    row: int
    sample_index: int
    generated_text: str | None
    finish_reason: str
    prompt_tokens: int
    generated_tokens: int
    mean_depth: float | None
    error: str | None
    token_ids: list[int] | None
    cumulative_logprob: float | None
    logprobs: list[TokenLogprob] | None
    choice_probability: float | None


class Generator:
    """Holds one model on one device.

    checkpoint: folder. schedule: keys of a job's `schedule` section, on top of what the checkpoint stores.
    sampling: fields of SamplingParams. choices: labels; every answer is one of them. strip: take white space
    off both ends of a text. dtype: float32, bfloat16 or float16. device: auto, cpu or cuda. threads: torch
    threads on CPU. cache_bytes: key/value cache of the rows in flight. max_batch: of them. scheduler: lock_step, or
    refill: rows that have ended are replaced at once. compile: torch.compile the layers. engine: paged
    (on a GPU: fused layers, CUDA graphs and a paged cache, for the families that have fused layers), library (layers
    of transformers, on a CPU with kernels of this package) or auto (library). cumulative_logprob: tell it, which takes
    time. Raises ValueError of one line if these do not fit.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        schedule: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        choices: Sequence[str] | None = None,
        strip: bool = True,
        dtype: str = "bfloat16",
        device: str = "auto",
        threads: int | None = None,
        cache_bytes: int = 2**30,
        max_batch: int = 64,
        scheduler: str = "lock_step",
        compile: bool = False,
        engine: EngineName = "auto",
        cumulative_logprob: bool = True,
        seed: int = 0,
        prompt_column: str = "prompt",
    ) -> None:
        import torch

        from actors.engine.engine import Engine
        from actors.engine.scheduler import SCHEDULERS

        if scheduler not in SCHEDULERS:
            raise UserError(f"scheduler = {scheduler!r}: must be one of {', '.join(SCHEDULERS)}")
        if engine not in get_args(EngineName):
            raise UserError(f"engine = {engine!r}: must be one of {', '.join(get_args(EngineName))}")
        if compile and engine == "paged":
            raise UserError("compile and engine = 'paged' exclude each other: the paged engine has kernels of its own")
        if threads is not None:
            torch.set_num_threads(threads)
        found = inspect(checkpoint)
        self.schedule = found.schedule(dict(schedule or {}))
        self.sampling = SamplingParams().merged(dict(sampling or {}))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        paged = uses_pages(engine, found, self.device)
        needed = memory_needed(found, dtype, cache_bytes, on_gpu=on_gpu, paged_rows=max_batch if paged else 0)
        if on_gpu:
            check_free(needed, *torch.cuda.mem_get_info(self.device))
        decoder = load_decoder(checkpoint, getattr(torch, dtype), self.device)
        if compile:
            decoder.compile()
        elif paged:
            from actors.engine.gpu import kernels

            decoder.prepare_for_gpu(kernels)
        else:
            decoder.prepare_for_cpu()
        self.tokenizer = load_tokenizer(checkpoint)
        ends = stop_ids(decoder, self.tokenizer)
        self.engine: Engine
        if paged:
            from actors.engine.gpu.engine import GpuEngine

            self.engine = GpuEngine(
                decoder,
                self.schedule,
                ends,
                budget_bytes=cache_bytes,
                max_rows=max_batch,
                cumulative_logprob=cumulative_logprob,
            )
        else:
            self.engine = Engine(decoder, self.schedule, ends, cumulative_logprob=cumulative_logprob)
        self.special_ids = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        self.strip = strip
        self.cache_bytes = cache_bytes
        self.max_batch = max_batch
        self.scheduler = scheduler
        self.seed = seed
        self.prompt_column = prompt_column
        self._tries: dict[tuple[str, ...], ChoiceTrie] = {}
        self.choices = None if choices is None else tuple(choices)
        if self.choices is not None:
            self._trie(self.choices)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns of a batch, with a column of prompts -> the same columns and the answers' columns.

        A prompt is text, a list of token ids, or a list of messages for the checkpoint's chat template. A row's
        random numbers follow from seed and prompt, so that batches may be cut in any way. Where n is above 1, a
        row comes back n times. A chat template runs in transformers' own sandbox, which bounds neither its time nor
        its memory.
        """
        prompts = [self._prompt(value) for value in batch[self.prompt_column]]
        answers = self.answer(prompts, constant_prefix([one.ids for one in prompts if one.error is None]))
        rows = [one.row for one in answers]
        columns = {name: np.asarray(values)[rows] for name, values in batch.items()}
        for name in ("sample_index", "prompt_tokens", "generated_tokens"):
            columns[name] = np.array([getattr(one, name) for one in answers])
        for name in ("generated_text", "finish_reason", "error"):
            columns[name] = np.array([getattr(one, name) for one in answers], dtype=object)
        floats = ("mean_depth", "cumulative_logprob", *(("choice_probability",) if self.choices else ()))
        for name in floats:
            columns[name] = np.array([getattr(one, name) for one in answers], dtype=float)
        if self.sampling.logprobs is not None:
            columns["logprobs"] = np.empty(len(answers), dtype=object)
            for place, one in enumerate(answers):
                columns["logprobs"][place] = [token.to_dict() for token in one.logprobs or ()]
        return columns

    def _prompt(self, value: Any) -> Prompt:
        """A value of a prompt column, whatever its kind."""
        ids: list[int] = []
        error = None
        try:
            if isinstance(value, str) and value.strip():
                ids = self.tokenizer(value)["input_ids"]
            elif value is None or isinstance(value, str) or len(value) == 0:
                error = "prompt is null or empty"
            elif isinstance(value[0], Mapping):
                text = self.tokenizer.apply_chat_template(list(value), tokenize=False, add_generation_prompt=True)
                ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            elif all(token == int(token) >= 0 for token in value):
                ids = [int(token) for token in value]
            else:
                error = "prompt holds what is no token id"
        # what a value of any kind, or a chat template, may raise
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            error = f"prompt cannot be read: {' '.join(str(problem).split())}"
        return Prompt(ids, f"prompt:{ids}", 0, error)

    def answer(
        self,
        prompts: Sequence[Prompt],
        prefix: Sequence[int] = (),
        on_batch: Callable[[Sequence[int]], None] | None = None,
    ) -> list[Answer]:
        """Answer rows, each `n` times, in their order; rows that come with an error are passed by.

        prefix: token ids with which most of them begin; computed once. on_batch: told the rows that may be in flight
        until it is told again, before they are, and none when all have run.
        """
        from actors.engine.scheduler import generate

        requests: list[Request] = []
        owners: list[int] = []
        errors: dict[int, str] = {}
        for row, prompt in enumerate(prompts):
            try:
                wanted = self._requests(prompt)
            except ValueError as problem:
                errors[row] = str(problem)
                continue
            requests += wanted
            owners += [row] * len(wanted)

        def tell(places: Sequence[int]) -> None:
            if on_batch is not None:
                on_batch(sorted({owners[place] for place in places}))

        done = generate(
            self.engine,
            requests,
            budget_bytes=self.cache_bytes,
            max_rows=self.max_batch,
            prefix=list(prefix),
            scheduler=self.scheduler,
            on_batch=tell,
        )
        tell(())
        # one sample that does not fit the memory makes its row a bad one, which has a single answer
        errors |= {row: one.error for row, one in zip(owners, done, strict=True) if one.error is not None}
        answers = [_bad(row, len(prompts[row].ids), error) for row, error in errors.items()]
        samples: Counter[int] = Counter()
        for row, request, completion in zip(owners, requests, done, strict=True):
            if row in errors:
                continue
            count = len(completion.token_ids)
            answers.append(
                Answer(
                    row=row,
                    sample_index=samples[row],
                    generated_text=self._text(prompts[row], request, completion),
                    finish_reason=str(completion.finish_reason),
                    prompt_tokens=len(request.prompt_ids),
                    generated_tokens=count,
                    mean_depth=self.schedule.mean_depth(count),
                    error=None,
                    token_ids=list(completion.token_ids),
                    cumulative_logprob=completion.cumulative_logprob,
                    logprobs=None if completion.logprobs is None else list(completion.logprobs),
                    choice_probability=completion.choice_probability,
                )
            )
            samples[row] += 1
        return sorted(answers, key=lambda one: (one.row, one.sample_index))

    def _requests(self, prompt: Prompt) -> list[Request]:
        """The row's samples as the engine's requests; ValueError says why it cannot be answered."""
        if prompt.error is not None:
            raise UserError(prompt.error)
        try:
            params = self.sampling.merged(prompt.sampling)
        except ValueError as problem:
            raise UserError(f"sampling: {problem}") from None
        if params.logprobs is not None and self.sampling.logprobs is None:
            raise UserError("sampling: logprobs: set it for the whole job too (0 will do), so that there is a column")
        vocabulary = self.engine.decoder.vocab_size
        for name, ids in (("sampling: stop_token_ids", params.stop_token_ids), ("prompt", prompt.ids)):
            if ids and max(ids) >= vocabulary:
                raise UserError(f"{name}: token {max(ids)} lies outside the model's vocabulary of {vocabulary}")
        special = [self.special_ids[one] for one in params.stop if one in self.special_ids]
        if special:  # they decode to nothing, where no string can be found
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *special))
        labels = self.choices if prompt.choices is None else tuple(prompt.choices)
        trie = None if labels is None else self._trie(labels)
        for name in ("stop", "stop_token_ids", "min_new_tokens", "ignore_eos"):
            if trie is not None and getattr(params, name):
                raise UserError(f"choices do not go with sampling.{name}: a label ends where it ends")
        ending = None
        if params.stop:
            ending = StopStrings(params.stop, self._decode, self.special_ids.values(), params.min_new_tokens)
        seed = self.seed if params.seed is None else params.seed
        requests = [
            Request(prompt.ids, params, row_key(seed, prompt.source, prompt.row, sample), ending, trie)
            for sample in range(params.n)
        ]
        needed = self.engine.row_bytes(len(prompt.ids), self.engine.new_tokens_limit(requests[0]))
        if needed > self.cache_bytes:
            raise UserError(f"needs {needed} bytes of cache, more than the budget of {self.cache_bytes}")
        return requests

    def _trie(self, labels: tuple[str, ...]) -> ChoiceTrie:
        """The labels' trie; the last few are kept. ValueError if they cannot be told apart."""
        if labels not in self._tries:
            ids = [self.tokenizer(label, add_special_tokens=False)["input_ids"] for label in labels]
            vocabulary = self.engine.decoder.vocab_size
            wrong = [label for label, one in zip(labels, ids, strict=True) if one and max(one) >= vocabulary]
            if wrong:
                raise UserError(f"choices: {wrong[0]!r} holds a token outside the model's vocabulary of {vocabulary}")
            stops = self.engine.stop_ids
            eos = self.tokenizer.eos_token_id
            try:
                trie = ChoiceTrie(ids, eos if eos in stops else min(stops, default=None))
            except ValueError as problem:
                raise UserError(f"choices: {problem} (counted from 0)") from None
            if len(self._tries) >= KEPT_TRIES:
                self._tries.clear()
            self._tries[labels] = trie
        return self._tries[labels]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _text(self, prompt: Prompt, request: Request, completion: Completion) -> str:
        """The answer's text, without the stop token or string that ended it; a label as it was given."""
        if completion.choice is not None:
            labels = self.choices if prompt.choices is None else prompt.choices
            assert labels is not None
            return labels[completion.choice]
        tokens = list(completion.token_ids)
        if completion.finish_reason == FinishReason.STOP and tokens[-1] in self.engine.stop_ids_of(request.sampling):
            tokens.pop()
        text = self._decode(tokens) if request.ending is None else request.ending.cut(tokens)
        return text.strip() if self.strip else text

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


def uses_pages(engine: EngineName, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether the paged engine runs the checkpoint; logs why not, where it was asked for."""
    if engine != "paged":
        return False
    if device.type != "cuda":
        log.warning("engine: library in place of paged, which needs a GPU")
    elif not checkpoint.has_pages:
        family = checkpoint.config.model_type
        log.warning("engine: library in place of paged, which has no fused layers for %s models", family)
    return device.type == "cuda" and checkpoint.has_pages


def _bad(row: int, prompt_tokens: int, error: str) -> Answer:
    """The one answer of a row that cannot be answered."""
    return Answer(row, 0, None, str(FinishReason.ERROR), prompt_tokens, 0, None, error, None, None, None, None)
